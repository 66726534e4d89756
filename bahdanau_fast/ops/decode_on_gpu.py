"""What :mod:`ops.decode` computes, on GPUs: torch's products and cells, and the step kernel.

Of a step nothing is left but its launches, forward with one layer two products, the attention and
the cell: no module and no node of the autograd graph is around them. What no step waits for is in
front of the loop or behind it, one product each over all steps.

The cells are those that ``nn.GRUCell`` and ``nn.LSTMCell`` launch on a GPU. A GRU's gates have
their order, r z n on both sides, in here; arguments and results have that of :mod:`ops.decode`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast.ops.attention import NEED, attention, attention_backward
from bahdanau_fast.ops.decode_arguments import Arguments, Rest
from bahdanau_fast.ops.operator import NUMBERS

__all__ = ["backward", "forward", "without", "write"]

_aten = torch.ops.aten
# Steps whose keys are differentiated together: either backend takes so many queries.
_TOGETHER = 16
# From the seed of a step to that of the next, as on the CPU.
_NEXT_SEED = 0x9E3779B97F4A7C15 - 2**64


class _Loop:
    """Takes steps and keeps what they made."""

    def __init__(self, backend: str, arguments: Arguments, rest: Rest, keep: bool) -> None:
        a = arguments
        self._a, self._rest, self._keep = a, rest, keep
        self._attend, self._number = attention.kernel(backend), NUMBERS.get(backend, 0)
        *below, top = a.w_hidden.unbind(0)
        # The top layer's state is multiplied once, for the queries and for its own gates.
        self._w_hidden = [*below, torch.cat((a.w_query, top))]
        self._w_inputs = [w.t() for w in _input_weights(a)]
        lstm, units, side = a.cell is not None, a.hidden.shape[2], a.w_hidden.shape[1]
        self._sides = [len(a.w_query), side]
        self._bias = _as_in_cells(a.bias[:, :side], lstm).unbind(0)  # of the layers above the first
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
        a, rest, t = self._a, self._rest, len(self.weights)
        queries, top = self._through(-1).split(self._sides, 1)
        queries = queries.unsqueeze(1)
        context, weights, *_ = self._attend(
            *(queries, a.keys, a.values, a.w_v, *[None] * 5, rest.valid_lens, rest.mask),
            *(None, None, seed, rest.dropout_p, 0, 0.0, True, False, self._number, False),
        )
        self.weights.append(weights)
        if self._keep:
            self.contexts.append(context.squeeze(1))
            self.queries.append(queries.squeeze(1))
        below: Tensor = context.squeeze(1)
        for i in range(len(self.states)):
            if i and rest.masks is not None:
                below = below * rest.masks[i - 1, t]
            into = self._bias[i] if i else input_gates
            through = top if i + 1 == len(self.states) else self._through(i)
            below = self._cell(i, torch.addmm(into, below, self._w_inputs[i]), through)
        return below

    def _through(self, i: int) -> Tensor:
        """What a layer's state before the step is multiplied to."""
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
        made: Tensor = state
        return made


def forward(
    backend: str, input_gates: Tensor, arguments: Arguments, rest: Rest, keep: bool
) -> tuple[Tensor, ...]:
    """The operator ``decode``; of the gates there is what the cells' backward takes."""
    loop, lstm = _Loop(backend, arguments, rest, keep), arguments.cell is not None
    seeds = _seeds(rest.seed, len(input_gates))
    for gates, seed in zip(_as_in_cells(input_gates, lstm).unbind(0), seeds, strict=True):
        loop.step(gates, seed)
    none = arguments.hidden.new_empty((0, 1, *arguments.hidden.shape[1:]))
    return (
        _by_layer(loop.states),
        _by_layer(loop.cells) if loop.cells else none,
        *(torch.stack(made) if keep else none for made in (loop.contexts, loop.queries)),
        torch.stack([weights.squeeze(1) for weights in loop.weights]),
        _by_layer(loop.spaces) if keep else none,
    )


