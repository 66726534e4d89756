"""The steps of an attention decoder: one by one, or all in one operator.

Its inputs are a sequence (:func:`decode_inputs`), or tokens that it chooses
(:func:`decode_greedily`). The attention comes first in a step, with the state before it as the
query, or last, with the state after it (:func:`decode_attention_last`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks
from bahdanau_fast.memory import Memory, project
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.modules.attention_weights import keep
from bahdanau_fast.modules.layers import is_unchanged, parts_of, plain_dropout
from bahdanau_fast.ops import decode
from bahdanau_fast.ops.decode_arguments import (
    DecoderInputs,
    Dtypes,
    NonDifferentiable,
    OutputLayer,
    SpecialTokens,
)
from bahdanau_fast.ops.dropout import dropout_seed

__all__ = ["DecoderOutputs", "SpecialTokens", "attend_step", "decode_greedily", "decode_inputs"]

RNN = nn.GRU | nn.LSTM
# From inputs (B,E), a state and the memory: features (B,H), weights (B,1,Tk) and the new state.
Step = Callable[[Tensor, Any, Memory], tuple[Tensor, Tensor, Any]]
_NO_CELLS = backends.Cells()


class DecoderOutputs(NamedTuple):
    """What a decoder computes in all its steps."""

    # (T,B,H), the states of the top layer; (T,B,H+Dv) with the contexts where attention comes last.
    features: Tensor
    weights: Tensor  # (T,B,Tk)
    hidden: Any  # (L,B,H), the last states; of an LSTM a pair: states, cells


def attend_step(
    attention: Any, rnn: RNN, inputs: Tensor, hidden: Any, memory: Memory
) -> tuple[Tensor, Tensor, Any]:
    """One step: the top layer's state is the query; the context is concatenated with the input."""
    # K sequences of a source are next to each other: inputs (B*K,E) and hidden (L,B*K,H) give
    # features (B*K,H), weights (B,K,Tk) and the new hidden state.
    top = (hidden[0] if isinstance(hidden, tuple) else hidden)[-1]
    batch = memory.values.shape[0]
    queries = top.unflatten(0, (batch, top.shape[0] // batch if batch else 1))
    context, weights = attend_with_hooks(attention, queries, memory)
    below = torch.cat((context.flatten(0, 1), inputs), dim=-1)
    features, hidden = rnn(below.unsqueeze(0), hidden)
    return features.squeeze(0), weights, hidden


def step_attention_last(
    attention: Any, rnn: RNN, inputs: Tensor, state: Any, memory: Memory
) -> tuple[Tensor, Tensor, Any]:
    """One step, attention last: features and context (B,H+Dv), weights (B,1,Tk), new state."""
    # A state is a pair: that of the RNN, and the context (1,B,Dv), an input of the next step.
    hidden, context = state
    below = torch.cat((context, inputs.unsqueeze(0)), dim=-1)
    features, hidden = rnn(below, hidden)
    context, weights = attend_with_hooks(attention, features.transpose(0, 1), memory)
    context = context.transpose(0, 1)
    return torch.cat((features, context), dim=-1).squeeze(0), weights, (hidden, context)


def decode_attention_last(
    attention: Any, rnn: RNN, inputs: Tensor, state: Any, memory: Memory
) -> DecoderOutputs:
    """All steps of :func:`step_attention_last`, by the operator if possible."""
    # Attention at the end of a step is attention at the beginning of the next one: the first RNN
    # step and the last attention are computed here, all between them by the operator, whose steps
    # begin with the attention. It returns no contexts: they are computed from its weights, which
    # are those before dropout.
    if not attention_last_has_operator(attention, rnn, inputs, memory):
        step = partial(step_attention_last, attention, rnn)
        return decode_inputs(attention, rnn, inputs, state, memory, step)
    hidden, context = state
    first, hidden = rnn(torch.cat((context, inputs[:1]), -1), hidden)
    rest = decode_inputs(attention, rnn, inputs[1:], hidden, memory)
    features = torch.cat((first, rest.features))
    last, last_weights = attend_with_hooks(attention, features[-1:].transpose(0, 1), memory)
    contexts = torch.cat((torch.bmm(rest.weights.transpose(0, 1), memory.values), last), 1)
    contexts, weights = contexts.transpose(0, 1), (rest.weights, last_weights.transpose(0, 1))
    return DecoderOutputs(
        torch.cat((features, contexts), -1), torch.cat(weights), (rest.hidden, contexts[-1:])
    )


def attention_last_has_operator(attention: Any, rnn: RNN, inputs: Tensor, memory: Memory) -> bool:
    """Whether :func:`decode_attention_last` takes the operator for all steps but the first."""
    if len(inputs) < 2 or plain_dropout(attention.dropout):
        return False
    route = _decoder_route(attention, rnn, inputs.dtype, memory, len(inputs) - 1)
    return route.kind != "step by step"


def attend_with_hooks(attention: Any, queries: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Contexts (B,Tq,Dv) and weights (B,Tq,Tk); an AdditiveAttention's hooks or ``forward`` run."""
    ours, kind = AdditiveAttention, type(attention)
    if isinstance(attention, ours) and not (
        is_unchanged(attention) and (kind.forward is ours.forward or kind.attend is not ours.attend)
    ):
        context = attention(queries, memory, None)  # type: ignore[arg-type]
    else:
        context = attention.attend(queries, memory)
    return context, attention.attention_weights


def decode_inputs(
    attention: Any, rnn: RNN, inputs: Tensor, hidden: Any, memory: Memory, step: Step | None = None
) -> DecoderOutputs:
    """All steps of inputs (T,B,E), by ``step``; without one by an operator, else by attend_step."""
    # ``route_decoder`` says where an operator takes them. Results are the same, but for the order
    # of sums and of random numbers. Compiled code runs it between its graphs.
    run = _decode_outside_graphs if _breaks_graphs() else _decode_inputs
    return run(attention, rnn, inputs, hidden, memory, step)


def _breaks_graphs() -> bool:
    """Whether compiled code would break its graph at every step: the compiler knows no nn.GRU."""
    global _decode_outside_graphs
    if (
        "torch._dynamo" not in sys.modules
        or checks.is_exporting()
        or torch._dynamo.config.allow_rnn
    ):
        return False
    if _decode_outside_graphs is _decode_inputs:
        _decode_outside_graphs = torch.compiler.disable(_decode_inputs)
    return True


# Called while code is compiled, as backends.why_not.
_breaks_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _decode_inputs(
    attention: Any, rnn: RNN, inputs: Tensor, hidden: Any, memory: Memory, step: Step | None
) -> DecoderOutputs:
    if step is None:
        route = _decoder_route(attention, rnn, inputs.dtype, memory, len(inputs))
        if route.kind != "step by step":
            return _decode_by_operator(route, attention, rnn, inputs, hidden, memory)
        step = partial(attend_step, attention, rnn)
        if memory.maker is None:
            memory = attention._shared(memory)
    features, weights = [], []
    for step_inputs in inputs.unbind(0):
        feature, step_weights, hidden = step(step_inputs, hidden, memory)
        features.append(feature)
        weights.append(step_weights.squeeze(1))
    return DecoderOutputs(torch.stack(features), torch.stack(weights), hidden)


_decode_outside_graphs: Callable[..., DecoderOutputs] = _decode_inputs


def decode_greedily(
    layers: tuple[Any, RNN, nn.Module, nn.Module],
    hidden: Any,
    memory: Memory,
    special: SpecialTokens,
    banned_tokens: list[int],
    max_steps: int,
) -> tuple[Tensor, Tensor] | None:
    """Tokens (B,T) and weights (B,T,Tk) until all rows end; None where no operator decodes."""
    attention, rnn, embedding, dense = layers
    if not (
        type(embedding) is nn.Embedding
        and type(dense) is nn.Linear
        and embedding.max_norm is None
        and is_unchanged(embedding)
        and is_unchanged(dense)
        and embedding.weight.dtype == dense.weight.dtype
    ):
        return None
    weight, generation = embedding.weight, backends.Generation(len(embedding.weight), max_steps)
    route = _decoder_route(attention, rnn, weight.dtype, memory, 0, generation)
    dtype = route.dtype
    if dtype is None:
        return None
    inputs, constants = _operator_inputs(dtype, attention, rnn, weight, hidden, memory)
    bias = dense.weight.new_zeros(len(dense.weight)) if dense.bias is None else dense.bias
    output = OutputLayer(dense.weight.to(dtype), bias.to(dtype))
    return decode.decode_greedily(
        inputs, constants, dtype, output, banned_tokens, special, max_steps, route.loop_backend
    )


def explain(attention: Any, rnn: RNN, inputs: Tensor, memory: Memory) -> str:
    """How all steps of inputs (T,B,E) would be computed, and why."""
    route = _decoder_route(attention, rnn, inputs.dtype, memory, len(inputs))
    return f"{route.backend}: {route.reason}"


def _decoder_route(
    attention: Any,
    rnn: RNN,
    dtype: torch.dtype,
    memory: Memory,
    steps: int,
    generation: backends.Generation | None = None,
) -> backends.DecoderRoute:
    """How all steps are computed: the choice of :func:`backends.decide_decoder`."""
    unmodified = (
        type(attention) is AdditiveAttention
        and is_unchanged(attention)
        and "attend" not in attention.__dict__
        and attention.activation == "tanh"
        and type(rnn) in (nn.GRU, nn.LSTM)
        and is_unchanged(rnn)
        and not (rnn.bidirectional or rnn.proj_size)
    )
    if unmodified:
        w_q, _, w_v, dropout_p = parts_of(attention)
        unmodified = not (w_q is None or w_v is None or dropout_p is None)
    cells = _NO_CELLS
    if unmodified:
        lstm = type(rnn) is nn.LSTM
        cells = backends.Cells(lstm, rnn.num_layers, rnn.hidden_size, rnn.input_size)
    keys, values = memory.projected.keys, memory.values
    return backends.decide_decoder(unmodified, dtype, keys, values, cells, steps, generation)


def _operator_inputs(
    dtype: torch.dtype,
    attention: AdditiveAttention,
    rnn: RNN,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
) -> tuple[DecoderInputs, NonDifferentiable]:
    """The arguments of the operators but for dropout."""
    h, c = hidden if isinstance(hidden, tuple) else (hidden, None)
    lens = memory.valid_lens
    projected = memory.projected
    if projected.keys.dtype is not dtype:
        projected = project(projected.keys.to(dtype), projected.table is not None)
    tensors = DecoderInputs(
        inputs=inputs,
        hidden=h,
        cell=c,
        keys=projected.keys,
        values=memory.values,
        w_query=attention.W_q.weight,
        w_v=attention.w_v.weight,
        layers=tuple(map(tuple, rnn.all_weights)),
    )
    if lens is not None and lens.dim() == 2:  # of one query
        lens = lens.squeeze(1)
    table, keys_max = projected.table, projected.keys_max
    return tensors, NonDifferentiable(table, keys_max, lens, memory.mask)


def _decode_by_operator(
    route: backends.DecoderRoute,
    attention: AdditiveAttention,
    rnn: RNN,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
) -> DecoderOutputs:
    dtype, masks = route.dtype, None
    assert dtype is not None
    tensors, constants = _operator_inputs(dtype, attention, rnn, inputs, hidden, memory)
    if rnn.training and rnn.dropout > 0.0 and rnn.num_layers > 1:
        shape = (rnn.num_layers - 1, *inputs.shape[:2], rnn.hidden_size)
        masks = nn.functional.dropout(inputs.new_ones(shape, dtype=dtype), rnn.dropout)
    dropout_p = plain_dropout(attention.dropout) or 0.0
    seed = dropout_seed(inputs) if dropout_p > 0.0 else None
    constants = constants._replace(masks=masks, seed=seed, dropout_p=dropout_p)
    decoded = decode.decode(tensors, constants, _dtypes(rnn, inputs, dtype), route.loop_backend)
    keep(attention, decoded.weights[-1].unsqueeze(1))
    last = decoded.hidden if tensors.cell is None else (decoded.hidden, decoded.cell)
    return DecoderOutputs(decoded.features, decoded.weights, last)


def _dtypes(rnn: RNN, inputs: Tensor, dtype: torch.dtype) -> Dtypes:
    """Results have the dtypes that single steps give them, though ``dtype`` is computed in."""
    autocast = checks.autocast_dtype(inputs.device)
    if autocast is None or dtype == torch.float64:
        return Dtypes(dtype, dtype, dtype)
    if not inputs.is_cpu:
        return Dtypes(dtype, autocast, torch.float32)
    # On the CPU a GRU adds up its state in the dtype of the inputs; autocast knows an LSTM.
    states = torch.promote_types(autocast, inputs.dtype) if type(rnn) is nn.GRU else autocast
    return Dtypes(dtype, states, autocast)
