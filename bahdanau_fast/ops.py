"""The operators as PyTorch sees them: schemas, shape functions and autograd formulas.

The implementations live elsewhere, one per dispatch key: csrc/cpu registers the CPU key when the
extension loads. Operators work on projected queries and keys; the projections in front of them
are ordinary ``Linear`` calls.

==================  ============================================================================
``exp_keys``        table of exp(2 c) (or expm1(2 c) where every c is small) and max|c| per row
``attend``          context and weights from projected queries and keys; the weights come in no
                    less than fp32, since backward takes differences of them
``attend_backward`` the four gradients of ``attend``
==================  ============================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import reference

__all__ = ["NEED_KEYS", "NEED_QUERIES", "NEED_VALUES", "NEED_W_V"]

NEED_QUERIES, NEED_KEYS, NEED_VALUES, NEED_W_V = 1, 2, 4, 8

_library = torch.library.Library("bahdanau_fast", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_ATTEND_INPUTS = (
    "Tensor queries, Tensor keys, Tensor? table, Tensor? keys_max, Tensor values, Tensor w_v, "
    "Tensor? valid_lens, Tensor? seed, float dropout_p"
)
_library.define("exp_keys(Tensor keys) -> (Tensor table, Tensor keys_max)", tags=_TAGS)
_library.define(
    f"attend({_ATTEND_INPUTS}, bool need_weights) -> (Tensor context, Tensor weights)", tags=_TAGS
)
_library.define(
    f"attend_backward({_ATTEND_INPUTS}, Tensor weights, Tensor? grad_context, "
    "Tensor? grad_weights, int needs) -> (Tensor grad_queries, Tensor grad_keys, "
    "Tensor grad_values, Tensor grad_w_v)",
    tags=_TAGS,
)


SMALL = 131072  # fp32 keys of at most this many elements get a table in fp64 (csrc/cpu/inputs.h)


@torch.library.register_fake("bahdanau_fast::exp_keys", lib=_library)
def _exp_keys_fake(keys: Tensor) -> tuple[Tensor, Tensor]:
    batch, keys_len, hidden = keys.shape
    in_double = keys.dtype == torch.float64 or (
        keys.dtype == torch.float32 and batch * keys_len * hidden <= SMALL
    )
    dtype, per_line = (torch.float64, 8) if in_double else (torch.float32, 16)
    width = (hidden + per_line - 1) // per_line * per_line  # whole 64-byte lines
    table = keys.new_empty((batch, keys_len, width), dtype=dtype)
    return table, keys.new_empty((batch,), dtype=dtype)


@torch.library.register_fake("bahdanau_fast::attend", lib=_library)
def _attend_fake(
    queries: Tensor,
    keys: Tensor,
    table: Tensor | None,
    keys_max: Tensor | None,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    batch, queries_len, _ = queries.shape
    _, keys_len, features = values.shape
    weights = (batch, queries_len, keys_len) if need_weights else (0,)
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    return queries.new_empty((batch, queries_len, features)), queries.new_empty(
        weights, dtype=dtype
    )


@torch.library.register_fake("bahdanau_fast::attend_backward", lib=_library)
def _attend_backward_fake(
    queries: Tensor,
    keys: Tensor,
    table: Tensor | None,
    keys_max: Tensor | None,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def gradient(of: Tensor, bit: int) -> Tensor:
        return of.new_empty(of.shape if needs & bit else (0,))

    return (
        gradient(queries, NEED_QUERIES),
        gradient(keys, NEED_KEYS),
        gradient(values, NEED_VALUES),
        gradient(w_v, NEED_W_V),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout_p, need_weights = inputs
    if not need_weights:
        raise RuntimeError("attend must be called with need_weights=True where a gradient is due")
    ctx.save_for_backward(*tensors, output[1])
    ctx.dropout_p = dropout_p
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_context: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, weights = ctx.saved_tensors
    queries, keys, _, _, values, w_v, valid_lens, _ = inputs
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 4, 5)]
    if grad_context is None and grad_weights is None:
        return (None,) * 10
    if torch.is_grad_enabled():
        grads = _differentiable_backward(
            (queries, keys, values, w_v),
            needed,
            valid_lens,
            ctx.dropout_p,
            (grad_context, grad_weights),
        )
    else:
        needs = sum(1 << i for i, need in enumerate(needed) if need)
        fused = torch.ops.bahdanau_fast.attend_backward(
            *inputs, ctx.dropout_p, weights, grad_context, grad_weights, needs
        )
        grads = [grad if need else None for grad, need in zip(fused, needed, strict=True)]
    grad_q, grad_k, grad_v, grad_w = grads
    return grad_q, grad_k, None, None, grad_v, grad_w, None, None, None, None


def _differentiable_backward(
    inputs: tuple[Tensor, ...],
    needed: list[bool],
    valid_lens: Tensor | None,
    dropout_p: float,
    output_grads: tuple[Tensor | None, Tensor | None],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again (``create_graph=True``), by the reference."""
    if dropout_p > 0.0:
        raise NotImplementedError(
            "a second derivative through dropped-out attention weights is not implemented: "
            "use backend='reference', or dropout 0"
        )
    context, weights = reference.attend(*inputs, valid_lens)
    if output_grads[1] is not None:
        weights = weights.to(output_grads[1].dtype)
    outputs = (context, weights)
    used = [
        (out, grad) for out, grad in zip(outputs, output_grads, strict=True) if grad is not None
    ]
    grads = iter(
        torch.autograd.grad(
            [out for out, _ in used],
            [tensor for tensor, need in zip(inputs, needed, strict=True) if need],
            [grad for _, grad in used],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(grads) if need else None for need in needed]


torch.library.register_autograd(
    "bahdanau_fast::attend", _backward, setup_context=_setup_context, lib=_library
)
