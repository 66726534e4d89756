"""What :mod:`ops.decode` computes, on GPUs: torch's products and cells, and the step kernel.

A step is its launches alone, forward with one layer two products, the attention and the cell: no
module and no node of the autograd graph is around them. What no step waits for is in front of the
loop or behind it, as one product over all steps.

The cells are the kernels that ``nn.GRUCell`` and ``nn.LSTMCell`` launch on a GPU. A GRU's gates are
in the order of those kernels here, r z n on both sides; arguments and results have the order of
:mod:`ops.decode`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast.ops.attention import NEED, attention, attention_backward
from bahdanau_fast.ops.decode_arguments import (
    Arguments,
    NonDifferentiable,
    OutputLayer,
    SpecialTokens,
    StepGrads,
    StepResults,
)
from bahdanau_fast.ops.operator import NUMBERS

__all__ = ["backward", "forward", "without", "write"]

_aten = torch.ops.aten
# Steps whose keys are differentiated together: either backend takes so many queries.
_TOGETHER = 16
# From the seed of a step to the seed of the next, as on the CPU.
_NEXT_SEED = 0x9E3779B97F4A7C15 - 2**64


def _attention_arguments(
    backend: str, arguments: Arguments, constants: NonDifferentiable
) -> dict[str, Any]:
    """What all launches of a decoder's attention take, forward and backward, by name."""
    return {
        "keys": arguments.keys,
        "values": arguments.values,
        "w_v": arguments.w_v,
        "valid_lens": constants.valid_lens,
        "mask": constants.mask,
        "dropout_p": constants.dropout_p,
        "backend": NUMBERS.get(backend, 0),
    }


class _Loop:
    """Takes steps and collects their results."""

    def __init__(
        self, backend: str, arguments: Arguments, constants: NonDifferentiable, keep: bool
    ) -> None:
        a = arguments
        self._masks, self._keep = constants.masks, keep
        self._attend = attention.kernel(backend)
        self._attention_arguments = _attention_arguments(backend, a, constants)
        *below, top = a.w_hidden.unbind(0)
        # The top layer's state is multiplied once, for the queries and for its gates.
        self._w_hidden = [*below, torch.cat((a.w_query, top))]
        self._w_inputs = [w.t() for w in _input_weights(a)]  # by layer
        lstm, units, side = a.cell is not None, a.hidden.shape[2], a.w_hidden.shape[1]
        self._sides = [len(a.w_query), side]
        self._bias = _as_in_cells(a.bias[:, :side], lstm).unbind(0)  # above the first layer
        self._bias_hidden: list[Tensor | None] = [None] * len(a.w_hidden)
        if not lstm:  # of the new gate
            *others, last = F.pad(a.bias[:, side:], (2 * units, 0)).unbind(0)
            self._bias_hidden = [*others, F.pad(last, (len(a.w_query), 0))]
        self.states = [[h] for h in a.hidden.unbind(0)]
        self.cells = [] if a.cell is None else [[c] for c in a.cell.unbind(0)]
        self.spaces: list[list[Tensor]] = [[] for _ in self.states]
        self.contexts: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.weights: list[Tensor] = []

    def step(self, input_gates: Tensor, seed: Tensor | None) -> Tensor:
        """The top layer's new state (B,H), from gates (B,G) in the order of the cells."""
        t = len(self.weights)
        queries, top = self._through(-1).split(self._sides, 1)
        queries = queries.unsqueeze(1)
        call = attention.arguments(
            queries=queries, seed=seed, precise=False, **self._attention_arguments
        )
        context, weights, *_ = self._attend(*call)
        self.weights.append(weights)
        if self._keep:
            self.contexts.append(context.squeeze(1))
            self.queries.append(queries.squeeze(1))
        below: Tensor = context.squeeze(1)
        for i in range(len(self.states)):
            if i and self._masks is not None:
                below = below * self._masks[i - 1, t]
            into = self._bias[i] if i else input_gates
            through = top if i + 1 == len(self.states) else self._through(i)
            below = self._cell(i, torch.addmm(into, below, self._w_inputs[i]), through)
        return below

    def _through(self, i: int) -> Tensor:
        """The products of a layer's state before the step."""
        return F.linear(self.states[i][-1], self._w_hidden[i], self._bias_hidden[i])

    def _cell(self, i: int, inputs: Tensor, through: Tensor) -> Tensor:
        if self.cells:
            state, cell, space = _aten._thnn_fused_lstm_cell(inputs, through, self.cells[i][-1])
            self.cells[i].append(cell)
        else:
            state, space = _aten._thnn_fused_gru_cell(inputs, through, self.states[i][-1])
        self.states[i].append(state)
        if self._keep:
            self.spaces[i].append(space)
        result: Tensor = state
        return result


