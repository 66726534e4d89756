"""A recurrent decoder that attends at every step, over a whole given sequence, as one operator.

Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates, F
hidden units of the attention. The state of the top layer is the query; the context goes into the
first layer, beside inputs whose part of the gates is computed for all steps in front:

    context_t = attention(W_query h_top[t-1]),  gates_t = input_gates_t + W_context context_t + ...

``decode`` leaves behind what backward needs, or with ``keep=False`` of the last step only;
``decode_greedy`` feeds back the likeliest token until every row has ended. These operators are for
CPU tensors and, where all steps are one launch, for those of a GPU; else
:mod:`ops.decode_on_gpu` does there what they do.

What does not have to wait for a step is left out of the loop: the gradients of all weights are one
product each over all steps, those of keys, values and w_v one pass over the keys.

Gates are in the order of the C++ (cpu/kernels/recurrent.h): GRU n r z on the input side, r z n on
the hidden side; LSTM i f g o. Weights and their gradients are whole, as torch's layers have them;
:class:`DecoderInputs` puts them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.ops import decode_on_gpu
from bahdanau_fast.ops.attention import attend_backward_keys, needs_of
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.decode_arguments import (
    Arguments,
    DecoderInputs,
    Dtypes,
    Rest,
    arranged,
    in_dtypes_of,
    join,
)
from bahdanau_fast.ops.operator import Operator
from bahdanau_fast.ops.projection import linear, product, sum_of_products
from bahdanau_fast.ops.second_derivatives import differentiate_again

__all__ = [
    "Arguments",
    "Decoded",
    "DecoderInputs",
    "Dtypes",
    "Rest",
    "by_steps",
    "decode",
    "decode_greedily",
]


class Decoded(NamedTuple):
    """The results of :func:`decode`."""

    features: Tensor  # (T,B,H), the states of the top layer
    hidden: Tensor  # (L,B,H), the last states
    cell: Tensor  # (L,B,H) of an LSTM, (0,B,H) of a GRU
    weights: Tensor  # (T,B,Tk), fp64 for fp64 and else fp32


def decode(of: DecoderInputs, rest: Rest, dtypes: Dtypes, loop: str | None = None) -> Decoded:
    """All steps, forward and backward: the operators, or a loop in which a backend attends."""
    units = of.hidden.shape[2]
    with without_autocast(of.keys.device):
        if loop is None:
            of = of.padded()
        tensors = of.flat()
        if checks.needs_gradient(*tensors):
            layers = len(of.layers)
            found = Decoded(*_Decode.apply(rest, dtypes, loop, layers, *tensors))  # type: ignore[no-untyped-call]
        else:
            results = _forward(arranged(of, dtypes.operators), rest, loop, keep=False)
            found = _decoded(results, dtypes)
    if of.hidden.shape[2] == units:
        return found
    features, hidden, cell = (x[..., :units] for x in found[:3])
    return Decoded(features, hidden, cell, found.weights)


def decode_greedily(
    of: DecoderInputs,
    rest: Rest,
    dtype: torch.dtype,
    dense: tuple[Tensor, Tensor],
    left_out: list[int],
    marks: tuple[int, int, int],
    max_steps: int,
    loop: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens (B,T) and weights (B,T,Tk) until every row has ended; without gradients.

    ``dense`` is the output layer's weight (V,H) and bias (V,); ``left_out`` are tokens it must not
    choose; ``marks`` the first input, the token that ends a row, and the padding after it.
    """
    with torch.no_grad(), without_autocast(of.keys.device):
        a = arranged(of if loop is not None else of.padded(), dtype)
        if loop is not None:
            with torch._C._AutoDispatchBelowAutograd():
                return decode_on_gpu.write(loop, a, rest, dense, left_out, marks, max_steps)
        if not a.keys.is_cpu:
            dense, left_out = decode_on_gpu.without(left_out, dense, a.hidden.shape[2]), []
        tokens, weights = decode_greedy.now(
            *(a.inputs.contiguous(), a.w_inputs, a.input_bias, *_in_order(a, rest)[:-3]),
            *(dense[0].contiguous(), dense[1].contiguous()),
            *(torch.tensor(left_out, dtype=torch.int64), *marks, max_steps),
        )
    return tokens, weights


