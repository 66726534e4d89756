"""What a recurrent decoder takes for all its steps; sizes and gates as in :mod:`ops.decode`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Arguments",
    "Copies",
    "DecoderInputs",
    "Dtypes",
    "NonDifferentiable",
    "OutputLayer",
    "SpecialTokens",
    "StepGrads",
    "StepResults",
    "arranged",
    "in_dtypes_of",
    "join",
    "padded",
]

#: Rows of a new tensor: the rows of another, or the sum of two.
Rows = Tensor | tuple[Tensor, Tensor]

#: The operators of a device take F, Dv and H as multiples of this, padded with zeros.
MULTIPLES = {"cuda": 32}


def padded(size: int, device: str) -> int:
    """A size as an operator of such a device takes it."""
    multiple = MULTIPLES.get(device, 1)
    return -(-size // multiple) * multiple


class Arguments(NamedTuple):
    """What the operators take, in one dtype."""

    inputs: Tensor  # (T,B,E); greedily the embedding (V,E)
    w_inputs: Tensor  # (G,E), of the first layer
    input_bias: Tensor  # (G,), of the first layer
    hidden: Tensor  # (L,B,H), the first states
    cell: Tensor | None  # (L,B,H) of an LSTM, None for a GRU
    keys: Tensor  # (B,Tk,F), projected
    values: Tensor  # (B,Tk,Dv)
    w_query: Tensor  # (F,H)
    w_v: Tensor  # (1,F) or (F,)
    w_context: Tensor  # (G,Dv)
    w_input: Tensor  # (L-1,G,H), of the layers above the first
    w_hidden: Tensor  # (L,G,H)
    bias: Tensor  # (L,4H), of all the gates; of the first layer what input_bias leaves out


class DecoderInputs(NamedTuple):
    """The differentiable inputs of :func:`decode`; fields as in :class:`Arguments`."""

    inputs: Tensor
    hidden: Tensor
    cell: Tensor | None
    keys: Tensor
    values: Tensor
    w_query: Tensor
    w_v: Tensor
    # A layer of torch has weight_ih (G,Dv+E), above the first (G,H), and weight_hh (G,H); then
    # bias_ih and bias_hh (G,), if it has biases.
    layers: tuple[tuple[Tensor, ...], ...]

    def flat(self) -> tuple[Tensor | None, ...]:
        """All tensors, the weights of the layers last."""
        return (*self[:-1], *chain.from_iterable(self.layers))

    @classmethod
    def of_flat(cls, tensors: Iterable[Tensor | None], layers: int) -> DecoderInputs:
        """The reverse of :meth:`flat`."""
        flat = [*tensors]
        first = len(cls._fields) - 1
        count = (len(flat) - first) // layers
        of_layers = zip(*[iter(flat[first:])] * count, strict=True)
        return cls(*flat[:first], tuple(of_layers))  # type: ignore[arg-type, call-arg]

    def padded(self) -> DecoderInputs:
        """Inputs of one layer with F, Dv and H of the operators; the padding stays zero."""
        a, units = self, self.hidden.shape[2]
        if self.keys.device.type not in MULTIPLES:
            return self
        sizes = a.keys.shape[2], a.values.shape[2], units
        f, v, h = (padded(size, a.keys.device.type) - size for size in sizes)
        if not (f or v or h):
            return self

        def pad_gates(x: Tensor, *more: int) -> Tensor:
            return F.pad(x.unflatten(0, (len(x) // units, units)), (*more, 0, h)).flatten(0, 1)

        ((of_inputs, of_states, *biases),) = a.layers
        context, rest = of_inputs.split([sizes[1], of_inputs.shape[1] - sizes[1]], 1)
        of_inputs = torch.cat((F.pad(context, (0, v)), rest), 1)
        weights = pad_gates(of_inputs, 0, 0), pad_gates(of_states, 0, h)
        return DecoderInputs(
            inputs=a.inputs,
            hidden=F.pad(a.hidden, (0, h)),
            cell=None if a.cell is None else F.pad(a.cell, (0, h)),
            keys=F.pad(a.keys, (0, f)),
            values=F.pad(a.values, (0, v)),
            w_query=F.pad(a.w_query, (0, h, 0, f)),
            w_v=F.pad(a.w_v, (0, f)),
            layers=((*weights, *map(pad_gates, biases)),),
        )

    def arranged(self, dtype: torch.dtype, join: Callable[..., Tensor]) -> Arguments:
        """In one dtype and the operators' order of gates; ``join`` makes tensors of rows."""
        tensors: list[Any] = [x if x is None or x.dtype is dtype else join(x) for x in self[:-1]]
        inputs, hidden, cell, keys, values, w_query, w_v = tensors
        lstm, units, features, layers = (
            cell is not None,
            hidden.shape[2],
            values.shape[2],
            self.layers,
        )
        split = 2 * units

        def ordered(w: Tensor) -> tuple[Tensor, ...]:
            return (w,) if lstm else (w[split:], w[:split])

        def of_layer(w: Tensor) -> Tensor:
            return w if lstm and w.dtype is dtype else join(*ordered(w))

        first = layers[0][0]
        if keys.is_cpu:  # whose products take rows without gaps
            w_context = of_layer(first[:, :features]).contiguous()
            w_inputs = of_layer(first[:, features:]).contiguous()
        else:
            first = of_layer(first)
            w_context, w_inputs = first[:, :features], first[:, features:]
        w_hidden = layers[0][1]
        if len(layers) > 1 or w_hidden.dtype is not dtype:
            w_hidden = join(*(of_states for _, of_states, *_ in layers))
        w_input = w_hidden[:0]
        if len(layers) > 1:
            w_input = join(*(part for w, *_ in layers[1:] for part in ordered(w)))
        rows: list[Rows] = []
        for _, _, *biases in layers:
            if not biases:
                rows.append(first.new_zeros(2 * split))
            elif lstm:
                rows.append((biases[0], biases[1]))
            else:
                x, y = biases
                rows += [x[split:], (x[:split], y[:split]), y[split:]]
        bias, gates = join(*rows).view(len(layers), 2 * split), len(first)
        return Arguments(
            inputs=inputs,
            w_inputs=w_inputs,
            input_bias=bias[0, :gates],
            hidden=hidden.contiguous(),
            cell=None if cell is None else cell.contiguous(),
            keys=keys,
            values=values,
            w_query=w_query.contiguous(),
            w_v=w_v,
            w_context=w_context,
            w_input=w_input.view(len(layers) - 1, gates, units),
            w_hidden=w_hidden.view(len(layers), gates, units),
            bias=bias,
        )


