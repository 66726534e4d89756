"""Operators that project, too: for calls so small that calling costs more than computing.

``additive_attention`` takes raw queries and keys and has one node in the autograd graph instead of
three. It is right at any size, but beyond a few rows a matrix library projects faster: it serves
calls as small as those of a course notebook. ``attend_step`` is for calls without gradients and
dropout; it takes queries and keys that are raw, or without a weight projected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops.attend import DROPOUT, LENS, TABLE, attend_fake
from bahdanau_fast.ops.operator import Attention, Named, Operator

__all__ = ["additive_attention", "additive_attention_backward", "attend_step"]

_INPUTS = (
    "Tensor queries, Tensor keys, Tensor values, Tensor w_q, Tensor w_k, Tensor w_v, "
    f"Tensor? bias=None, {LENS}, {DROPOUT}"
)


def _fake(
    queries: Tensor, keys: Tensor, values: Tensor, w_q: Tensor, **_: Any
) -> tuple[Tensor, ...]:
    hidden = w_q.shape[0]
    return (
        *attend_fake(queries, values),
        queries.new_empty((*queries.shape[:2], hidden)),
        queries.new_empty((*keys.shape[:2], hidden)),
    )


def _backward_fake(queries: Tensor, bias: Tensor | None, **named: Any) -> tuple[Tensor, ...]:
    inputs = queries, *(named[name] for name in additive_attention.inputs[1:-1])
    grad_bias = queries.new_empty((0,) if bias is None else bias.shape)
    return (*(tensor.new_empty(tensor.shape) for tensor in inputs), grad_bias)


def _scores_of(named: Named) -> tuple[Tensor]:
    inputs = (named[name] for name in ("queries", "keys", "w_q", "w_k", "w_v"))
    return (reference.additive_scores(*inputs, bias=named["bias"]),)


def _gradients(
    named: Named, needed: list[bool], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    made = named["weights"], named["projected_queries"], named["projected_keys"]
    inputs = map(named.get, additive_attention.names)
    found: Sequence[Tensor] = additive_attention_backward.now(*made, *grads[:2], *inputs)
    return found


_TANH = ("queries", "keys", "w_q", "w_k", "bias")
additive_attention = Attention(
    f"additive_attention({_INPUTS}) -> (Tensor context, Tensor weights, Tensor projected_queries, "
    "Tensor projected_keys)",
    _fake,
    {
        "queries": ("w_q",),
        "keys": ("w_k",),
        "values": (*_TANH, "w_v"),
        "w_q": ("queries",),
        "w_k": ("keys",),
        "w_v": _TANH,
        "bias": (),
    },
    _scores_of,
    _gradients,
    rows=2,
)
additive_attention_backward = Operator(
    "additive_attention_backward(Tensor weights, Tensor projected_queries, Tensor projected_keys, "
    f"Tensor? grad_context, Tensor? grad_weights, {_INPUTS}) -> (Tensor grad_queries, "
    "Tensor grad_keys, Tensor grad_values, Tensor grad_w_q, Tensor grad_w_k, Tensor grad_w_v, "
    "Tensor grad_bias)",
    _backward_fake,
)
attend_step = Operator(
    "attend_step(Tensor queries, Tensor keys, Tensor values, Tensor? w_q, Tensor? w_k, "
    f"Tensor? bias, Tensor w_v, {LENS}, {TABLE}, bool need_weights=True, "
    "bool narrow=False) -> "
    "(Tensor context, Tensor weights)",
    attend_fake,
)