def by_steps(arguments: Arguments, rest: Rest) -> Decoded:
    """The same in plain PyTorch, one step after the other; without dropout of the weights."""
    _, _, _, hidden, cell, keys, values, w_query, w_v, w_context, w_input, w_hidden, bias = (
        arguments
    )
    gates_in = _input_gates(arguments)
    states, cells = list(hidden.unbind(0)), [] if cell is None else list(cell.unbind(0))
    features, weights = [], []
    units, side = hidden.shape[2], gates_in.shape[2]
    for t, input_gates in enumerate(gates_in.unbind(0)):
        queries = (states[-1] @ w_query.t()).unsqueeze(1)
        context, step_weights = reference.attend(
            queries, keys, values, w_v, rest.valid_lens, mask=rest.mask
        )
        below = context.squeeze(1)
        for layer, before in enumerate(states):
            own = bias[layer, :side] if layer else input_gates
            inputs = own + below @ (w_input[layer - 1] if layer else w_context).t()
            through = before @ w_hidden[layer].t()
            if cell is not None:
                i, f, g, o = (inputs + through).split(units, -1)
                cells[layer] = f.sigmoid() * cells[layer] + i.sigmoid() * g.tanh()
                states[layer] = o.sigmoid() * cells[layer].tanh()
            else:
                n, r, z = inputs.split(units, -1)
                r_through, z_through, n_through = through.split(units, -1)
                r, z = (r + r_through).sigmoid(), (z + z_through).sigmoid()
                n = (n + r * (n_through + bias[layer, side:])).tanh()
                states[layer] = n + z * (before - n)
            below = states[layer]
            if rest.masks is not None and layer + 1 < len(states):
                below = below * rest.masks[layer, t]
        features.append(states[-1])
        weights.append(step_weights.squeeze(1))
    last_cell = torch.stack(cells) if cells else hidden[:0]
    all_weights = torch.stack(weights).to(torch.promote_types(keys.dtype, torch.float32))
    return Decoded(torch.stack(features), torch.stack(states), last_cell, all_weights)


def _input_gates(arguments: Arguments) -> Tensor:
    return linear(arguments.inputs, arguments.w_inputs, arguments.input_bias)


def _in_order(arguments: Arguments, rest: Rest) -> tuple[Any, ...]:
    """The arguments that the operators share."""
    a = arguments
    return (
        *(a.hidden, a.cell, a.keys, rest.table, rest.keys_max, a.values),
        *(rest.valid_lens, rest.mask, a.w_query, a.w_v, a.w_context, a.w_input, a.w_hidden, a.bias),
        *(rest.masks, rest.seed, rest.dropout_p),
    )


def _forward(arguments: Arguments, rest: Rest, loop: str | None, keep: bool) -> tuple[Tensor, ...]:
    """The results of the operator ``decode``."""
    gates = _input_gates(arguments)
    if loop is None:
        results: tuple[Tensor, ...] = _decode.now(gates, *_in_order(arguments, rest), keep)
        return results
    with torch._C._AutoDispatchBelowAutograd():
        return decode_on_gpu.forward(loop, gates, arguments, rest, keep)


def _decoded(results: tuple[Tensor, ...], dtypes: Dtypes) -> Decoded:
    states, cells, _, _, weights, _ = results
    of_steps = states[-1, 1:], states[:, -1], cells[:, -1]
    return Decoded(*(x.to(dtypes.states) for x in of_steps), weights.to(dtypes.weights))  # type: ignore[call-arg]


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rest: Rest, dtypes: Dtypes, loop: str | None, layers: int, *tensors: Any
    ) -> tuple[Tensor, ...]:
        arguments = arranged(DecoderInputs.of_flat(tensors, layers), dtypes.operators)
        results = _forward(arguments, rest, loop, keep=True)
        decoded = _decoded(results, dtypes)
        ctx.save_for_backward(*tensors, *arguments, *rest[:-1], *results, decoded.weights)
        ctx.dropout_p, ctx.dtypes, ctx.loop, ctx.layers = rest.dropout_p, dtypes, loop, layers
        ctx.set_materialize_grads(False)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, _, _, *needed = ctx.needs_input_grad
        saved, count, fields = ctx.saved_tensors, len(needed), len(Arguments._fields)
        tensors, arguments = saved[:count], Arguments(*saved[count : count + fields])
        rest = Rest(*(*saved[count + fields : -7], ctx.dropout_p))
        if all(grad is None for grad in grads):
            return (None,) * (count + 4)
        with without_autocast(arguments.keys.device):
            if torch.is_grad_enabled():
                again = rest, ctx.dtypes, ctx.layers, tensors, needed, grads
                return (*[None] * 4, *_gradients_again(*again))
            of = DecoderInputs.of_flat(needed, ctx.layers)
            found = _gradients(arguments, rest, saved[-7:], grads, of, ctx.loop).flat()
        wanted = [grad if need else None for grad, need in zip(found, needed, strict=True)]
        return (*[None] * 4, *in_dtypes_of(tensors, wanted))


