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
    usual,
)
from bahdanau_fast.backends.triton.launch import Kept, Steps
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.combine import combine_kernel
from bahdanau_fast.kernels.decode import decode_kernel
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel

__all__ = ["attend_scores", "attention", "recorded"]


@Kept
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
    return _attended(call, need_weights, narrow, None)


@Kept
def recorded(steps: Steps, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``attention.recorded``, as :func:`attention`.

    Returns:
        As there; and counts like lengths without a mask, and the queries that are projected here.
    """
    *inputs, need_weights, _, _, narrow = given
    call = Call(steps, *inputs)
    call.project()
    _, keys, _, _, w_q, w_k, _, _, _, lens, mask, *_ = inputs
    counts = None
    if lens is not None and mask is None:
        counts = steps.new(*lens.shape, dtype=torch.int32)
    results = _attended(call, need_weights, narrow, counts)
    of_queries = steps.none(call.dtype) if w_q is None else call.queries
    # On a GPU a loop would keep a copy of the projected keys per step.
    of_keys = call.keys if w_k is not None and keys.is_cpu else steps.none(call.dtype)
    return *results, steps.none(torch.int32) if counts is None else counts, of_queries, of_keys


def _attended(
    call: Call, need_weights: bool, narrow: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Context and weights; fills ``counts`` unless None."""
    steps, shape = call.steps, (call.batch, call.queries_len, call.keys_len)
    context = steps.new(*shape[:2], call.value_size, dtype=call.dtype)
    dtype = call.dtype if narrow else torch.float32
    weights = steps.new(*shape, dtype=dtype) if need_weights else None
    if 0 in shape:
        for made in (context, counts):
            if made is not None:
                steps.update(Tensor.zero_, made)
    else:
        (_step if call.is_step else _many)(call, context, weights, counts)
    return context, steps.none(dtype) if weights is None else weights


@Kept
def attend_scores(steps: Steps, *given: Any) -> Tensor:
    """The operator ``attend_scores``, as :func:`attention`; returns fp32 (B,Tq,Tk)."""
    queries, keys, w_v, features, w_f, activation, slope, _ = given
    call = Call.of_scores(steps, queries, keys, w_v, features, w_f, activation, slope)
    scores = steps.new(call.batch, call.queries_len, call.keys_len)
    if 0 not in scores.shape:
        _scores(call, scores, new_table(call, call.queries_len), lengths(call))
    return scores


def _step(call: Call, context: Tensor, weights: Tensor | None, counts: Tensor | None) -> None:
    """One launch and, where keys are split, one to combine."""
    batch, queries_len, keys_len, value_size = (
        call.batch, call.queries_len, call.keys_len, call.value_size,
    )  # fmt: skip
    new, channels = call.steps.new, 0 if call.w_f is None else call.w_f.shape[1]
    plan = plans.decode(
        usual(batch), queries_len, usual(keys_len), call.hidden, value_size, call.processors,
        call.size, call.limits.shared, usual(channels),
    )  # fmt: skip
    splits, split_keys = call.split(plan)
    if plan.blocks["BLOCK_C"]:
        keys, features, w_f = call.keys, call.features, call.w_f
    else:
        keys, features, w_f = call.summed_keys, None, None
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    scores = new(batch, queries_len, keys_len) if weights is not None else None
    parts, maxima, sums = context, None, None
    if splits > 1:
        parts = new(batch, queries_len, splits, value_size)
        maxima, sums = (new(batch, queries_len, splits) for _ in range(2))
    call.steps.launch(
        decode_kernel, batch * splits * queries_len,
        queries=call.queries, keys=keys, values=call.values, w_v=call.w_v, context=parts,
        scores=scores, weights=weights, maxima=maxima, sums=sums, w_q=call.w_q, features=features,
        w_f=w_f, Tq=queries_len, Tk=keys_len, H=call.hidden, Dq=call.queries.shape[2],
        Dv=value_size, C=channels, **strides(q=call.queries, k=keys, v=call.values, f=features),
        splits=splits, split_keys=split_keys, SPLIT=splits > 1, **call.seen, **call.dropout,
        **call.kind, **_counted(call, counts), PRECISION=call.precision, **plan.blocks,
    )  # fmt: skip
    if splits > 1:
        blocks = plans.combine(splits, value_size)
        call.steps.launch(
            combine_kernel, batch * queries_len, -(-value_size // blocks["BLOCK_D"]) or 1,
            parts=parts, maxima=maxima, sums=sums, context=context, scores=scores,
            weights=weights, Tk=keys_len, Dv=value_size, splits=splits, **blocks,
        )  # fmt: skip


def _counted(call: Call, counts: Tensor | None) -> dict[str, Any]:
    """Where it is written how many keys the lengths leave, as kernels take it, by name."""
    row = 0 if counts is None else call.queries_len if counts.dim() > 1 else 1
    return {"counts": counts, "counts_row": row}


def _many(call: Call, context: Tensor, weights: Tensor | None, counts: Tensor | None) -> None:
    """All queries; where nothing but the context is wanted, as many at once as scores allow."""
    steps, total = call.steps, call.queries_len
    chunk = plans.query_chunk(usual(call.batch), usual(call.keys_len), GPU_STEP_QUERIES + 1)
    # A weight's place decides whether it is dropped: with dropout the queries stay together.
    together = weights is not None or counts is not None or call.dropout["seed"] is not None
    if together or type(total) is not int or chunk >= total:
        _some(call, total, [(call, context)], weights, counts)
        return
    parts = []
    for first in range(0, total, chunk):
        some = min(chunk, total - first)
        out = steps.new(call.batch, some, call.value_size, dtype=call.dtype)
        parts.append((call.of_queries(first, some), out))
    _some(call, chunk, parts, None, None)
    for number, (part, out) in enumerate(parts):
        whole = steps.make(torch.narrow, context, 1, number * chunk, part.queries_len)
        steps.update(Tensor.copy_, whole, out)


def _some(
    call: Call,
    most: int,
    parts: list[tuple[Call, Tensor]],
    weights: Tensor | None,
    counts: Tensor | None,
) -> None:
    """Parts of a call, of up to so many queries, one after the other in the same memory."""
    # Apart from the weights: programs of other features read them while the first writes weights.
    scores = call.steps.new(call.batch, most, call.keys_len)
    table = new_table(call, most)
    for part, context in parts:
        bounds = lengths(part)
        _scores(part, scores, table, bounds)
        blocks = plans.products(usual(part.value_size), part.size, part.seen["mask"] is not None)
        count = -(-part.queries_len // blocks["BLOCK_Q"])
        count *= -(-part.value_size // blocks["BLOCK_D"]) or 1
        part.steps.launch(
            softmax_kernel, part.batch * count,
            scores=scores, values=part.values, weights=weights, context=context,
            Tq=part.queries_len, Tk=part.keys_len, Dv=part.value_size, **strides(v=part.values),
            **(part.seen | bounds), **part.dropout, **_counted(part, counts),
            PRECISION=part.precision, **blocks,
        )  # fmt: skip


def _scores(call: Call, scores: Tensor, table: Table, bounds: dict[str, Any]) -> None:
    """Scores of all keys within the lengths."""
    queries, keys = call.queries, call.summed_keys
    make_table(call, queries, table)
    sizes = map(usual, (call.batch, call.queries_len, call.keys_len, call.hidden, call.size))
    blocks = plans.scores(*sizes)
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.queries_len // blocks["BLOCK_Q"])
    call.steps.launch(
        scores_kernel, call.batch * count,
        queries=queries, query_table=table.entries, query_max=table.largest,
        second=queries.numel(), keys=keys, w_v=call.w_v, scores=scores, Tq=call.queries_len,
        Tk=call.keys_len, H=call.hidden, **strides(q=queries, k=keys), **bounds, **call.kind,
        **blocks,
    )  # fmt: skip