def forward(
    backend: str,
    input_gates: Tensor,
    arguments: Arguments,
    constants: NonDifferentiable,
    keep: bool,
) -> StepResults:
    """The operator ``decode``."""
    loop, lstm = _Loop(backend, arguments, constants, keep), arguments.cell is not None
    seeds = _seeds(constants.seed, len(input_gates))
    for gates, seed in zip(_as_in_cells(input_gates, lstm).unbind(0), seeds, strict=True):
        loop.step(gates, seed)
    none = arguments.hidden.new_empty((0, 1, *arguments.hidden.shape[1:]))
    return StepResults(
        states=_by_layer(loop.states),
        cells=_by_layer(loop.cells) if loop.cells else none,
        contexts=torch.stack(loop.contexts) if keep else none,
        queries=torch.stack(loop.queries) if keep else none,
        weights=torch.stack([weights.squeeze(1) for weights in loop.weights]),
        gates=_by_layer(loop.spaces) if keep else none,
    )


def write(
    backend: str,
    arguments: Arguments,
    constants: NonDifferentiable,
    dense: OutputLayer,
    banned_tokens: list[int],
    special: SpecialTokens,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """What :func:`ops.decode.decode_greedily` does.

    Whether all rows have ended is read every few steps, since reading waits for the GPU; in a CUDA
    graph never, and ``max_steps`` steps come out.
    """
    a, loop = arguments, _Loop(backend, arguments, constants, keep=False)
    bias, w_inputs = (_as_in_cells(x, a.cell is not None) for x in (a.input_bias, a.w_inputs.t()))
    banned = _on_device(banned_tokens, bias)
    token = torch.full_like(a.hidden[0, :, 0], special.bos, dtype=torch.int64)
    ended = torch.zeros_like(token, dtype=torch.bool)
    captured = not token.is_cpu and torch.cuda.is_current_stream_capturing()
    written: list[Tensor] = []
    for t in range(max_steps):
        embedded = F.embedding(token, a.inputs)
        state = loop.step(torch.addmm(bias, embedded, w_inputs), None)
        logits = torch.addmm(dense.bias, state, dense.weight.t())
        if banned is not None:
            logits.index_fill_(1, banned, -math.inf)
        token = torch.where(ended, special.pad, logits.argmax(1))
        ended = ended | (token == special.eos)
        written.append(token)
        if t % 8 == 7 and not captured and bool(ended.all()):
            break
    tokens, weights = torch.stack(written, 1), torch.cat(loop.weights, 1)
    if captured:
        return tokens, weights
    running = (tokens == special.eos).cumsum(1).eq(0).any(0)  # after a step, while a row goes on
    steps = min(int(running.sum()) + 1, len(written))
    return tokens[:, :steps], weights[:, :steps]


def without(banned_tokens: list[int], dense: OutputLayer, units: int) -> OutputLayer:
    """An output layer for states of so many units that never chooses some tokens.

    It is padded to a multiple of 16 tokens, and never chooses the padding either.
    """
    weight, bias = dense
    tokens, columns = -len(weight) % 16, units - weight.shape[1]
    if tokens or columns:
        weight = F.pad(weight, (0, columns, 0, tokens))
    bias = F.pad(bias, (0, tokens), value=-math.inf)
    banned = _on_device(banned_tokens, bias)
    return OutputLayer(weight, bias if banned is None else bias.index_fill(0, banned, -math.inf))


def _on_device(numbers: list[int], like: Tensor) -> Tensor | None:
    """Not copied from the CPU, which a graph could not capture; None without numbers."""
    tensors = [torch.full((1,), x, dtype=torch.int64, device=like.device) for x in numbers]
    return torch.cat(tensors) if tensors else None


def backward(
    backend: str,
    arguments: Arguments,
    constants: NonDifferentiable,
    results: StepResults,
    grads: tuple[Tensor | None, ...],
    needs: int,
) -> StepGrads:
    """Backward through all steps, from the gradients of :class:`ops.decode.Decoded`'s fields.

    ``needs`` has the bits of keys, values and w_v.
    """
    a, lstm, queries = arguments, arguments.cell is not None, results.queries
    grad_features, grad_hidden, grad_cell, grad_weights = grads
    layers, _, _, units = results.states.shape
    zeros = torch.zeros_like(a.hidden)
    h = list((zeros if grad_hidden is None else grad_hidden).unbind(0))
    c = list((zeros if grad_cell is None else grad_cell).unbind(0))
    w_inputs, w_hidden = _input_weights(a), a.w_hidden.unbind(0)
    cells = [x.unbind(0) for x in results.cells.unbind(0)]
    spaces = [x.unbind(0) for x in results.gates.unbind(0)]
    on_inputs: list[list[Tensor]] = [[] for _ in h]
    on_new: list[list[Tensor]] = [[] for _ in h]  # of a GRU's new gate, on the hidden side
    on_queries: list[Tensor] = []
    attention = _Attention(backend, a, constants, results.weights, grad_weights, needs)
    seeds = _seeds(constants.seed, len(queries))
    for t in reversed(range(len(queries))):
        if grad_features is not None:
            h[-1] = h[-1] + grad_features[t]
        for i in reversed(range(layers)):
            if lstm:
                before, after = cells[i][t : t + 2]
                inputs, c[i], _ = _aten._thnn_fused_lstm_cell_backward_impl(
                    h[i], c[i], before, after, spaces[i][t], False
                )
                h[i] = inputs @ w_hidden[i]
            else:
                inputs, through, past, _, _ = _aten._thnn_fused_gru_cell_backward(
                    h[i], spaces[i][t], False
                )
                h[i] = torch.addmm(past, through, w_hidden[i])
                on_new[i].append(through[:, 2 * units :])
            on_inputs[i].append(inputs)
            below = inputs @ w_inputs[i]
            if i:
                below = below if constants.masks is None else below * constants.masks[i - 1, t]
                h[i - 1] = h[i - 1] + below
        on_queries.append(attention.step(t, queries[t], below, seeds[t]))
        h[-1] = torch.addmm(h[-1], on_queries[-1], a.w_query)
    grad_gates = _by_layer([steps[::-1] for steps in on_inputs])
    if not lstm:  # n of the inputs, r, z, n of the hidden side
        reset_and_update, new = grad_gates.split([2 * units, units], -1)
        on_hidden = _by_layer([steps[::-1] for steps in on_new])
        grad_gates = torch.cat((new, reset_and_update, on_hidden), -1)
    grad_queries = torch.stack(on_queries[::-1])
    return StepGrads(
        grad_gates, torch.stack(h), torch.stack(c), grad_queries, *attention.memory_grads(queries)
    )


class _Attention:
    """The attention in backward: queries step by step; keys, values and w_v of many steps."""

    def __init__(
        self,
        backend: str,
        arguments: Arguments,
        constants: NonDifferentiable,
        weights: Tensor,
        grad_weights: Tensor | None,
        needs: int,
    ) -> None:
        self._needs, self._run = needs, attention_backward.kernel(backend)
        self._arguments = _attention_arguments(backend, arguments, constants)
        self._weights, self._grad_weights = weights, grad_weights
        self._contexts: list[Tensor] = []
        self._sums: list[Tensor] = []

    def step(self, t: int, queries: Tensor, grad_context: Tensor, seed: Tensor | None) -> Tensor:
        """The gradient of the queries (B,F)."""
        self._contexts.append(grad_context)
        # A seed drops weights of one step's queries, so keys and values go step by step, too.
        needs = NEED["queries"] | (self._needs if seed is not None else 0)
        grad_queries, *others = self._backward(
            slice(t, t + 1), grad_context.unsqueeze(1), queries.unsqueeze(1), needs, seed
        )
        if seed is not None:
            self._add(others)
        return grad_queries.squeeze(1)

    def memory_grads(self, queries: Tensor) -> list[Tensor]:
        """The gradients of keys, values and w_v, from the queries (T,B,F)."""
        if self._needs and not self._sums:
            contexts = torch.stack(self._contexts[::-1], 1)
            for first in range(0, len(queries), _TOGETHER):
                steps = slice(first, first + _TOGETHER)
                by_row = queries[steps].transpose(0, 1)
                _, *memory_grads = self._backward(
                    steps, contexts[:, steps], by_row, self._needs, None
                )
                self._add(memory_grads)
        return self._sums or [queries.new_empty(0)] * 3

    def _backward(
        self, steps: slice, grad_context: Tensor, queries: Tensor, needs: int, seed: Tensor | None
    ) -> list[Tensor]:
        """The gradients of queries, keys, values and w_v."""
        grad_weights = self._grad_weights
        call = attention_backward.arguments(
            weights=self._weights[steps].transpose(0, 1).contiguous(),
            grad_context=grad_context,
            grad_weights=None if grad_weights is None else grad_weights[steps].transpose(0, 1),
            needs=needs,
            queries=queries,
            seed=seed,
            **self._arguments,
        )
        grad_queries, grad_keys, grad_values, grad_w_v, *_ = self._run(*call)
        return [grad_queries, grad_keys, grad_values, grad_w_v]

    def _add(self, grads: list[Tensor]) -> None:
        before = self._sums
        self._sums = [a + b for a, b in zip(before, grads, strict=True)] if before else grads


def _seeds(seed: Tensor | None, steps: int) -> list[Tensor] | list[None]:
    """A seed (1,) for every step."""
    if seed is None:
        return [None] * steps
    return list((seed + torch.arange(steps, device=seed.device) * _NEXT_SEED).split(1))


def _input_weights(arguments: Arguments) -> list[Tensor]:
    """The weights of the layers on the side of their inputs: for the first, the contexts."""
    lstm = arguments.cell is not None
    weights = (arguments.w_context, *arguments.w_input.unbind(0))
    return [_as_in_cells(w.t(), lstm).t() for w in weights]


def _as_in_cells(gates: Tensor, lstm: bool) -> Tensor:
    """Gates (...,G) of inputs, n r z of a GRU, in the order of torch's cells."""
    return gates if lstm else gates.roll(-(gates.shape[-1] // 3), -1)


def _by_layer(layers: list[list[Tensor]]) -> Tensor:
    """(L,T,...) from the layers' tensors of the steps."""
    stacked = torch.stack([x for steps in layers for x in steps])
    return stacked.view(len(layers), -1, *stacked.shape[1:])
