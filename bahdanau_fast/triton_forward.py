"""The forward operator by the Triton kernels: allocates, plans and launches.

Serves CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel
from bahdanau_fast.kernels.step import combine_kernel, step_kernel
from bahdanau_fast.triton_call import Call, make_table, processors

__all__ = ["attend"]


def attend(
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
    """Context and weights; arguments and results as :func:`bahdanau_fast.ops.attend` has them.

    ``table`` and ``keys_max`` are not read: these kernels make what they need in registers.

    Raises:
        TypeError: a dtype that these kernels do not compute.
    """
    call = Call(queries, keys, values, w_v, valid_lens, seed, dropout_p)
    context = call.new(call.batch, call.queries_len, call.features, dtype=queries.dtype)
    shape = (call.batch, call.queries_len, call.keys_len) if need_weights else (0,)
    weights = call.new(*shape, dtype=torch.float32)
    if context.numel() + weights.numel() == 0:
        return context, weights
    if call.keys_len == 0:
        return context.zero_(), weights
    with call.guard():
        if plans.is_step(call.queries_len, call.features):
            _step(call, context, weights)
        else:
            _many(call, context, weights)
    return context, weights


def _scores(call: Call, weights: Tensor) -> Tensor:
    """Where scores go: into the weights where those are wanted and of the type computed in."""
    if weights.dtype == call.dtype and weights.numel():
        return weights
    return call.new(call.batch, call.queries_len, call.keys_len)


def _step(call: Call, context: Tensor, weights: Tensor) -> None:
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    plan = plans.step(
        batch, queries_len, keys_len, call.hidden, features, call.wide, processors(call.device)
    )
    need_weights = weights.numel() > 0
    scores = _scores(call, weights) if need_weights else weights
    split = plan.splits > 1
    parts = call.new(batch, queries_len, plan.splits, features) if split else context
    maxima, sums = (
        (call.new(batch, queries_len, plan.splits) for _ in range(2)) if split else (parts, parts)
    )
    step_kernel[(batch * plan.splits,)](
        call.queries, call.keys, call.values, call.w_v, call.lens, call.seed, parts, scores,
        weights, maxima, sums, queries_len, keys_len, call.hidden, features,
        *call.queries.stride()[:2], *call.keys.stride()[:2], *call.values.stride()[:2],
        *call.lens_strides, *call.dropout, plan.splits, plan.split_keys,
        **call.kind, HAS_LENS=call.has_lens, DROPOUT=call.drops, WEIGHTS=need_weights,
        SPLIT=split, PRECISION=call.precision, **plan.blocks,
    )  # fmt: skip
    if split:
        blocks = plans.combine(plan.splits, features)
        combine_kernel[(batch * queries_len, -(-features // blocks["BLOCK_D"]) or 1)](
            parts, maxima, sums, call.lens, context, scores, weights, queries_len, keys_len,
            features, *call.lens_strides, plan.splits, ACC=call.kind["ACC"],
            HAS_LENS=call.has_lens, WEIGHTS=need_weights, **blocks,
        )  # fmt: skip


def _many(call: Call, context: Tensor, weights: Tensor) -> None:
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    need_weights = weights.numel() > 0
    scores = _scores(call, weights)
    table = make_table(call, call.queries)
    blocks = plans.scores(batch, queries_len, keys_len, call.hidden, call.wide)
    count = -(-keys_len // blocks["BLOCK_K"]) * -(-queries_len // blocks["BLOCK_Q"])
    scores_kernel[(batch * count,)](
        call.queries, table.entries, table.largest, call.keys, call.w_v, call.lens, scores,
        queries_len, keys_len, call.hidden, *call.queries.stride()[:2], *call.keys.stride()[:2],
        *call.lens_strides, **call.kind, FACTORED=table.factored, HAS_LENS=call.has_lens, **blocks,
    )  # fmt: skip
    blocks = plans.products(features, call.wide)
    count = -(-queries_len // blocks["BLOCK_Q"]) * (-(-features // blocks["BLOCK_D"]) or 1)
    softmax_kernel[(batch * count,)](
        scores, call.values, call.lens, call.seed, weights, context, queries_len, keys_len,
        features, *call.values.stride()[:2], *call.lens_strides, *call.dropout,
        ACC=call.kind["ACC"], HAS_LENS=call.has_lens, DROPOUT=call.drops, WEIGHTS=need_weights,
        PRECISION=call.precision, **blocks,
    )  # fmt: skip
