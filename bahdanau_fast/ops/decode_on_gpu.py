"""What :mod:`ops.decode` computes, on GPUs: a loop of torch's products and cells, and attention.

A step is its launches alone, forward with one layer two products, the attention and the cell: no
module and no node of the autograd graph is around them. What no step waits for is in front of the
loop or behind it, as one product over all steps.

The cells are the kernels that ``nn.GRUCell`` and ``nn.LSTMCell`` launch on a GPU: of input gates,
the products of a layer's input, and hidden gates, those of its state. A GRU's are in the order of
these kernels here, r z n in both; arguments and results have the order of :mod:`ops.decode`.
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

_aten = torch.ops.aten
# Steps that share a backward pass over the keys: either backend takes so many queries.
_STEPS_OF_A_PASS = 16
# From the seed of a step to the seed of the next, as on the CPU.
_SEED_INCREMENT = 0x9E3779B97F4A7C15 - 2**64


def _attention_arguments(
    backend: str, arguments: Arguments, constants: NonDifferentiable
) -> dict[str, Any]:
    """The arguments that all steps of the attention share, forward and backward, by name."""
    return {
        "keys": arguments.keys,
        "values": arguments.values,
        "w_v": arguments.w_v,
        "valid_lens": constants.valid_lens,
        "mask": constants.mask,
        "dropout_p": constants.dropout_p,
        "backend": NUMBERS.get(backend, 0),
    }


class _StepLoop:
    """The loop forward: a call of :meth:`step` appends to the results."""

    def __init__(
        self, backend: str, arguments: Arguments, constants: NonDifferentiable, keep: bool
    ) -> None:
        a = arguments
        self._masks, self._keep = constants.masks, keep
        self._attend = attention.kernel(backend)
        self._attention_arguments = _attention_arguments(backend, a, constants)
        lstm, units, gates = a.cell is not None, a.hidden.shape[2], a.w_hidden.shape[1]
        # By layer. One product of the top layer's state gives the query and the hidden gates.
        *below, top = a.w_hidden.unbind(0)
        self._w_hidden = [*below, torch.cat((a.w_query, top))]
        self._query_and_gates = [len(a.w_query), gates]
        self._w_inputs = [w.t() for w in _input_weights(a)]
        self._bias = _in_order_of_cells(a.bias[:, :gates], lstm).unbind(0)  # unused of the first
        self._bias_hidden: list[Tensor | None] = [None] * len(a.w_hidden)
        if not lstm:  # of the new gate alone
            *others, last = F.pad(a.bias[:, gates:], (2 * units, 0)).unbind(0)
            self._bias_hidden = [*others, F.pad(last, (len(a.w_query), 0))]
        # By layer the tensors of all steps, the first state and cell in front.
        self.states = [[h] for h in a.hidden.unbind(0)]
        self.cells = [] if a.cell is None else [[c] for c in a.cell.unbind(0)]
        self.workspaces: list[list[Tensor]] = [[] for _ in self.states]
        self.contexts: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.weights: list[Tensor] = []

    def step(self, input_gates: Tensor, seed: Tensor | None) -> Tensor:
        """The top layer's new state (B,H), from gates (B,G) in the order of the cells."""
        t = len(self.weights)
        queries, top_gates = self._hidden_gates(-1).split(self._query_and_gates, 1)
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
            added = self._bias[i] if i else input_gates
            hidden_gates = top_gates if i + 1 == len(self.states) else self._hidden_gates(i)
            gates = torch.addmm(added, below, self._w_inputs[i])
            if self.cells:
                before = self.cells[i][-1]
                below, cell, workspace = _aten._thnn_fused_lstm_cell(gates, hidden_gates, before)
                self.cells[i].append(cell)
            else:
                before = self.states[i][-1]
                below, workspace = _aten._thnn_fused_gru_cell(gates, hidden_gates, before)
            self.states[i].append(below)
            if self._keep:
                self.workspaces[i].append(workspace)
        return below

    def _hidden_gates(self, i: int) -> Tensor:
        """The hidden gates of a layer in the next step, of the top layer behind its query."""
        return F.linear(self.states[i][-1], self._w_hidden[i], self._bias_hidden[i])


def forward(
    backend: str,
    input_gates: Tensor,
    arguments: Arguments,
    constants: NonDifferentiable,
    keep: bool,
) -> StepResults:
    """The operator ``decode``."""
    loop, lstm = _StepLoop(backend, arguments, constants, keep), arguments.cell is not None
    seeds = _seeds(constants.seed, len(input_gates))
    for gates, seed in zip(_in_order_of_cells(input_gates, lstm).unbind(0), seeds, strict=True):
        loop.step(gates, seed)
    none = arguments.hidden.new_empty((0, 1, *arguments.hidden.shape[1:]))
    return StepResults(
        states=_stack_by_layer(loop.states),
        cells=_stack_by_layer(loop.cells) if loop.cells else none,
        contexts=torch.stack(loop.contexts) if keep else none,
        queries=torch.stack(loop.queries) if keep else none,
        weights=torch.stack([weights.squeeze(1) for weights in loop.weights]),
        gates=_stack_by_layer(loop.workspaces) if keep else none,
    )