def _gradients_again(
    rest: Rest,
    dtypes: Dtypes,
    layers: int,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: tuple[Tensor | None, ...],
) -> Sequence[Tensor | None]:
    if rest.dropout_p > 0.0:
        raise NotImplementedError(
            "a second derivative through dropped-out weights of a whole decoder is not "
            "implemented: attend() step by step, or dropout 0"
        )

    def steps(*tensors: Any) -> Decoded:
        of, dtype = DecoderInputs.of_flat(tensors, layers), dtypes.operators
        return by_steps(of.arranged(dtype, partial(join, dtype)), rest)

    return differentiate_again(steps, tensors, needed, grads)


def _gradients(
    arguments: Arguments,
    rest: Rest,
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: DecoderInputs,
    loop: str | None,
) -> DecoderInputs:
    states, _, contexts, *_ = results
    dtype, of_weights = states.dtype, results[4].dtype
    grads = tuple(
        None if grad is None else grad.to(of_weights if i == 3 else dtype)
        for i, grad in enumerate(grads)
    )
    needs = needs_of(("keys", "values", "w_v"), (needed.keys, needed.values, needed.w_v))  # type: ignore[arg-type]
    through = _through_steps if loop is None else partial(decode_on_gpu.backward, loop)
    grad_gates, grad_first, grad_first_cell, grad_queries, of_memory = through(
        arguments, rest, results, grads, needs
    )
    lstm, side = arguments.cell is not None, len(arguments.w_inputs)
    units = states.shape[3]
    grad_inputs, grad_states = grad_gates[..., :side], grad_gates[..., -side:]
    grad_bias = grad_gates.sum((1, 2))
    before, below = states[:, :-1], states[:-1, 1:]
    if rest.masks is not None:
        below = below * rest.masks
    layers = []
    for i, of_layer in enumerate(needed.layers):
        under = below[i - 1] if i else torch.cat((contexts, arguments.inputs), -1)
        found = [sum_of_products(grad_inputs[i], under), sum_of_products(grad_states[i], before[i])]
        if len(of_layer) > 2:
            found += [grad_bias[i, :side], grad_bias[i, -side:]]
        if not lstm:  # the input side's n r z is r z n in torch's layers
            found[::2] = [torch.cat((x[units:], x[:units])) for x in found[::2]]
        elif len(found) > 2:  # two gradients share no memory
            found[2] = found[2].clone()
        layers.append(tuple(found))
    grad_keys, grad_values, grad_w_v = of_memory
    return DecoderInputs(
        product(grad_inputs[0], arguments.w_inputs) if needed.inputs else None,  # type: ignore[arg-type]
        grad_first,
        None if arguments.cell is None else grad_first_cell,
        grad_keys,
        grad_values,
        sum_of_products(grad_queries, before[-1]),
        grad_w_v,
        tuple(layers),
    )