def write(
    backend: str,
    arguments: Arguments,
    rest: Rest,
    dense: tuple[Tensor, Tensor],
    left_out: list[int],
    marks: tuple[int, int, int],
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """What :func:`ops.decode.decode_greedily` does.

    Whether all rows have ended is asked every few steps, since asking waits for the GPU; in a CUDA
    graph never, and ``max_steps`` steps come out.
    """
    a, loop, (first, last, blank) = arguments, _Loop(backend, arguments, rest, keep=False), marks
    bias, w_inputs = (_as_in_cells(x, a.cell is not None) for x in (a.input_bias, a.w_inputs.t()))
    never = _on_device(left_out, bias)
    token = torch.full_like(a.hidden[0, :, 0], first, dtype=torch.int64)
    ended = torch.zeros_like(token, dtype=torch.bool)
    captured = not token.is_cpu and torch.cuda.is_current_stream_capturing()
    written: list[Tensor] = []
    for t in range(max_steps):
        embedded = F.embedding(token, a.inputs)
        state = loop.step(torch.addmm(bias, embedded, w_inputs), None)
        logits = torch.addmm(dense[1], state, dense[0].t())
        if never is not None:
            logits.index_fill_(1, never, -math.inf)
        token = torch.where(ended, blank, logits.argmax(1))
        ended = ended | (token == last)
        written.append(token)
        if t % 8 == 7 and not captured and bool(ended.all()):
            break
    tokens, weights = torch.stack(written, 1), torch.cat(loop.weights, 1)
    if captured:
        return tokens, weights
    running = (tokens == last).cumsum(1).eq(0).any(0)  # after each step, while a row goes on
    steps = min(int(running.sum()) + 1, len(written))
    return tokens[:, :steps], weights[:, :steps]


def without(left_out: list[int], dense: tuple[Tensor, Tensor], units: int) -> tuple[Tensor, Tensor]:
    """An output layer for states of so many units that never chooses some tokens.

    It has a multiple of 16 tokens; what is added is never chosen either.
    """
    weight, bias = dense
    tokens, columns = -len(weight) % 16, units - weight.shape[1]
    if tokens or columns:
        weight = F.pad(weight, (0, columns, 0, tokens))
    bias, never = F.pad(bias, (0, tokens), value=-math.inf), _on_device(left_out, bias)
    return weight, bias if never is None else bias.index_fill(0, never, -math.inf)


def _on_device(numbers: list[int], like: Tensor) -> Tensor | None:
    """Not copied from the CPU, which a graph could not capture; None if there are none."""
    each = [torch.full((1,), x, dtype=torch.int64, device=like.device) for x in numbers]
    return torch.cat(each) if each else None


def backward(
    backend: str,
    arguments: Arguments,
    rest: Rest,
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needs: int,
) -> tuple[Any, ...]:
    """Backward through all steps, from the gradients of what :class:`ops.decode.Decoded` has.

    The gradients of the gates (L,T,B,4H), of the first states and cells (L,B,H), of the queries
    (T,B,F); and those of keys, values and w_v, which ``needs`` has the bits of.
    """
    a, lstm = arguments, arguments.cell is not None
    states, cells, _, queries, weights, spaces, *_ = results
    grad_features, grad_hidden, grad_cell, grad_weights = grads
    layers, steps, units = len(states), len(queries), states.shape[3]
    zeros = torch.zeros_like(a.hidden)
    h = list((zeros if grad_hidden is None else grad_hidden).unbind(0))
    c = list((zeros if grad_cell is None else grad_cell).unbind(0))
    w_inputs, w_hidden = _input_weights(a), a.w_hidden.unbind(0)
    of_cells, of_spaces = ([x.unbind(0) for x in kept.unbind(0)] for kept in (cells, spaces))
    of_inputs: list[list[Tensor]] = [[] for _ in h]
    of_new: list[list[Tensor]] = [[] for _ in h]  # of a GRU's new gate, on the hidden side
    of_queries: list[Tensor] = []
    attention = _Attention(backend, a, rest, weights, grad_weights, needs)
    seeds = _seeds(rest.seed, steps)
    for t in reversed(range(steps)):
        if grad_features is not None:
            h[-1] = h[-1] + grad_features[t]
        for i in reversed(range(layers)):
            if lstm:
                before, after = of_cells[i][t : t + 2]
                inputs, c[i], _ = _aten._thnn_fused_lstm_cell_backward_impl(
                    h[i], c[i], before, after, of_spaces[i][t], False
                )
                h[i] = inputs @ w_hidden[i]
            else:
                inputs, through, past, _, _ = _aten._thnn_fused_gru_cell_backward(
                    h[i], of_spaces[i][t], False
                )
                h[i] = torch.addmm(past, through, w_hidden[i])
                of_new[i].append(through[:, 2 * units :])
            of_inputs[i].append(inputs)
            below = inputs @ w_inputs[i]
            if i:
                below = below if rest.masks is None else below * rest.masks[i - 1, t]
                h[i - 1] = h[i - 1] + below
        of_queries.append(attention.step(t, queries[t], below, seeds[t]))
        h[-1] = torch.addmm(h[-1], of_queries[-1], a.w_query)
    grad_gates = _by_layer([made[::-1] for made in of_inputs])
    if not lstm:  # n of the inputs, r, z, n of the hidden side
        reset_and_update, new = grad_gates.split([2 * units, units], -1)
        on_hidden = _by_layer([made[::-1] for made in of_new])
        grad_gates = torch.cat((new, reset_and_update, on_hidden), -1)
    grad_queries = torch.stack(of_queries[::-1])
    of_memory = attention.of_memory(queries)
    return grad_gates, torch.stack(h), torch.stack(c), grad_queries, of_memory


class _Attention:
    """Its part of backward: a step's queries at once, keys, values and w_v of many steps."""

    def __init__(
        self,
        backend: str,
        arguments: Arguments,
        rest: Rest,
        weights: Tensor,
        grad_weights: Tensor | None,
        needs: int,
    ) -> None:
        self._a, self._rest, self._needs = arguments, rest, needs
        self._run, self._number = attention_backward.kernel(backend), NUMBERS.get(backend, 0)
        self._weights, self._grad_weights = weights, grad_weights
        self._contexts: list[Tensor] = []
        self._sums: list[Tensor] = []

    def step(self, t: int, queries: Tensor, grad_context: Tensor, seed: Tensor | None) -> Tensor:
        """The gradient of the queries (B,F)."""
        self._contexts.append(grad_context)
        # A seed decides over the queries of one step: what it drops is taken along.
        needs = NEED["queries"] | (self._needs if seed is not None else 0)
        at = slice(t, t + 1)
        grad_queries, *others = self._backward(
            at, grad_context.unsqueeze(1), queries.unsqueeze(1), needs, seed
        )
        if seed is not None:
            self._add(others)
        return grad_queries.squeeze(1)

    def of_memory(self, queries: Tensor) -> list[Tensor]:
        """The gradients of keys, values and w_v, from the queries (T,B,F)."""
        if self._needs and not self._sums:
            contexts = torch.stack(self._contexts[::-1], 1)
            for first in range(0, len(queries), _TOGETHER):
                at = slice(first, first + _TOGETHER)
                by_row = queries[at].transpose(0, 1)
                self._add(self._backward(at, contexts[:, at], by_row, self._needs, None)[1:])
        return self._sums or [queries.new_empty(0)] * 3

    def _backward(
        self, at: slice, grad_context: Tensor, queries: Tensor, needs: int, seed: Tensor | None
    ) -> tuple[Tensor, ...]:
        a, rest, grad_weights = self._a, self._rest, self._grad_weights
        weights = self._weights[at].transpose(0, 1).contiguous()
        grads = grad_context, None if grad_weights is None else grad_weights[at].transpose(0, 1)
        found = self._run(
            *(weights, None, None, *grads, needs, queries, a.keys, a.values, a.w_v, *[None] * 5),
            *(rest.valid_lens, rest.mask, None, None, seed, rest.dropout_p, 0, 0.0, self._number),
        )
        return tuple(found[:4])

    def _add(self, found: tuple[Tensor, ...] | list[Tensor]) -> None:
        before = self._sums
        self._sums = [a + b for a, b in zip(before, found, strict=True)] if before else list(found)


def _seeds(seed: Tensor | None, steps: int) -> list[Tensor] | list[None]:
    """(1,) of each step."""
    if seed is None:
        return [None] * steps
    return list((seed + torch.arange(steps, device=seed.device) * _NEXT_SEED).split(1))


def _input_weights(arguments: Arguments) -> list[Tensor]:
    """Of each layer, on the side of its inputs: the first's are contexts."""
    lstm = arguments.cell is not None
    weights = (arguments.w_context, *arguments.w_input.unbind(0))
    return [_as_in_cells(w.t(), lstm).t() for w in weights]


def _as_in_cells(gates: Tensor, lstm: bool) -> Tensor:
    """Gates (...,G) of inputs, n r z of a GRU, in the order of torch's cells."""
    return gates if lstm else gates.roll(-(gates.shape[-1] // 3), -1)


def _by_layer(made: list[list[Tensor]]) -> Tensor:
    """(L,T,...) from what each layer made at each step."""
    stacked = torch.stack([x for of_layer in made for x in of_layer])
    return stacked.view(len(made), -1, *stacked.shape[1:])