def join(dtype: torch.dtype, *rows: Rows) -> Tensor:
    """A tensor of rows, in a dtype."""
    cast = []
    for part in rows:
        x = part if isinstance(part, Tensor) else part[0] + part[1]
        cast.append(x if x.dtype is dtype else x.to(dtype))
    return cast[0] if len(cast) == 1 else torch.cat(cast)


class Copies:
    """Makes the tensors of :func:`join`, without gradients; one foreach call copies all rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._added: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *rows: Rows) -> Tensor:
        """Empty until :meth:`fill`."""
        pairs = [(x, None) if isinstance(x, Tensor) else x for x in rows]
        lengths, like = [len(x) for x, _ in pairs], pairs[0][0]
        result = like.new_empty((sum(lengths), *like.shape[1:]), dtype=self._dtype)
        for target, (source, more) in zip(result.split(lengths), pairs, strict=True):
            self._targets.append(target)
            self._sources.append(source)
            if more is not None:
                self._added.append((target, more))
        return result

    def fill(self) -> None:
        """Copy all rows."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, more in self._added:
            target.add_(more)


def arranged(inputs: DecoderInputs, dtype: torch.dtype) -> Arguments:
    """What the operators take; on a GPU by :class:`Copies`, outside of the autograd graph."""
    if inputs.keys.is_cpu:
        return inputs.arranged(dtype, partial(join, dtype))
    copies = Copies(dtype)
    arguments = inputs.arranged(dtype, copies)
    copies.fill()
    return arguments


def in_dtypes_of(tensors: Sequence[Any], grads: list[Any]) -> list[Tensor | None]:
    """Gradients in the dtypes of their tensors, converted in one launch for a dtype."""
    others = {
        i: x.dtype
        for i, (x, grad) in enumerate(zip(tensors, grads, strict=True))
        if grad is not None and grad.dtype != x.dtype
    }
    for dtype in {*others.values()}:
        copies = Copies(dtype)
        for i in [i for i, of in others.items() if of == dtype]:
            grads[i] = copies(grads[i])
        copies.fill()
    return grads


class Dtypes(NamedTuple):
    """The dtypes of a decoder."""

    operators: torch.dtype
    states: torch.dtype  # of the results
    weights: torch.dtype  # of the results


class NonDifferentiable(NamedTuple):
    """The other inputs of :func:`decode`."""

    table: Tensor | None = None  # of ops.exp_keys
    keys_max: Tensor | None = None  # of ops.exp_keys
    valid_lens: Tensor | None = None  # (B,)
    mask: Tensor | None = None  # bool (B,1,Tk)
    masks: Tensor | None = None  # (L-1,T,B,H), factors on what goes from layer to layer
    seed: Tensor | None = None  # (1,) int64, with dropout of the attention weights
    dropout_p: float = 0.0


class OutputLayer(NamedTuple):
    """The layer that scores tokens."""

    weight: Tensor  # (V,H)
    bias: Tensor  # (V,)


class SpecialTokens(NamedTuple):
    """Tokens around a sentence."""

    bos: int  # the first input
    eos: int  # ends a row
    pad: int  # behind the end


class StepResults(NamedTuple):
    """The results of the operator ``decode``."""

    states: Tensor  # (L,T+1,B,H), the first states in front
    cells: Tensor  # (L,T+1,B,H) of an LSTM, else without layers
    contexts: Tensor  # (T,B,Dv); as queries and gates, of the last step alone without keep
    queries: Tensor  # (T,B,F)
    weights: Tensor  # (T,B,Tk)
    gates: Tensor  # (L,T,B,4H); of a loop on a GPU what the backward of torch's cells takes


class StepGrads(NamedTuple):
    """The gradients that a backward through all steps computes."""

    gates: Tensor  # (L,T,B,4H)
    hidden: Tensor  # (L,B,H), of the first states
    cell: Tensor  # (L,B,H)
    queries: Tensor  # (T,B,F)
    keys: Tensor
    values: Tensor
    w_v: Tensor