def _through_steps(
    arguments: Arguments,
    rest: Rest,
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needs: int,
) -> tuple[Any, ...]:
    """As :func:`decode_on_gpu.backward`."""
    a, (states, cells, _, queries, weights, gates, narrow) = arguments, results
    contiguous = [None if grad is None else grad.contiguous() for grad in grads]
    if a.cell is None:
        contiguous[2] = None
    kept = states, cells, queries, weights, gates
    *found, grad_contexts, grad_scores, dropped = _decode_backward.now(
        *_in_order(a, rest), *kept, *contiguous
    )
    if dropped.numel() == 0:
        dropped = narrow if narrow.dtype == a.keys.dtype else weights
    by_row = [part.transpose(0, 1) for part in (dropped, grad_contexts, grad_scores, queries)]
    of_memory = attend_backward_keys.now(
        *(*by_row[:3], needs, by_row[3], a.keys, a.values, a.w_v),
        *(rest.valid_lens, rest.mask, rest.table, rest.keys_max),
    )
    return *found, of_memory


def _fake(
    input_gates: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    keys: Tensor,
    values: Tensor,
    keep: bool,
    **_: Any,
) -> tuple[Tensor, ...]:
    (layers, batch, units), steps = hidden.shape, input_gates.shape[0]
    kept, cells = steps if keep else 1, 0 if cell is None else layers
    of_weights = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((layers, steps + 1, batch, units)),
        hidden.new_empty((cells, steps + 1, batch, units)),
        hidden.new_empty((kept, batch, values.shape[2])),
        hidden.new_empty((kept, batch, keys.shape[2])),
        hidden.new_empty((steps, batch, keys.shape[1]), dtype=of_weights),
        hidden.new_empty((layers, kept, batch, 4 * units)),
    )


def _backward_fake(
    hidden: Tensor, cell: Tensor | None, queries: Tensor, dropout_p: float, **named: Any
) -> tuple[Tensor, ...]:
    named |= {"hidden": hidden, "cell": cell, "input_gates": queries, "keep": True}
    _, _, contexts, queries, weights, gates = _fake(**named)
    scores = weights
    if hidden.device.type == "cuda":  # which writes them as the pass over the keys reads them
        scores = weights.transpose(0, 1).contiguous().transpose(0, 1)
    return (
        gates,
        hidden.new_empty(hidden.shape),
        hidden.new_empty((0 if cell is None else hidden.shape[0], *hidden.shape[1:])),
        queries,
        contexts,
        scores,
        hidden.new_empty((weights.shape[0] if dropout_p > 0.0 else 0, *weights.shape[1:])),
    )


def _greedy_fake(keys: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    steps = torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        keys.new_empty((keys.shape[0], steps), dtype=torch.int64),
        keys.new_empty(
            (keys.shape[0], steps, keys.shape[1]),
            dtype=torch.promote_types(keys.dtype, torch.float32),
        ),
    )


_MEMORY = (
    "Tensor hidden, Tensor? cell, Tensor keys, Tensor? table, Tensor? keys_max, Tensor values, "
    "Tensor? valid_lens, Tensor? mask"
)
_WEIGHTS = (
    "Tensor w_query, Tensor w_v, Tensor w_context, Tensor w_input, Tensor w_hidden, Tensor bias"
)
_INPUTS = f"{_MEMORY}, {_WEIGHTS}, Tensor? masks, Tensor? seed, float dropout_p"
_decode = Operator(
    f"decode(Tensor input_gates, {_INPUTS}, bool keep=True) -> (Tensor states, Tensor cells, "
    "Tensor contexts, Tensor queries, Tensor weights, Tensor gates)",
    _fake,
)
_decode_backward = Operator(
    f"decode_backward({_INPUTS}, Tensor states, Tensor cells, Tensor queries, Tensor weights, "
    "Tensor gates, Tensor? grad_states, Tensor? grad_hidden, Tensor? grad_cell, "
    "Tensor? grad_weights) -> (Tensor grad_gates, Tensor grad_first, Tensor grad_first_cell, "
    "Tensor grad_queries, Tensor grad_contexts, Tensor grad_scores, Tensor dropped)",
    _backward_fake,
)
decode_greedy = Operator(
    "decode_greedy(Tensor embedding, Tensor w_embedded, Tensor input_bias, "
    f"{_MEMORY}, {_WEIGHTS}, Tensor w_dense, Tensor dense_bias, Tensor left_out, int first, "
    "int last, int blank, int max_steps) -> (Tensor tokens, Tensor weights)",
    _greedy_fake,
)
