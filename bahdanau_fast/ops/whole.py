"""Operators that project, too: for calls so small that calling costs more than computing.

``additive_attention`` takes raw queries and keys and has one node in the autograd graph instead of
three. It is right at any size, but beyond a few rows a matrix library projects faster: it serves
calls up to ``Limits.one_operator_work``, those of a course notebook. ``attend_step`` is for calls
without gradients and dropout; it takes raw queries, and keys that are raw or projected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops import TAGS, library, sharding, weights_dtype
from bahdanau_fast.ops.again import attend_again
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.lifetime import after_backward, save, saved

__all__ = ["attend", "step_now"]

_INPUTS = (
    "Tensor queries, Tensor keys, Tensor values, Tensor w_q, Tensor w_k, Tensor w_v, "
    "Tensor? bias, Tensor? valid_lens, Tensor? seed, float dropout_p"
)
library.define(
    f"additive_attention({_INPUTS}) -> (Tensor context, Tensor weights, "
    "Tensor projected_queries, Tensor projected_keys)",
    tags=TAGS,
)
library.define(
    f"additive_attention_backward({_INPUTS}, Tensor weights, Tensor projected_queries, "
    "Tensor projected_keys, Tensor? grad_context, Tensor? grad_weights) -> (Tensor grad_queries, "
    "Tensor grad_keys, Tensor grad_values, Tensor grad_w_q, Tensor grad_w_k, Tensor grad_w_v, "
    "Tensor grad_bias)",
    tags=TAGS,
)
library.define(
    "attend_step(Tensor queries, Tensor w_q, Tensor keys, Tensor? table, Tensor? keys_max, "
    "Tensor values, Tensor w_v, Tensor? valid_lens, Tensor? w_k=None, Tensor? bias=None) -> "
    "(Tensor context, Tensor weights)",
    tags=TAGS,
)
_forward_op = torch.ops.bahdanau_fast.additive_attention.default
_backward_op = torch.ops.bahdanau_fast.additive_attention_backward.default
# The same past OpOverload's __call__, for eager calls.
_forward_now, _backward_now = _forward_op._op, _backward_op._op
step_now: Callable[..., tuple[Tensor, Tensor]]
step_now = torch.ops.bahdanau_fast.attend_step.default._op


def _fake(*inputs: Any) -> tuple[Tensor, ...]:
    queries, keys, values, w_q = inputs[:4]
    batch, queries_len, _ = queries.shape
    keys_len, hidden = keys.shape[1], w_q.shape[0]
    return (
        queries.new_empty((batch, queries_len, values.shape[2])),
        queries.new_empty((batch, queries_len, keys_len), dtype=weights_dtype(queries.dtype)),
        queries.new_empty((batch, queries_len, hidden)),
        queries.new_empty((batch, keys_len, hidden)),
    )


def _step_fake(queries: Tensor, w_q: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, queries_len, _ = queries.shape
    values = rest[2]
    return (
        queries.new_empty((batch, queries_len, values.shape[2])),
        queries.new_empty((batch, queries_len, keys.shape[1]), dtype=weights_dtype(queries.dtype)),
    )


def _backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    bias = inputs[6]
    grad_bias = inputs[0].new_empty((0,) if bias is None else bias.shape)
    return (*(tensor.new_empty(tensor.shape) for tensor in inputs[:6]), grad_bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, dropout_p = inputs
    _, weights, *projected = output
    ctx.save_for_backward(*tensors, *projected, weights)
    ctx.dropout_p = dropout_p
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, tensors: Sequence[Any], *grads: Tensor | None) -> list[Tensor | None]:
    """Of queries, keys, values, w_q, w_k, w_v and bias."""
    *inputs, projected_queries, projected_keys, weights = tensors
    needed = list(ctx.needs_input_grad[:7])
    grad_context, grad_weights = grads[:2]
    if grad_context is None and grad_weights is None:
        return [None] * 7
    if torch.is_grad_enabled():

        def scores(queries: Tensor, keys: Tensor, _: Tensor, *others: Tensor) -> tuple[Tensor]:
            w_q, w_k, w_v, bias = others
            return (reference.additive_scores(queries, keys, w_q, w_k, w_v, bias=bias),)

        link = Link(inputs[2], inputs[8], ctx.dropout_p)
        return attend_again(
            scores, inputs[:7], needed, weights, inputs[7], link, (grad_context, grad_weights)
        )
    results = _backward_op(
        *inputs,
        ctx.dropout_p,
        weights,
        projected_queries,
        projected_keys,
        grad_context,
        grad_weights,
    )
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_gradients(ctx, ctx.saved_tensors, *grads), None, None, None)


torch.library.register_fake("bahdanau_fast::additive_attention", _fake, lib=library)
torch.library.register_fake("bahdanau_fast::attend_step", _step_fake, lib=library)
torch.library.register_fake(
    "bahdanau_fast::additive_attention_backward", _backward_fake, lib=library
)
torch.library.register_autograd(
    "bahdanau_fast::additive_attention", _backward, setup_context=_setup_context, lib=library
)


# Of queries, keys, values, w_q, w_k, w_v and bias: whose gradients need their values.
_TANH = (0, 1, 3, 4, 6)
_USES = ((3,), (4,), (*_TANH, 5), (0,), (1,), _TANH, ())


class _Whole(torch.autograd.Function):
    """The same formulas for eager calls: the registered path takes several times as long."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        differentiated, valid_lens, link = inputs[:7], inputs[7], inputs[8]
        rest = (valid_lens, link.seed, link.dropout_p)
        with torch._C._AutoDispatchBelowAutograd():
            link.context, weights, *projected = _forward_now(*differentiated, *rest)
        ctx.link, ctx.dropout_p = link, link.dropout_p
        ctx.set_materialize_grads(False)
        lens = None if valid_lens is None else valid_lens.clone()  # the caller may change it
        save(ctx, differentiated, (lens, link.seed, *projected, weights), _USES, rows=2)
        made: Tensor = weights
        return made

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_context = ctx.link.take()
        results = _gradients(ctx, saved(ctx), grad_context, grad_weights)
        if grad_context is None:
            results[2] = None
        after_backward(ctx)
        return (*results, None, None)


