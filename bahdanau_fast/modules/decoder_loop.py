"""The steps of an attention decoder: one by one, or all in one operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks
from bahdanau_fast.memory import Memory, project
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.modules.attention_weights import keep
from bahdanau_fast.modules.layers import is_unchanged, parts_of, plain_dropout
from bahdanau_fast.ops import decode
from bahdanau_fast.ops.decode import SpecialTokens
from bahdanau_fast.ops.dropout import dropout_seed

__all__ = [
    "Sequence",
    "SpecialTokens",
    "attend_step",
    "attend_with_hooks",
    "decode_after",
    "decode_given",
    "decode_greedily",
    "explain",
    "takes_operator_after",
]

_NO_CELLS = backends.Cells()


class Sequence(NamedTuple):
    """The results of a decoder."""

    features: Tensor  # (T,B,H), the states of the top layer
    weights: Tensor  # (T,B,Tk)
    hidden: Any  # (L,B,H), the last states; of an LSTM a pair: states, cells


def attend_step(
    attention: Any, rnn: nn.GRU | nn.LSTM, inputs: Tensor, hidden: Any, memory: Memory
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


def attend_after_step(
    attention: Any, rnn: nn.GRU | nn.LSTM, inputs: Tensor, state: Any, memory: Memory
) -> tuple[Tensor, Tensor, Any]:
    """One step whose new state is the query: features and context (B,H+Dv), weights, state."""
    # The state is a pair: that of the cell, and the context (1,B,Dv) that goes into the next step.
    hidden, context = state
    below = torch.cat((context, inputs.unsqueeze(0)), dim=-1)
    features, hidden = rnn(below, hidden)
    context, weights = attend_with_hooks(attention, features.transpose(0, 1), memory)
    context = context.transpose(0, 1)
    return torch.cat((features, context), dim=-1).squeeze(0), weights, (hidden, context)


def decode_after(
    attention: Any, rnn: nn.GRU | nn.LSTM, inputs: Tensor, state: Any, memory: Memory
) -> Sequence:
    """All steps of :func:`attend_after_step`, by the operator of the other order if possible."""
    # From the second step on, attending after a step is attending before the next one. The operator
    # returns no contexts: they are made of its weights again, which are those before dropout.
    if not takes_operator_after(attention, rnn, inputs, memory):
        step = partial(attend_after_step, attention, rnn)
        return decode_given(attention, rnn, inputs, state, memory, step)
    hidden, context = state
    first, hidden = rnn(torch.cat((context, inputs[:1]), -1), hidden)
    rest = decode_given(attention, rnn, inputs[1:], hidden, memory)
    features = torch.cat((first, rest.features))
    last, last_weights = attend_with_hooks(attention, features[-1:].transpose(0, 1), memory)
    contexts = torch.cat((torch.bmm(rest.weights.transpose(0, 1), memory.values), last), 1)
    contexts, weights = contexts.transpose(0, 1), (rest.weights, last_weights.transpose(0, 1))
    return Sequence(
        torch.cat((features, contexts), -1), torch.cat(weights), (rest.hidden, contexts[-1:])
    )


def takes_operator_after(
    attention: Any, rnn: nn.GRU | nn.LSTM, inputs: Tensor, memory: Memory
) -> bool:
    """Whether :func:`decode_after` takes the operator for all steps but the first."""
    if len(inputs) < 2 or plain_dropout(attention.dropout):
        return False
    return _operator(attention, rnn, inputs.dtype, memory, len(inputs) - 1).kind != "step by step"


def attend_with_hooks(attention: Any, queries: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Contexts (B,Tq,Dv) and weights (B,Tq,Tk) of an attention with its hooks."""
    if isinstance(attention, AdditiveAttention) and not is_unchanged(attention):
        context = attention(queries, memory, None)  # type: ignore[arg-type]
    else:  # which runs no hooks
        context = attention.attend(queries, memory)
    return context, attention.attention_weights


def decode_given(
    attention: Any,
    rnn: nn.GRU | nn.LSTM,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
    step: Callable[[Tensor, Any, Memory], tuple[Tensor, Tensor, Any]] | None = None,
) -> Sequence:
    """All steps of inputs (T,B,E), in one operator if possible; else by ``step`` or attend_step."""
    # It is possible on the CPU, in fp32 and fp64, and on a GPU in what its kernels compute, in one
    # launch or in a loop of them, if the layers are unmodified (no hooks, no replaced or patched
    # layers) and nothing traces or transforms the call, which compiled code leaves out of its
    # graphs. All give the same results, except for the order of sums and of random numbers. Under
    # autocast one operator computes in its dtype, on the CPU in fp32.
    run = _between_graphs if _breaks_graphs() else _decode_given
    return run(attention, rnn, inputs, hidden, memory, step)


def _breaks_graphs() -> bool:
    """Whether compiled code would break its graph at every step: the compiler knows no nn.GRU."""
    global _between_graphs
    if (
        "torch._dynamo" not in sys.modules
        or checks.is_exporting()
        or torch._dynamo.config.allow_rnn
    ):
        return False
    if _between_graphs is _decode_given:
        _between_graphs = torch.compiler.disable(_decode_given)
    return True


# Called while code is compiled, as backends.why_not.
_breaks_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _decode_given(
    attention: Any,
    rnn: nn.GRU | nn.LSTM,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
    step: Callable[[Tensor, Any, Memory], tuple[Tensor, Tensor, Any]] | None,
) -> Sequence:
    if step is None:
        route = _operator(attention, rnn, inputs.dtype, memory, len(inputs))
        if route.kind != "step by step":
            return _decode(route, attention, rnn, inputs, hidden, memory)
        step = partial(attend_step, attention, rnn)
        if memory.maker is None:
            memory = attention._shared(memory)
    features, weights = [], []
    for step_inputs in inputs.unbind(0):
        feature, step_weights, hidden = step(step_inputs, hidden, memory)
        features.append(feature)
        weights.append(step_weights.squeeze(1))
    return Sequence(torch.stack(features), torch.stack(weights), hidden)