def decode_greedily(
    backend: str,
    arguments: Arguments,
    constants: NonDifferentiable,
    dense: OutputLayer,
    banned_tokens: list[int],
    special: SpecialTokens,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """As :func:`ops.decode.decode_greedily`.

    Whether all rows have ended is read every few steps, since reading waits for the GPU; in a CUDA
    graph never, and ``max_steps`` steps come out.
    """
    a, loop = arguments, _StepLoop(backend, arguments, constants, keep=False)
    lstm = a.cell is not None
    bias, w_inputs = (_in_order_of_cells(x, lstm) for x in (a.input_bias, a.w_inputs.t()))
    banned = _token_ids(banned_tokens, bias)
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


def without_banned(banned_tokens: list[int], dense: OutputLayer, units: int) -> OutputLayer:
    """An output layer, for states of so many units, whose logits of some tokens are -inf.

    It is padded to a multiple of 16 tokens, whose logits are -inf, too.
    """
    weight, bias = dense
    tokens, columns = -len(weight) % 16, units - weight.shape[1]
    if tokens or columns:
        weight = F.pad(weight, (0, columns, 0, tokens))
    bias = F.pad(bias, (0, tokens), value=-math.inf)
    banned = _token_ids(banned_tokens, bias)
    return OutputLayer(weight, bias if banned is None else bias.index_fill(0, banned, -math.inf))


def _token_ids(tokens: list[int], like: Tensor) -> Tensor | None:
    """Tokens as a tensor; not copied from the CPU, which no CUDA graph could capture."""
    tensors = [torch.full((1,), x, dtype=torch.int64, device=like.device) for x in tokens]
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
    # By layer, the gradients of the states and cells behind the step.
    grad_h = list((zeros if grad_hidden is None else grad_hidden).unbind(0))
    grad_c = list((zeros if grad_cell is None else grad_cell).unbind(0))
    w_inputs, w_hidden = _input_weights(a), a.w_hidden.unbind(0)
    cells = [x.unbind(0) for x in results.cells.unbind(0)]
    workspaces = [x.unbind(0) for x in results.gates.unbind(0)]
    # Of all steps, the last one first.
    grads_input_gates: list[list[Tensor]] = [[] for _ in grad_h]
    grads_hidden_new: list[list[Tensor]] = [[] for _ in grad_h]  # of a GRU's n, in the hidden gates
    grads_queries: list[Tensor] = []
    attention = _AttentionBackward(backend, a, constants, results.weights, grad_weights, needs)
    seeds = _seeds(constants.seed, len(queries))
    for t in reversed(range(len(queries))):
        if grad_features is not None:
            grad_h[-1] = grad_h[-1] + grad_features[t]
        for i in reversed(range(layers)):
            if lstm:  # whose gates are the sum of both: one gradient
                before, after = cells[i][t : t + 2]
                grad_input_gates, grad_c[i], _ = _aten._thnn_fused_lstm_cell_backward_impl(
                    grad_h[i], grad_c[i], before, after, workspaces[i][t], False
                )
                grad_h[i] = grad_input_gates @ w_hidden[i]
            else:
                grad_input_gates, grad_hidden_gates, grad_before, _, _ = (
                    _aten._thnn_fused_gru_cell_backward(grad_h[i], workspaces[i][t], False)
                )
                grad_h[i] = torch.addmm(grad_before, grad_hidden_gates, w_hidden[i])
                grads_hidden_new[i].append(grad_hidden_gates[:, 2 * units :])
            grads_input_gates[i].append(grad_input_gates)
            grad_below = grad_input_gates @ w_inputs[i]
            if i:
                if constants.masks is not None:
                    grad_below = grad_below * constants.masks[i - 1, t]
                grad_h[i - 1] = grad_h[i - 1] + grad_below
        grads_queries.append(attention.step(t, queries[t], grad_below, seeds[t]))
        grad_h[-1] = torch.addmm(grad_h[-1], grads_queries[-1], a.w_query)
    grad_gates = _stack_by_layer([steps[::-1] for steps in grads_input_gates])
    if not lstm:  # n of the input gates, r z n of the hidden gates
        r_z, n = grad_gates.split([2 * units, units], -1)
        hidden_n = _stack_by_layer([steps[::-1] for steps in grads_hidden_new])
        grad_gates = torch.cat((n, r_z, hidden_n), -1)
    stacked = map(torch.stack, (grad_h, grad_c, grads_queries[::-1]))
    return StepGrads(grad_gates, *stacked, *attention.memory_grads(queries))


class _AttentionBackward:
    """The attention backward: of queries step by step; of keys, values and w_v over many steps."""

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
        # With dropout a step has a seed: keys and values are differentiated with its queries.
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
            for first in range(0, len(queries), _STEPS_OF_A_PASS):
                steps = slice(first, first + _STEPS_OF_A_PASS)
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
        return [*self._run(*call)[:4]]

    def _add(self, grads: list[Tensor]) -> None:
        before = self._sums
        self._sums = [a + b for a, b in zip(before, grads, strict=True)] if before else grads


def _seeds(seed: Tensor | None, steps: int) -> list[Tensor] | list[None]:
    """The dropout seed (1,) of every step."""
    if seed is None:
        return [None] * steps
    return list((seed + torch.arange(steps, device=seed.device) * _SEED_INCREMENT).split(1))


def _input_weights(arguments: Arguments) -> list[Tensor]:
    """By layer the weights of the input gates; of the first those of the context."""
    lstm = arguments.cell is not None
    weights = (arguments.w_context, *arguments.w_input.unbind(0))
    return [_in_order_of_cells(w.t(), lstm).t() for w in weights]


def _in_order_of_cells(gates: Tensor, lstm: bool) -> Tensor:
    """Input gates (...,G), n r z of a GRU, in the order of torch's cells."""
    return gates if lstm else gates.roll(-(gates.shape[-1] // 3), -1)


def _stack_by_layer(layers: list[list[Tensor]]) -> Tensor:
    """(L,T,...) from the layers' lists of a tensor for every step."""
    stacked = torch.stack([x for steps in layers for x in steps])
    return stacked.view(len(layers), -1, *stacked.shape[1:])
