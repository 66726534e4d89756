"""A recurrent decoder that attends at every step, over a whole sequence, as one operator.

Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates, F
hidden units of the attention. The state of the top layer is the query; the context goes into the
first layer, beside inputs whose part of the gates is computed for all steps in front:

    context_t = attention(W_query h_top[t-1]),  gates_t = input_gates_t + W_context context_t + ...

``decode`` leaves behind what backward needs, or with ``keep=False`` of the last step only;
``decode_greedy`` feeds back the likeliest token until every row has ended. These operators are for
CPU tensors and, where all steps are one launch, for GPU tensors; else
:mod:`ops.decode_on_gpu` does the same in a loop of launches.

What does not have to wait for a step is left out of the loop: the gradients of all weights are one
product over all steps, the gradients of keys, values and w_v one pass over the keys.

Gates are in the order of the C++ (cpu/kernels/recurrent.h): GRU n r z on the input side, r z n on
the hidden side; LSTM i f g o. Weights and their gradients are whole, as torch's layers have them;
:class:`DecoderInputs` puts them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.ops import decode_on_gpu, decode_operators
from bahdanau_fast.ops.attention import attend_backward_keys, needs_of
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.decode_arguments import (
    Arguments,
    DecoderInputs,
    Dtypes,
    NonDifferentiable,
    OutputLayer,
    SpecialTokens,
    StepGrads,
    StepResults,
    cast_gradients,
    concat_rows,
    operator_arguments,
)
from bahdanau_fast.ops.operator import Operator
from bahdanau_fast.ops.projection import linear, product, sum_of_products
from bahdanau_fast.ops.second_derivatives import differentiate_again


class Decoded(NamedTuple):
    """The results of :func:`decode`."""

    features: Tensor  # (T,B,H), the states of the top layer
    hidden: Tensor  # (L,B,H), the last states
    cell: Tensor  # (L,B,H) of an LSTM, (0,B,H) of a GRU
    weights: Tensor  # (T,B,Tk), fp64 for fp64 and else fp32


def decode(
    inputs: DecoderInputs,
    constants: NonDifferentiable,
    dtypes: Dtypes,
    loop_backend: str | None = None,
) -> Decoded:
    """All steps, forward and backward: the operators, or a loop in which a backend attends."""
    units = inputs.hidden.shape[2]
    with without_autocast(inputs.keys.device):
        if loop_backend is None:
            inputs = inputs.padded()
        tensors = inputs.flat()
        if checks.needs_gradient(*tensors):
            layers = len(inputs.layers)
            node: Any = _Decode
            decoded = Decoded(*node.apply(constants, dtypes, loop_backend, layers, *tensors))
        else:
            arguments = operator_arguments(inputs, dtypes.operators)
            decoded = _decoded(_forward(arguments, constants, loop_backend, keep=False), dtypes)
    if inputs.hidden.shape[2] == units:  # else it was padded
        return decoded
    *states, weights = decoded
    return Decoded._make((*(x[..., :units] for x in states), weights))


def decode_greedily(
    inputs: DecoderInputs,
    constants: NonDifferentiable,
    dtype: torch.dtype,
    dense: OutputLayer,
    banned_tokens: list[int],
    special: SpecialTokens,
    max_steps: int,
    loop_backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens (B,T) and weights (B,T,Tk) until every row has ended; without gradients.

    ``dense`` never chooses ``banned_tokens``.
    """
    with torch.no_grad(), without_autocast(inputs.keys.device):
        if loop_backend is not None:
            arguments = operator_arguments(inputs, dtype)
            with torch._C._AutoDispatchBelowAutograd():
                return decode_on_gpu.decode_greedily(
                    loop_backend, arguments, constants, dense, banned_tokens, special, max_steps
                )
        arguments = operator_arguments(inputs.padded(), dtype)
        if not arguments.keys.is_cpu:
            dense = decode_on_gpu.without_banned(banned_tokens, dense, arguments.hidden.shape[2])
            banned_tokens = []
        tokens, weights = _call(
            decode_operators.decode_greedy,
            arguments,
            constants,
            embedding=arguments.inputs.contiguous(),
            w_embedded=arguments.w_inputs,
            w_dense=dense.weight.contiguous(),
            dense_bias=dense.bias.contiguous(),
            left_out=torch.tensor(banned_tokens, dtype=torch.int64),
            first=special.bos,
            last=special.eos,
            blank=special.pad,
            max_steps=max_steps,
        )
    return tokens, weights