_between_graphs: Callable[..., Sequence] = _decode_given


def decode_greedily(
    layers: tuple[Any, nn.Module, nn.Module, nn.Module],
    hidden: Any,
    memory: Memory,
    special: SpecialTokens,
    banned_tokens: list[int],
    max_steps: int,
) -> tuple[Tensor, Tensor] | None:
    """Tokens (B,T) and weights (B,T,Tk) until all rows end; None where that takes single steps."""
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
    route = _operator(attention, rnn, weight.dtype, memory, 0, generation)
    dtype = route.dtype
    if dtype is None:
        return None
    inputs, constants = _inputs(dtype, attention, rnn, weight, hidden, memory)
    bias = dense.weight.new_zeros(len(dense.weight)) if dense.bias is None else dense.bias
    output = decode.OutputLayer(dense.weight.to(dtype), bias.to(dtype))
    return decode.decode_greedily(
        inputs, constants, dtype, output, banned_tokens, special, max_steps, route.loop_backend
    )


def explain(attention: Any, rnn: nn.GRU | nn.LSTM, inputs: Tensor, memory: Memory) -> str:
    """How all steps of inputs (T,B,E) would be computed, and why."""
    route = _operator(attention, rnn, inputs.dtype, memory, len(inputs))
    return f"{route.backend}: {route.reason}"


def _operator(
    attention: Any,
    rnn: nn.Module,
    dtype: torch.dtype,
    memory: Memory,
    steps: int,
    generation: backends.Generation | None = None,
) -> backends.DecoderRoute:
    """As :func:`backends.decide_decoder`."""
    plain = (
        type(attention) is AdditiveAttention
        and is_unchanged(attention)
        and "attend" not in attention.__dict__
        and attention.activation == "tanh"
        and type(rnn) in (nn.GRU, nn.LSTM)
        and is_unchanged(rnn)
        and not (rnn.bidirectional or rnn.proj_size)
    )
    if plain:
        w_q, _, w_v, dropout_p = parts_of(attention)
        plain = not (w_q is None or w_v is None or dropout_p is None)
    cells = _NO_CELLS
    if plain:
        layer, lstm = cast(nn.RNNBase, rnn), type(rnn) is nn.LSTM
        cells = backends.Cells(lstm, layer.num_layers, layer.hidden_size, layer.input_size)
    keys, values = memory.projected.keys, memory.values
    return backends.decide_decoder(plain, dtype, keys, values, cells, steps, generation)


def _inputs(
    dtype: torch.dtype,
    attention: AdditiveAttention,
    rnn: nn.Module,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
) -> tuple[decode.DecoderInputs, decode.NonDifferentiable]:
    """What all steps take, without dropout."""
    h, c = hidden if isinstance(hidden, tuple) else (hidden, None)
    lens = memory.valid_lens
    projected = memory.projected
    if projected.keys.dtype is not dtype:
        projected = project(projected.keys.to(dtype), projected.table is not None)
    tensors = decode.DecoderInputs(
        inputs=inputs,
        hidden=h,
        cell=c,
        keys=projected.keys,
        values=memory.values,
        w_query=attention.W_q.weight,
        w_v=attention.w_v.weight,
        layers=tuple(map(tuple, rnn.all_weights)),  # type: ignore[arg-type]
    )
    if lens is not None and lens.dim() == 2:  # of one query
        lens = lens.squeeze(1)
    table, keys_max = projected.table, projected.keys_max
    return tensors, decode.NonDifferentiable(table, keys_max, lens, memory.mask)


def _decode(
    route: backends.DecoderRoute,
    attention: AdditiveAttention,
    rnn: nn.GRU | nn.LSTM,
    inputs: Tensor,
    hidden: Any,
    memory: Memory,
) -> Sequence:
    dtype, masks = route.dtype, None
    assert dtype is not None
    tensors, constants = _inputs(dtype, attention, rnn, inputs, hidden, memory)
    if rnn.training and rnn.dropout > 0.0 and rnn.num_layers > 1:
        shape = (rnn.num_layers - 1, *inputs.shape[:2], rnn.hidden_size)
        masks = nn.functional.dropout(inputs.new_ones(shape, dtype=dtype), rnn.dropout)
    dropout_p = plain_dropout(attention.dropout) or 0.0
    seed = dropout_seed(dropout_p, inputs)
    constants = constants._replace(masks=masks, seed=seed, dropout_p=dropout_p)
    decoded = decode.decode(tensors, constants, _dtypes(rnn, inputs, dtype), route.loop_backend)
    keep(attention, decoded.weights[-1].unsqueeze(1))
    last = decoded.hidden if tensors.cell is None else (decoded.hidden, decoded.cell)
    return Sequence(decoded.features, decoded.weights, last)


def _dtypes(rnn: nn.Module, inputs: Tensor, dtype: torch.dtype) -> decode.Dtypes:
    """With the results as single steps give them, where one operator computes in ``dtype``."""
    autocast = checks.autocast_dtype(inputs.device)
    if autocast is None or dtype == torch.float64:
        return decode.Dtypes(dtype, dtype, dtype)
    if not inputs.is_cpu:
        return decode.Dtypes(dtype, autocast, torch.float32)
    # On the CPU a GRU adds up its state in the dtype of the inputs; autocast knows an LSTM.
    states = torch.promote_types(autocast, inputs.dtype) if type(rnn) is nn.GRU else autocast
    return decode.Dtypes(dtype, states, autocast)
