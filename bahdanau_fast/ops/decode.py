"""A recurrent decoder that attends at every step, over a whole given sequence, as one operator.

Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates, F
hidden units of the attention. The state of the top layer is the query; the context goes into the
first layer, beside inputs whose part of the gates is computed for all steps in front:

    context_t = attention(W_query h_top[t-1]),  gates_t = input_gates_t + W_context context_t + ...

``decode`` leaves behind what backward needs, or with ``keep=False`` of the last step only;
``decode_greedy`` feeds back the likeliest token until every row has ended.

What does not have to wait for a step is left out of the loop: the gradients of all weights are one
product each over all steps, those of keys, values and w_v one pass over the keys.

Gates are in the order of the C++ (cpu/kernels/recurrent.h): GRU n r z on the input side, r z n on
the hidden side; LSTM i f g o. :mod:`steps` makes these arguments of an ``nn.GRU`` or ``nn.LSTM``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.ops.attend import attend_backward_keys, needs_of, weights_dtype
from bahdanau_fast.ops.operator import Operator
from bahdanau_fast.ops.projection import linear, product, sum_of_products
from bahdanau_fast.ops.second_derivatives import differentiate_again

__all__ = ["Arguments", "Decoded", "Rest", "by_steps", "decode", "decode_greedy"]


class Arguments(NamedTuple):
    """The differentiable inputs of :func:`decode`.

    Attributes:
        inputs: (T,B,E), float32 or float64.
        w_inputs: (G,E), of the first layer.
        input_bias: (G,), likewise.
        hidden: (L,B,H), the first states.
        cell: (L,B,H) of an LSTM, None for a GRU.
        keys: (B,Tk,F), projected.
        values: (B,Tk,Dv).
        w_query: (F,H).
        w_v: (1,F) or (F,).
        w_context: (G,Dv).
        w_input: (L-1,G,H), of the layers above the first.
        w_hidden: (L,G,H).
        bias: (L,4H), of all the gates; of the first layer only what ``input_bias`` leaves out.
    """

    inputs: Tensor
    w_inputs: Tensor
    input_bias: Tensor
    hidden: Tensor
    cell: Tensor | None
    keys: Tensor
    values: Tensor
    w_query: Tensor
    w_v: Tensor
    w_context: Tensor
    w_input: Tensor
    w_hidden: Tensor
    bias: Tensor


class Rest(NamedTuple):
    """The other inputs of :func:`decode`.

    Attributes:
        table: of ``ops.exp_keys``, or None.
        keys_max: likewise.
        valid_lens: None, (B,) or (B,1).
        mask: None, or bool (B,1,Tk).
        masks: (L-1,T,B,H), factors on what goes from layer to layer, or None.
        seed: (1,) int64, with dropout of the attention weights.
        dropout_p: probability of that.
    """

    table: Tensor | None = None
    keys_max: Tensor | None = None
    valid_lens: Tensor | None = None
    mask: Tensor | None = None
    masks: Tensor | None = None
    seed: Tensor | None = None
    dropout_p: float = 0.0


class Decoded(NamedTuple):
    """The results of :func:`decode`.

    Attributes:
        features: (T,B,H), the states of the top layer.
        hidden: (L,B,H), the last states.
        cell: (L,B,H) of an LSTM, (0,B,H) of a GRU.
        weights: (T,B,Tk), fp64 for fp64 and else fp32.
    """

    features: Tensor
    hidden: Tensor
    cell: Tensor
    weights: Tensor


def decode(arguments: Arguments, rest: Rest) -> Decoded:
    """Decode all steps in C++, forward and backward.

    Raises:
        RuntimeError: sizes or dtypes that do not fit together.
    """
    if not checks.needs_gradient(*arguments):
        arguments = Arguments(*(None if x is None else x.detach() for x in arguments))  # type: ignore[arg-type]
    return Decoded(*_Decode.apply(*arguments, rest))  # type: ignore[no-untyped-call]


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
            if layer == 0:
                inputs = input_gates + below @ w_context.t()
            else:
                own = bias[layer][:side]
                inputs = own + below @ w_input[layer - 1].t()
            through = before @ w_hidden[layer].t()
            if cell is not None:
                i, f, g, o = (inputs + through).split(units, -1)
                cells[layer] = f.sigmoid() * cells[layer] + i.sigmoid() * g.tanh()
                states[layer] = o.sigmoid() * cells[layer].tanh()
            else:
                n, r, z = inputs.split(units, -1)
                r_through, z_through, n_through = through.split(units, -1)
                r, z = (r + r_through).sigmoid(), (z + z_through).sigmoid()
                n = (n + r * (n_through + bias[layer][side:])).tanh()
                states[layer] = n + z * (before - n)
            below = states[layer]
            if rest.masks is not None and layer + 1 < len(states):
                below = below * rest.masks[layer, t]
        features.append(states[-1])
        weights.append(step_weights.squeeze(1))
    last_cell = torch.stack(cells) if cells else hidden.new_empty((0, *hidden.shape[1:]))
    all_weights = torch.stack(weights).to(weights_dtype(keys.dtype))
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


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        arguments, rest = Arguments(*inputs[:-1]), inputs[-1]
        keep = any(ctx.needs_input_grad)
        results = _decode.overload(_input_gates(arguments), *_in_order(arguments, rest), keep)
        states, cells, _, _, weights, _ = results
        if keep:
            ctx.save_for_backward(*arguments, *rest[:-1], *results)
        ctx.dropout_p = rest.dropout_p
        ctx.set_materialize_grads(False)
        last_cell = cells[:, -1] if len(cells) else states.new_empty((0, *states.shape[2:]))
        return states[-1, 1:], states[:, -1], last_cell, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(Arguments._fields)
        arguments = Arguments(*saved[:count])
        rest = Rest(*(*saved[count:-6], ctx.dropout_p))
        needed = Arguments(*ctx.needs_input_grad[:-1])
        if all(grad is None for grad in grads):
            return (None,) * (count + 1)
        if torch.is_grad_enabled():
            if ctx.dropout_p > 0.0:
                raise NotImplementedError(
                    "a second derivative through dropped-out weights of a whole decoder is not "
                    "implemented: attend() step by step, or dropout 0"
                )
            again = differentiate_again(
                lambda *tensors: by_steps(Arguments(*tensors), rest),
                arguments,
                [bool(need) for need in needed],
                grads,
            )
            return (*again, None)
        found = _gradients(arguments, rest, saved[-6:], grads, needed)
        return (
            *(grad if need else None for grad, need in zip(found, needed, strict=True)),
            None,
        )


def _gradients(
    arguments: Arguments,
    rest: Rest,
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: Arguments,
) -> Arguments:
    states, cells, contexts, queries, weights, gates = results
    grad_features, grad_hidden, grad_cell, grad_weights = (
        None if grad is None else grad.contiguous() for grad in grads
    )
    grad_gates, grad_first, grad_first_cell, grad_queries, grad_contexts, grad_scores, dropped = (
        _decode_backward.overload(
            *_in_order(arguments, rest),
            *(states, cells, queries, weights, gates),
            *(
                grad_features,
                grad_hidden,
                None if arguments.cell is None else grad_cell,
                grad_weights,
            ),
        )
    )
    side = len(arguments.w_inputs)
    grad_inputs, grad_states = grad_gates[..., :side], grad_gates[..., -side:]
    before, layers = states[:, :-1], range(len(states))
    below = states[:-1, 1:] if rest.masks is None else states[:-1, 1:] * rest.masks
    needs = needs_of(("keys", "values", "w_v"), (needed.keys, needed.values, needed.w_v))  # type: ignore[arg-type]
    grad_bias = grad_gates.sum((1, 2))
    dropped = weights if dropped.numel() == 0 else dropped
    by_row = [part.transpose(0, 1) for part in (dropped, grad_contexts, grad_scores, queries)]
    grad_keys, grad_values, grad_w_v = attend_backward_keys.overload(
        *by_row[:3],
        needs,
        *(by_row[3], arguments.keys, arguments.values, arguments.w_v),
        _for_all_steps(rest.valid_lens, len(queries)),
        *(rest.mask, rest.table, rest.keys_max),
    )
    first = grad_inputs[0]
    return Arguments(
        product(first, arguments.w_inputs) if needed.inputs else None,  # type: ignore[arg-type]
        sum_of_products(first, arguments.inputs),
        grad_bias[0, :side],
        grad_first,
        None if arguments.cell is None else grad_first_cell,
        grad_keys,
        grad_values,
        sum_of_products(grad_queries, before[-1]),
        grad_w_v,
        sum_of_products(first, contexts),
        _stacked(
            [sum_of_products(grad_inputs[i], below[i - 1]) for i in layers[1:]], arguments.w_input
        ),
        _stacked([sum_of_products(grad_states[i], before[i]) for i in layers], arguments.w_hidden),
        _without_inputs(grad_bias, side),
    )


def _without_inputs(grad_bias: Tensor, side: int) -> Tensor:
    grad_bias = grad_bias.clone()
    grad_bias[0, :side] = 0.0  # the first layer's are those of input_bias
    return grad_bias


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts) if parts else torch.empty_like(like)


def _for_all_steps(valid_lens: Tensor | None, steps: int) -> Tensor | None:
    if valid_lens is None or valid_lens.dim() != 2:
        return valid_lens
    return valid_lens.expand(-1, steps)


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
    return (
        hidden.new_empty((layers, steps + 1, batch, units)),
        hidden.new_empty((cells, steps + 1, batch, units)),
        hidden.new_empty((kept, batch, values.shape[2])),
        hidden.new_empty((kept, batch, keys.shape[2])),
        hidden.new_empty((steps, batch, keys.shape[1])),
        hidden.new_empty((layers, kept, batch, 4 * units)),
    )


def _backward_fake(
    hidden: Tensor, cell: Tensor | None, queries: Tensor, dropout_p: float, **named: Any
) -> tuple[Tensor, ...]:
    named |= {"hidden": hidden, "cell": cell, "input_gates": queries, "keep": True}
    _, _, contexts, queries, weights, gates = _fake(**named)
    return (
        gates,
        hidden.new_empty(hidden.shape),
        hidden.new_empty((0 if cell is None else hidden.shape[0], *hidden.shape[1:])),
        queries,
        contexts,
        weights,
        weights.new_empty((weights.shape[0] if dropout_p > 0.0 else 0, *weights.shape[1:])),
    )


def _greedy_fake(keys: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    steps = torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        keys.new_empty((keys.shape[0], steps), dtype=torch.int64),
        keys.new_empty((keys.shape[0], steps, keys.shape[1])),
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
