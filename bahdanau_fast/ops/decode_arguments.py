"""What a recurrent decoder takes for all its steps; sizes and gates as in :mod:`ops.decode`.

:class:`DecoderInputs` are weights as torch's layers have them; :func:`operator_arguments` makes
:class:`Arguments` of them, with gates in the order of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Consecutive rows of a new tensor: all rows of another one, or the sum of two.
RowBlock = Tensor | tuple[Tensor, Tensor]

#: The operators of a device take F, Dv and H as multiples of this, padded with zeros.
MULTIPLES = {"cuda": 32}


def padded_size(size: int, device: str) -> int:
    """F, Dv or H with the padding that the operators of a type of device need."""
    multiple = MULTIPLES.get(device, 1)
    return -(-size // multiple) * multiple


class Arguments(NamedTuple):
    """What the operators take, in one dtype; gates in the order of :mod:`ops.decode`."""

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
    # (L,4H), in the first layer's first G the input_bias: an LSTM's all; a GRU's n r z, and then n
    # of the hidden side.
    bias: Tensor


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
    def from_flat(cls, tensors: Iterable[Tensor | None], layers: int) -> DecoderInputs:
        """The reverse of :meth:`flat`."""
        flat = [*tensors]
        first = len(cls._fields) - 1
        count = (len(flat) - first) // layers
        of_layers = zip(*[iter(flat[first:])] * count, strict=True)
        return cls(*flat[:first], tuple(of_layers))  # type: ignore[arg-type, call-arg]

    def padded(self) -> DecoderInputs:
        """Inputs of one layer with F, Dv and H of the operators; the padding stays zero."""
        a, units = self, self.hidden.shape[2]
        if a.keys.device.type not in MULTIPLES:
            return self
        sizes = a.keys.shape[2], a.values.shape[2], units
        # The padding of F, Dv and H.
        f, v, h = (padded_size(size, a.keys.device.type) - size for size in sizes)
        if not (f or v or h):
            return self

        def pad_gates(x: Tensor, *columns: int) -> Tensor:
            return F.pad(x.unflatten(0, (len(x) // units, units)), (*columns, 0, h)).flatten(0, 1)

        ((w_ih, w_hh, *biases),) = a.layers
        context, rest = w_ih.split([sizes[1], w_ih.shape[1] - sizes[1]], 1)
        w_ih = torch.cat((F.pad(context, (0, v)), rest), 1)
        weights = pad_gates(w_ih, 0, 0), pad_gates(w_hh, 0, h)
        return a._replace(
            hidden=F.pad(a.hidden, (0, h)),
            cell=None if a.cell is None else F.pad(a.cell, (0, h)),
            keys=F.pad(a.keys, (0, f)),
            values=F.pad(a.values, (0, v)),
            w_query=F.pad(a.w_query, (0, h, 0, f)),
            w_v=F.pad(a.w_v, (0, f)),
            layers=((*weights, *map(pad_gates, biases)),),
        )

    def in_operator_order(self, dtype: torch.dtype, concat: Callable[..., Tensor]) -> Arguments:
        """In one dtype, gates in the operators' order; ``concat`` makes tensors of row blocks."""
        tensors: list[Any] = [x if x is None or x.dtype is dtype else concat(x) for x in self[:-1]]
        inputs, hidden, cell, keys, values, w_query, w_v = tensors
        layers, lstm = self.layers, cell is not None
        units, value_size = hidden.shape[2], values.shape[2]
        r_and_z = 2 * units  # of a GRU, the rows in front of n

        def blocks(w: Tensor) -> tuple[Tensor, ...]:
            return (w,) if lstm else (w[r_and_z:], w[:r_and_z])

        def ordered(w: Tensor) -> Tensor:
            return w if lstm and w.dtype is dtype else concat(*blocks(w))

        w_first, w_hidden, *_ = layers[0]
        if keys.is_cpu:  # whose products take rows without gaps
            w_context = ordered(w_first[:, :value_size]).contiguous()
            w_inputs = ordered(w_first[:, value_size:]).contiguous()
        else:
            w_first = ordered(w_first)
            w_context, w_inputs = w_first[:, :value_size], w_first[:, value_size:]
        if len(layers) > 1 or w_hidden.dtype is not dtype:
            w_hidden = concat(*(w_hh for _, w_hh, *_ in layers))
        w_input = w_hidden[:0]
        if len(layers) > 1:
            w_input = concat(*(block for w_ih, *_ in layers[1:] for block in blocks(w_ih)))
        bias_blocks: list[RowBlock] = []
        for _, _, *biases in layers:
            if not biases:
                bias_blocks.append(w_first.new_zeros(4 * units))
            elif lstm:
                bias_blocks.append((biases[0], biases[1]))
            else:
                b_ih, b_hh = biases
                r_z = b_ih[:r_and_z], b_hh[:r_and_z]
                bias_blocks += [b_ih[r_and_z:], r_z, b_hh[r_and_z:]]
        bias, gates = concat(*bias_blocks).view(len(layers), 4 * units), len(w_first)
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