def by_steps(arguments: Arguments, constants: NonDifferentiable) -> Decoded:
    """As :func:`decode` in plain PyTorch, step by step; without dropout of the weights."""
    a, all_input_gates = arguments, _input_gates(arguments)
    states, cells = list(a.hidden.unbind(0)), [] if a.cell is None else list(a.cell.unbind(0))
    features, weights = [], []
    units, gates = a.hidden.shape[2], all_input_gates.shape[2]
    for t, input_gates in enumerate(all_input_gates.unbind(0)):
        queries = (states[-1] @ a.w_query.t()).unsqueeze(1)
        context, step_weights = reference.attend(
            queries, a.keys, a.values, a.w_v, constants.valid_lens, mask=constants.mask
        )
        below = context.squeeze(1)
        for layer, before in enumerate(states):
            added = a.bias[layer, :gates] if layer else input_gates
            inputs = added + below @ (a.w_input[layer - 1] if layer else a.w_context).t()
            hidden = before @ a.w_hidden[layer].t()
            if a.cell is not None:
                i, f, g, o = (inputs + hidden).split(units, -1)
                cells[layer] = f.sigmoid() * cells[layer] + i.sigmoid() * g.tanh()
                states[layer] = o.sigmoid() * cells[layer].tanh()
            else:
                n, r, z = inputs.split(units, -1)
                hidden_r, hidden_z, hidden_n = hidden.split(units, -1)
                r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
                n = (n + r * (hidden_n + a.bias[layer, gates:])).tanh()
                states[layer] = n + z * (before - n)
            below = states[layer]
            if constants.masks is not None and layer + 1 < len(states):
                below = below * constants.masks[layer, t]
        features.append(states[-1])
        weights.append(step_weights.squeeze(1))
    last_cell = torch.stack(cells) if cells else a.hidden[:0]
    all_weights = torch.stack(weights).to(torch.promote_types(a.keys.dtype, torch.float32))
    return Decoded(torch.stack(features), torch.stack(states), last_cell, all_weights)


def _input_gates(arguments: Arguments) -> Tensor:
    return linear(arguments.inputs, arguments.w_inputs, arguments.input_bias)


def _call(operator: Operator, *parts: Any, **others: Any) -> Any:
    """Call an operator; its arguments are fields of the parts (NamedTuples), or others by name."""
    in_order = _in_order(operator, tuple(map(type, parts)), tuple(others))
    return operator.now(*in_order((*chain(*parts), *others.values())))


@cache
def _in_order(
    operator: Operator, parts: tuple[Any, ...], others: tuple[str, ...]
) -> Callable[[Any], Any]:
    return operator.in_order((*chain(*(part._fields for part in parts)), *others))


def _forward(
    arguments: Arguments, constants: NonDifferentiable, loop_backend: str | None, keep: bool
) -> StepResults:
    gates = _input_gates(arguments)
    if loop_backend is None:
        return StepResults(
            *_call(decode_operators.decode, arguments, constants, input_gates=gates, keep=keep)
        )
    with torch._C._AutoDispatchBelowAutograd():
        return decode_on_gpu.forward(loop_backend, gates, arguments, constants, keep)


def _decoded(results: StepResults, dtypes: Dtypes) -> Decoded:
    # One may write into a result in place: none is a view of another, or of what backward needs.
    views = results.states[-1, 1:], results.states[:, -1], results.cells[:, -1]
    states = [torch.empty_like(x, dtype=dtypes.states) for x in views]
    torch._foreach_copy_(states, views)  # in one launch
    return Decoded._make((*states, results.weights.to(dtypes.weights)))


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        constants: NonDifferentiable,
        dtypes: Dtypes,
        loop_backend: str | None,
        layers: int,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        arguments = operator_arguments(DecoderInputs.from_flat(tensors, layers), dtypes.operators)
        results = _forward(arguments, constants, loop_backend, keep=True)
        decoded = _decoded(results, dtypes)
        ctx.save_for_backward(*tensors, *arguments, *constants[:-1], *results, decoded.weights)
        ctx.dropout_p, ctx.dtypes, ctx.layers = constants.dropout_p, dtypes, layers
        ctx.loop_backend = loop_backend
        ctx.set_materialize_grads(False)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, _, _, *needed = ctx.needs_input_grad
        saved = iter(ctx.saved_tensors)
        tensors = tuple(islice(saved, len(needed)))
        arguments = Arguments(*islice(saved, len(Arguments._fields)))
        constant_tensors = islice(saved, len(NonDifferentiable._fields) - 1)
        constants = NonDifferentiable._make((*constant_tensors, ctx.dropout_p))
        results = StepResults(*islice(saved, len(StepResults._fields)))
        (decoded_weights,) = saved
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        with without_autocast(arguments.keys.device):
            if torch.is_grad_enabled():
                again = constants, ctx.dtypes, ctx.layers, tensors, needed, grads
                return (*[None] * 4, *_gradients_again(*again))
            needed_inputs = DecoderInputs.from_flat(needed, ctx.layers)
            input_grads = _gradients(
                *(arguments, constants, results, decoded_weights, grads, needed_inputs),
                ctx.loop_backend,
            ).flat()
        wanted = [grad if need else None for grad, need in zip(input_grads, needed, strict=True)]
        return (*[None] * 4, *cast_gradients(tensors, wanted))


