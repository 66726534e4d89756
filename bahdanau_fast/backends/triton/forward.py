"""The forward operators by the Triton kernels: allocate, plan and launch.

They serve CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton.call import (
    Call,
    Table,
    lengths,
    make_table,
    new_table,
    strides,
)
from bahdanau_fast.backends.triton.launch import Steps, kept
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.combine import combine_kernel
from bahdanau_fast.kernels.decode import decode_kernel
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel

__all__ = ["attend_scores", "attention", "recorded"]


@kept
def attention(steps: Steps, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``attention``; see :mod:`ops.attention`.

    Keys are projected by torch's product; queries too, unless W_q is so small that a step reads it.

    Args:
        steps: of the call.
        *given: the arguments of the operator.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk), fp32 or ``narrow``; (0,) if not wanted.

    Raises:
        TypeError: as :class:`Call`.
        ValueError: likewise.
    """
    *inputs, need_weights, _, _, narrow = given
    call = Call(steps, *inputs)
    call.project(but_queries=call.reads_w_q())
    return _attended(call, need_weights, narrow, steps.none(torch.int32))


@kept
def recorded(steps: Steps, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``attention.recorded``, as :func:`attention`.

    Returns:
        As there; and counts like lengths without a mask, and the queries that are projected here.
    """
    *inputs, need_weights, _, _, narrow = given
    call = Call(steps, *inputs)
    call.project()
    _, keys, _, _, w_q, w_k, _, _, _, lens, mask, *_ = inputs
    none, counts = steps.none(call.dtype), steps.none(torch.int32)
    if lens is not None and mask is None:
        counts = steps.new(*lens.shape, dtype=torch.int32)
    of_queries = none if w_q is None else call.queries
    # On a GPU a loop would keep a copy of the projected keys per step.
    of_keys = call.keys if w_k is not None and keys.is_cpu else none
    return *_attended(call, need_weights, narrow, counts), counts, of_queries, of_keys


def _attended(call: Call, need_weights: bool, narrow: bool, counts: Tensor) -> tuple[Tensor, ...]:
    """Context and weights; fills ``counts`` unless empty."""
    steps, shape = call.steps, (call.batch, call.queries_len, call.keys_len)
    context = steps.new(*shape[:2], call.value_size, dtype=call.dtype)
    weights = steps.none(call.dtype if narrow else torch.float32)
    if need_weights:
        weights = steps.new(*shape, dtype=weights.dtype)
    if 0 in shape:
        steps.update(Tensor.zero_, context)
        steps.update(Tensor.zero_, counts)
    else:
        (_step if call.is_step else _many)(call, context, weights, counts)
    return context, weights


@kept
def attend_scores(steps: Steps, *given: Any) -> Tensor:
    """The operator ``attend_scores``, as :func:`attention`; returns fp32 (B,Tq,Tk)."""
    queries, keys, w_v, features, w_f, activation, slope, _ = given
    call = Call.of_scores(steps, queries, keys, w_v, features, w_f, activation, slope)
    scores = steps.new(call.batch, call.queries_len, call.keys_len)
    if scores.numel():
        _scores(call, scores, new_table(call, call.queries), lengths(call))
    return scores


def _step(call: Call, context: Tensor, weights: Tensor, counts: Tensor) -> None:
    """One launch and, where keys are split, one to combine."""
    batch, queries_len, keys_len, value_size = (
        call.batch, call.queries_len, call.keys_len, call.value_size,
    )  # fmt: skip
    new, channels = call.steps.new, 0 if call.w_f is None else call.w_f.shape[1]
    plan = plans.decode(
        batch, queries_len, keys_len, call.hidden, value_size, call.processors, call.size,
        call.limits.shared, channels,
    )  # fmt: skip
    if plan.blocks["BLOCK_C"]:
        keys, features, w_f = call.keys, call.features, call.w_f
    else:
        keys, features, w_f = call.summed_keys, None, None
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    scores = new(batch, queries_len, keys_len) if weights.numel() else None
    parts, maxima, sums, split = context, None, None, plan.splits > 1
    if split:
        parts = new(batch, queries_len, plan.splits, value_size)
        maxima, sums = (new(batch, queries_len, plan.splits) for _ in range(2))
    call.steps.launch(
        decode_kernel, batch * plan.splits * queries_len,
        queries=call.queries, keys=keys, values=call.values, w_v=call.w_v, context=parts,
        scores=scores, weights=weights, maxima=maxima, sums=sums, w_q=call.w_q, features=features,
        w_f=w_f, Tq=queries_len, Tk=keys_len, H=call.hidden, Dq=call.queries.shape[2],
        Dv=value_size, C=channels, **strides(q=call.queries, k=keys, v=call.values, f=features),
        splits=plan.splits, split_keys=plan.split_keys, SPLIT=split, **call.seen, **call.dropout,
        **call.kind, **_counted(call, counts), PRECISION=call.precision, **plan.blocks,
    )  # fmt: skip
    if split:
        blocks = plans.combine(plan.splits, value_size)
        call.steps.launch(
            combine_kernel, batch * queries_len, -(-value_size // blocks["BLOCK_D"]) or 1,
            parts=parts, maxima=maxima, sums=sums, context=context, scores=scores,
            weights=weights, Tk=keys_len, Dv=value_size, splits=plan.splits, **blocks,
        )  # fmt: skip


def _counted(call: Call, counts: Tensor) -> dict[str, Any]:
    """Where it is written how many keys the lengths leave, as kernels take it, by name."""
    if counts.numel() == 0:
        return {"counts": None, "counts_row": 0}
    return {"counts": counts, "counts_row": call.queries_len if counts.dim() > 1 else 1}


def _many(call: Call, context: Tensor, weights: Tensor, counts: Tensor) -> None:
    """All queries, or where nothing but the context is wanted as many as their scores allow."""
    steps, total = call.steps, call.queries_len
    chunk = plans.query_chunk(call.batch, call.keys_len, GPU_STEP_QUERIES + 1)
    # A weight's place decides whether it is dropped: with dropout the queries stay together.
    if weights.numel() + counts.numel() or call.dropout["seed"] is not None or chunk > total:
        chunk = total
    # Apart from the weights: programs of other features read them while the first writes weights.
    scores = steps.new(call.batch, chunk, call.keys_len)
    table = new_table(call, call.queries[:, :chunk])
    for first in range(0, total, chunk):
        part, out, some = call, context, min(chunk, total - first)
        if some < total:
            part = call.of_queries(first, some)
            out = steps.new(call.batch, some, call.value_size, dtype=call.dtype)
        bounds = lengths(part)
        _scores(part, scores, table, bounds)
        _softmax(part, scores, bounds, out, weights, counts)
        if out is not context:
            steps.update(Tensor.copy_, steps.make(torch.narrow, context, 1, first, some), out)


def _softmax(
    call: Call,
    scores: Tensor,
    bounds: dict[str, Any],
    context: Tensor,
    weights: Tensor,
    counts: Tensor,
) -> None:
    blocks = plans.products(call.value_size, call.size, call.mask_rows > 0)
    count = -(-call.queries_len // blocks["BLOCK_Q"])
    count *= -(-call.value_size // blocks["BLOCK_D"]) or 1
    call.steps.launch(
        softmax_kernel, call.batch * count,
        scores=scores, values=call.values, weights=weights if weights.numel() else None,
        context=context, Tq=call.queries_len, Tk=call.keys_len, Dv=call.value_size,
        **strides(v=call.values), **(call.seen | bounds), **call.dropout,
        **_counted(call, counts), PRECISION=call.precision, **blocks,
    )  # fmt: skip


def _scores(call: Call, scores: Tensor, table: Table, bounds: dict[str, Any]) -> None:
    """Scores of all keys within the lengths."""
    queries, keys = call.queries, call.summed_keys
    make_table(call, queries, table)
    blocks = plans.scores(call.batch, call.queries_len, call.keys_len, call.hidden, call.size)
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.queries_len // blocks["BLOCK_Q"])
    call.steps.launch(
        scores_kernel, call.batch * count,
        queries=queries, query_table=table.entries, query_max=table.largest,
        second=queries.numel(), keys=keys, w_v=call.w_v, scores=scores, Tq=call.queries_len,
        Tk=call.keys_len, H=call.hidden, **strides(q=queries, k=keys), **bounds, **call.kind,
        **blocks,
    )  # fmt: skip