def attend(
    inputs: tuple[Tensor, ...],
    bias: Tensor | None,
    valid_lens: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    records: bool,
) -> tuple[Tensor | None, Tensor, Link | None]:
    """Context and weights in one operator.

    Args:
        inputs: queries (B,Tq,Dq), keys (B,Tk,Dk), values (B,Tk,Dv), w_q (H,Dq), w_k (H,Dk) and
            w_v (1,H) or (H,), of one dtype.
        bias: (H,) or None.
        valid_lens: None, (B,) or (B,Tq).
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
        records: autograd records the call, as the route says.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk), fp64 for fp64 and else fp32, and None. Of a recorded
        call the context is in the link, which is the third result.
    """
    if type(inputs[0]) is not Tensor:
        sharding.register_for(inputs[0])
    if records:
        # Only plain operations may record tensors of inference mode.
        if True in map(Tensor.is_inference, inputs if bias is None else (*inputs, bias)):
            plain = reference.additive_attention(
                *inputs,
                valid_lens,
                bias=bias,
                dropout_p=dropout_p,  # type: ignore[call-arg]
            )
            return (*plain, None)  # type: ignore[return-value]
        link = Link(inputs[2], seed, dropout_p)
        return None, _Whole.apply(*inputs, bias, valid_lens, link), link  # type: ignore[no-untyped-call]
    if dropout_p > 0.0:
        with torch._C._AutoDispatchBelowAutograd():
            context, weights, _, _ = _forward_now(*inputs, bias, valid_lens, seed, dropout_p)
        return context, weights, None
    queries, keys, values, w_q, w_k, w_v = inputs
    context, weights = step_now(queries, w_q, keys, None, None, values, w_v, valid_lens, w_k, bias)
    return context, weights, None
