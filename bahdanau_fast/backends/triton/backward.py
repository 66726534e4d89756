"""The backward operator by the Triton kernels: allocates, plans and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.backends.route import is_gpu_step
from bahdanau_fast.backends.triton.call import (
    Call,
    lengths,
    make_table,
    processors,
    rows,
    strides,
)
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.backward import (
    grad_softmax_kernel,
    grad_values_kernel,
    grad_weights_kernel,
)
from bahdanau_fast.kernels.grad_step import (
    step_keys_kernel,
    step_sums_kernel,
    step_values_kernel,
)
from bahdanau_fast.kernels.grad_tanh import grad_tanh_kernel
from bahdanau_fast.ops.attention import NEED, gradient_like

__all__ = ["attend_backward", "attend_scores_backward"]


def attend_backward(
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    needs: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    valid_lens: Tensor | None = None,
    mask: Tensor | None = None,
    table: Tensor | None = None,
    keys_max: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    activation: int = 0,
    negative_slope: float = 0.01,
    backend: int = 0,
) -> tuple[Tensor, ...]:
    """The operator ``attend_backward``; see :mod:`ops.attend`.

    Returns:
        Gradients of queries, keys, values, w_v, features and w_f, as far as ``needs`` asks, else
        (0,).

    Raises:
        TypeError: a dtype that these kernels do not compute, or of lengths or a mask.
        ValueError: lengths, a mask or features of another shape or device; no such activation.
    """
    given = (valid_lens, mask, seed, dropout_p, features, w_f, activation, negative_slope)
    call = Call(queries, keys, values, w_v, *given)
    grads = _Gradients(needs, queries, keys, values, w_v)
    if call.batch * call.queries_len * call.keys_len == 0:
        grads.zero()
    else:
        of_context = None if grad_context is None or call.features == 0 else rows(grad_context)
        of_weights = None if grad_weights is None else rows(grad_weights)
        through = _of_step if _is_step(call) else _of_many
        with call.guard():
            through(call, weights.contiguous(), of_context, of_weights, grads)
    of_keys, *inside = grads.of_keys(features, w_f)
    return grads.queries, of_keys, grads.values, grads.w_v, *inside


def attend_scores_backward(
    grad_scores: Tensor,
    needs: int,
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.01,
    backend: int = 0,
) -> tuple[Tensor, ...]:
    """The operator ``attend_scores_backward``; see :mod:`ops.attend`.

    Returns:
        Gradients of queries, keys, w_v, features and w_f, as far as ``needs`` asks, else (0,).
    """
    given = (None, None, None, 0.0, features, w_f, activation, negative_slope)
    call = Call(queries, keys, keys, w_v, *given)
    grads = _Gradients(needs & ~NEED["values"], queries, keys, keys, w_v)
    if grad_scores.numel() == 0:
        grads.zero()
    elif grads.through_scores:
        with call.guard():
            if _is_step(call):
                _through_keys(call, grad_scores, grads)
            else:
                _grad_tanh(call, grad_scores, None, grads)
    of_keys, *of_features = grads.of_keys(features, w_f)
    return grads.queries, of_keys, grads.w_v, *of_features


class _Gradients:
    """Where gradients go: empty where they are not needed."""

    def __init__(
        self, needs: int, queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor
    ) -> None:
        self.needs, of_features = needs, NEED["features"] | NEED["w_f"]
        self.through_scores = bool(needs & ~NEED["values"])
        self.queries = gradient_like(queries, needs & NEED["queries"])
        self.keys = gradient_like(keys, needs & (NEED["keys"] | of_features))
        self.values = gradient_like(values, needs & NEED["values"])
        self.w_v = gradient_like(w_v, needs & NEED["w_v"])

    def zero(self) -> None:
        for grad in (self.queries, self.keys, self.values, self.w_v):
            grad.zero_()

    def of_keys(self, features: Tensor | None, w_f: Tensor | None) -> tuple[Tensor, ...]:
        """Of the keys, and, since features were added to them, of features and w_f."""
        grad_features, grad_w_f = (self.keys.new_empty(0, dtype=torch.float32) for _ in range(2))
        if features is not None and w_f is not None:
            grad_features, grad_w_f = gradient_like(features, False), gradient_like(w_f, False)
            if self.needs & NEED["features"]:  # laid out as of any backend
                grad_features = (w_f.t() @ self.keys.transpose(1, 2)).transpose(1, 2)
            if self.needs & NEED["w_f"]:
                grad_w_f = self.keys.flatten(0, 1).t() @ features.flatten(0, 1)
        grad_keys = self.keys if self.needs & NEED["keys"] else gradient_like(self.keys, False)
        return grad_keys, grad_features, grad_w_f


def _is_step(call: Call) -> bool:
    """Whether the kernels of `grad_step` serve a call."""
    return is_gpu_step(call.queries_len, call.hidden, call.features)


def _plan(call: Call) -> plans.GradPlan:
    return plans.grad_step(
        call.batch, call.queries_len, call.keys_len, call.hidden, call.features,
        processors(call.device), call.size,
    )  # fmt: skip


def _of_step(
    call: Call,
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    grads: _Gradients,
) -> None:
    """The gradients of few queries: a launch over values, one over keys, one to sum."""
    plan, shape = _plan(call).values, (call.batch, call.queries_len)
    found, means, masses = None, None, None
    if grads.through_scores:
        found, means = call.new(*shape, call.keys_len), call.new(*shape, plan.splits)
        if weights.dtype != torch.float32:
            masses = call.new(*shape, plan.splits)
    step_values_kernel[(call.batch * plan.splits,)](
        values=call.values, weights=weights, grad_context=grad_context, grad_weights=grad_weights,
        grad_values=_wanted(grads.values), grads=found, means=means, masses=masses,
        Tk=call.keys_len, Dv=call.features,
        **strides(v=call.values, gc=grad_context, gw=grad_weights),
        splits=plan.splits, split_keys=plan.split_keys, **call.seen, **call.dropout,
        Tq=call.queries_len, **plan.blocks,
    )  # fmt: skip
    if found is not None:
        _through_keys(call, found, grads, weights, means, masses)


def _through_keys(
    call: Call,
    grad_scores: Tensor,
    grads: _Gradients,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    masses: Tensor | None = None,
) -> None:
    """Gradients of queries, keys and w_v; with ``weights``, from the gradients of those."""
    whole = _plan(call)
    plan, sums, queries = whole.keys, whole.sums, call.batch * call.queries_len
    grad_queries, grad_w, q_parts, w_parts = _wanted(grads.queries), _wanted(grads.w_v), None, None
    if grad_queries is not None and plan.splits > 1:
        q_parts = call.new(queries, plan.splits, call.hidden)
    if grad_w is not None:
        w_parts = call.new(call.batch * plan.splits, call.hidden)
    g_batch, g_row, g_key = grad_scores.stride()
    hidden_blocks = -(-call.hidden // plan.blocks["BLOCK_H"])
    step_keys_kernel[(call.batch * plan.splits * hidden_blocks,)](
        queries=call.queries, keys=call.keys, w_v=call.w_v, weights=weights, grads=grad_scores,
        means=means, masses=masses, grad_keys=_wanted(grads.keys),
        q_parts=grad_queries if q_parts is None else q_parts, w_parts=w_parts,
        Tk=call.keys_len, H=call.hidden, **strides(q=call.queries, k=call.keys), g_batch=g_batch,
        g_row=g_row, g_key=g_key, splits=plan.splits, split_keys=plan.split_keys,
        parts=whole.values.splits, **call.seen, **call.kind, Tq=call.queries_len, **plan.blocks,
    )  # fmt: skip
    programs = 0 if w_parts is None else -(-call.hidden // sums["BLOCK_W"])
    if q_parts is not None:
        programs += queries * -(-call.hidden // sums["BLOCK_H"])
    if programs:
        step_sums_kernel[(programs,)](
            q_parts=q_parts, grad_queries=grad_queries, w_parts=w_parts, grad_w=grad_w,
            splits=plan.splits, w_rows=call.batch * plan.splits, H=call.hidden, **sums,
        )  # fmt: skip


def _wanted(grad: Tensor) -> Tensor | None:
    """None for the gradient that is not needed."""
    return grad if grad.numel() else None


def _of_many(
    call: Call,
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    grads: _Gradients,
) -> None:
    if grads.values.numel():
        _grad_values(call, weights, grad_context, grads.values)
    if grads.through_scores:
        bounds = lengths(call)
        grad_scores = _grad_scores(call, weights, grad_context, grad_weights, bounds)
        _grad_tanh(call, grad_scores, _of_rows(bounds["lens"]), grads)


def _grad_values(
    call: Call, weights: Tensor, grad_context: Tensor | None, grad_values: Tensor
) -> None:
    if grad_context is None:
        grad_values.zero_()
        return
    blocks = plans.grad_products()
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.features // blocks["BLOCK_D"])
    grad_values_kernel[(call.batch * count,)](
        weights=weights, grad_context=grad_context, out=grad_values, Tq=call.queries_len,
        Tk=call.keys_len, Dv=call.features, **strides(gc=grad_context), **call.dropout,
        PRECISION=call.precision, **blocks,
    )  # fmt: skip


def _grad_scores(
    call: Call,
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    bounds: dict[str, Any],
) -> Tensor:
    """(B,Tq,Tk) gradients of the scores, zero where a query does not look."""
    out = call.new(call.batch, call.queries_len, call.keys_len)
    blocks = plans.grad_products()
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.queries_len // blocks["BLOCK_Q"])
    grad_weights_kernel[(call.batch * count,)](
        values=call.values, grad_context=grad_context, grad_weights=grad_weights, out=out,
        Tq=call.queries_len, Tk=call.keys_len, Dv=call.features,
        **strides(v=call.values, gc=grad_context, gw=grad_weights), **(call.seen | bounds),
        **call.dropout, PRECISION=call.precision, **blocks,
    )  # fmt: skip
    grad_softmax_kernel[(call.batch * call.queries_len,)](
        weights=weights, grads=out, Tq=call.queries_len, Tk=call.keys_len, **bounds,
        **plans.grad_softmax(call.keys_len),
    )  # fmt: skip
    return out


def _grad_tanh(
    call: Call,
    grad_scores: Tensor,
    kept: Tensor | None,
    grads: _Gradients,
) -> None:
    """Fill the gradients of queries, keys and w_v that are not empty."""
    of = call, grad_scores, kept
    if grads.keys.numel():
        _pass(*of, grads.keys, True, False)
    if grads.queries.numel() + grads.w_v.numel():
        w_parts = _pass(*of, grads.queries, False, grads.w_v.numel() > 0)
        if w_parts is not None:
            grads.w_v.copy_(w_parts.sum((0, 1)).view_as(grads.w_v))


def _pass(
    call: Call,
    grad_scores: Tensor,
    kept: Tensor | None,
    out: Tensor,
    rows_are_keys: bool,
    sum_w: bool,
) -> Tensor | None:
    """One pass: gradients of the rows into ``out`` unless empty.

    Returns:
        Parts of the gradient of w_v (B,row blocks,H).
    """
    rows_, others = call.keys, call.queries
    if rows_are_keys:
        grad_scores = grad_scores.transpose(1, 2)
    else:
        rows_, others = others, rows_
    table = make_table(call, others)
    batch, others_len = others.shape[:2]
    g_batch, g_row, g_other = grad_scores.stride()
    blocks = plans.grad_tanh(rows_.shape[1], call.hidden, sum_w)
    row_blocks = -(-rows_.shape[1] // blocks["BLOCK_R"])
    hidden_blocks = -(-call.hidden // (2 * blocks["BLOCK_H"]))
    w_parts = call.new(batch, row_blocks, call.hidden) if sum_w else None
    grad_tanh_kernel[(batch * row_blocks * hidden_blocks,)](
        rows=rows_, others=others, table=table.entries, largest=table.largest,
        second=others.numel(), w_v=call.w_v, grad_scores=grad_scores, kept=kept,
        out=_wanted(out), w_parts=w_parts, R=rows_.shape[1], O=others_len,
        H=call.hidden, **strides(r=rows_, o=others), g_batch=g_batch, g_row=g_row, g_other=g_other,
        kept_batch=0 if kept is None else kept.stride(0), **call.kind,
        ROWS_ARE_KEYS=rows_are_keys, **blocks,
    )  # fmt: skip
    return w_parts


def _of_rows(lens: Tensor | None) -> Tensor | None:
    """A length per batch row, of the query that looks at most keys."""
    if lens is None or lens.dim() == 1:
        return lens
    if lens.is_floating_point():  # a NaN keeps none
        lens = lens.nan_to_num(0.0, float("inf"), 0.0)
    return lens.amax(1)