def concat_rows(dtype: torch.dtype, *blocks: RowBlock) -> Tensor:
    """A tensor of row blocks, in a dtype."""
    cast = []
    for block in blocks:
        x = block if isinstance(block, Tensor) else block[0] + block[1]
        cast.append(x if x.dtype is dtype else x.to(dtype))
    return cast[0] if len(cast) == 1 else torch.cat(cast)


class _BatchedConcat:
    """As :func:`concat_rows`, of many tensors by one foreach call at the end; without gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._added: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *blocks: RowBlock) -> Tensor:
        """A tensor that :meth:`fill` will write."""
        pairs = [(x, None) if isinstance(x, Tensor) else x for x in blocks]
        lengths, like = [len(x) for x, _ in pairs], pairs[0][0]
        result = like.new_empty((sum(lengths), *like.shape[1:]), dtype=self._dtype)
        for target, (source, more) in zip(result.split(lengths), pairs, strict=True):
            self._targets.append(target)
            self._sources.append(source)
            if more is not None:
                self._added.append((target, more))
        return result

    def fill(self) -> None:
        """Write all tensors."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, more in self._added:
            target.add_(more)


def operator_arguments(inputs: DecoderInputs, dtype: torch.dtype) -> Arguments:
    """What the operators take; on a GPU by :class:`_BatchedConcat`, which autograd does not see."""
    if inputs.keys.is_cpu:
        return inputs.in_operator_order(dtype, partial(concat_rows, dtype))
    concat = _BatchedConcat(dtype)
    arguments = inputs.in_operator_order(dtype, concat)
    concat.fill()
    return arguments


def cast_gradients(tensors: Sequence[Any], grads: list[Any]) -> list[Tensor | None]:
    """Gradients in the dtypes of their tensors, converted in one launch for a dtype."""
    casts: dict[torch.dtype, _BatchedConcat] = {}
    for i, (x, grad) in enumerate(zip(tensors, grads, strict=True)):
        if grad is not None and grad.dtype != x.dtype:
            cast = casts.get(x.dtype) or casts.setdefault(x.dtype, _BatchedConcat(x.dtype))
            grads[i] = cast(grad)
    for cast in casts.values():
        cast.fill()
    return grads


class Dtypes(NamedTuple):
    """The dtypes of a decoder."""

    operators: torch.dtype
    states: torch.dtype  # of the results
    weights: torch.dtype  # of the results


class NonDifferentiable(NamedTuple):
    """The other inputs of :func:`decode`."""

    table: Tensor | None = None  # of ops.exp_keys
    keys_max: Tensor | None = None  # likewise
    valid_lens: Tensor | None = None  # (B,)
    mask: Tensor | None = None  # bool (B,1,Tk)
    masks: Tensor | None = None  # (L-1,T,B,H), of dropout between the layers
    seed: Tensor | None = None  # (1,) int64, with dropout of the attention weights
    dropout_p: float = 0.0


class OutputLayer(NamedTuple):
    """The layer that computes the logits of the tokens."""

    weight: Tensor  # (V,H)
    bias: Tensor  # (V,)


class SpecialTokens(NamedTuple):
    """Tokens around a sentence: the first input, the one that ends a row, and those behind it."""

    bos: int
    eos: int
    pad: int


class StepResults(NamedTuple):
    """The results of the operator ``decode``."""

    states: Tensor  # (L,T+1,B,H), the first states in front
    cells: Tensor  # (L,T+1,B,H) of an LSTM, else without layers
    contexts: Tensor  # (T,B,Dv); without keep contexts, queries and gates are of the last step
    queries: Tensor  # (T,B,F)
    weights: Tensor  # (T,B,Tk)
    gates: Tensor  # (L,T,B,4H); of a loop on a GPU the workspaces of torch's cells


class StepGrads(NamedTuple):
    """The gradients that a backward through all steps computes."""

    gates: Tensor  # (L,T,B,4H)
    hidden: Tensor  # (L,B,H), of the first states
    cell: Tensor  # (L,B,H)
    queries: Tensor  # (T,B,F)
    keys: Tensor
    values: Tensor
    w_v: Tensor