def _gradients_again(
    constants: NonDifferentiable,
    dtypes: Dtypes,
    layers: int,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: tuple[Tensor | None, ...],
) -> Sequence[Tensor | None]:
    if constants.dropout_p > 0.0:
        raise NotImplementedError(
            "a second derivative through dropped-out weights of a whole decoder is not "
            "implemented: attend() step by step, or dropout 0"
        )

    def steps(*tensors: Any) -> Decoded:
        inputs, dtype = DecoderInputs.from_flat(tensors, layers), dtypes.operators
        return by_steps(inputs.in_operator_order(dtype, partial(concat_rows, dtype)), constants)

    return differentiate_again(steps, tensors, needed, grads)


def _gradients(
    arguments: Arguments,
    constants: NonDifferentiable,
    results: StepResults,
    decoded_weights: Tensor,
    grads: tuple[Tensor | None, ...],
    needed: DecoderInputs,
    loop_backend: str | None,
) -> DecoderInputs:
    states = results.states
    *state_grads, grad_weights = grads
    grads = (
        *[None if grad is None else grad.to(states.dtype) for grad in state_grads],
        None if grad_weights is None else grad_weights.to(results.weights.dtype),
    )
    needs = needs_of(("keys", "values", "w_v"), (needed.keys, needed.values, needed.w_v))  # type: ignore[arg-type]
    if loop_backend is None:
        step_grads = _backward(arguments, constants, results, decoded_weights, grads, needs)
    else:
        step_grads = decode_on_gpu.backward(
            loop_backend, arguments, constants, results, grads, needs
        )
    lstm, gates, units = arguments.cell is not None, len(arguments.w_inputs), states.shape[3]
    grad_input_gates = step_grads.gates[..., :gates]
    grad_hidden_gates = step_grads.gates[..., -gates:]
    grad_bias = step_grads.gates.sum((1, 2))
    states_before, layer_inputs = states[:, :-1], states[:-1, 1:]
    if constants.masks is not None:
        layer_inputs = layer_inputs * constants.masks
    layers = []
    for i, weights in enumerate(needed.layers):
        below = layer_inputs[i - 1] if i else torch.cat((results.contexts, arguments.inputs), -1)
        input_side = [sum_of_products(grad_input_gates[i], below)]  # weight_ih and bias_ih
        hidden_side = [sum_of_products(grad_hidden_gates[i], states_before[i])]
        if len(weights) > 2:  # two gradients share no memory
            bias = grad_bias[i, :gates]
            input_side.append(bias.clone() if lstm else bias)
            hidden_side.append(grad_bias[i, -gates:])
        if not lstm:  # the input side's n r z is r z n in torch's layers
            input_side = [torch.cat((x[units:], x[:units])) for x in input_side]
        layers.append(tuple(chain.from_iterable(zip(input_side, hidden_side, strict=True))))
    return DecoderInputs(
        inputs=product(grad_input_gates[0], arguments.w_inputs) if needed.inputs else None,  # type: ignore[arg-type]
        hidden=step_grads.hidden,
        cell=step_grads.cell if lstm else None,
        keys=step_grads.keys,
        values=step_grads.values,
        w_query=sum_of_products(step_grads.queries, states_before[-1]),
        w_v=step_grads.w_v,
        layers=tuple(layers),
    )


def _backward(
    arguments: Arguments,
    constants: NonDifferentiable,
    results: StepResults,
    decoded_weights: Tensor,
    grads: tuple[Tensor | None, ...],
    needs: int,
) -> StepGrads:
    """As :func:`decode_on_gpu.backward`, by the operators."""
    grad_states, grad_hidden, grad_cell, grad_weights = [
        None if grad is None else grad.contiguous() for grad in grads
    ]
    *step_grads, grad_contexts, grad_scores, dropped = _call(
        decode_operators.decode_backward,
        arguments,
        constants,
        results,
        grad_states=grad_states,
        grad_hidden=grad_hidden,
        grad_cell=None if arguments.cell is None else grad_cell,
        grad_weights=grad_weights,
    )
    if dropped.numel() == 0:  # no weight was dropped
        narrow = decoded_weights.dtype == arguments.keys.dtype
        dropped = decoded_weights if narrow else results.weights
    memory_grads = _call(
        attend_backward_keys,
        arguments,
        constants,
        weights=dropped.transpose(0, 1),
        grad_context=grad_contexts.transpose(0, 1),
        grad_scores=grad_scores.transpose(0, 1),
        needs=needs,
        queries=results.queries.transpose(0, 1),
    )
    return StepGrads(*step_grads, *memory_grads)
