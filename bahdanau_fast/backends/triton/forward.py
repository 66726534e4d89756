"""The forward operators by the Triton kernels: allocate, plan and launch.

They serve CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton.call import Call, Table, lengths, make_table, new_table, usual
from bahdanau_fast.backends.triton.launch import Kept, Steps
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.combine import combine_kernel
from bahdanau_fast.kernels.decode import decode_kernel
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel

__all__ = ["attend_scores", "attention", "recorded"]


@Kept
def attention(steps: Steps, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``attention``; see :mod:`ops.attention`."""
    *inputs, need_weights, _, _, narrow = given
    call = Call(steps, *inputs)
    # Torch projects keys; and queries, unless W_q is so small that the launch of a step reads it.
    own = call.is_step and plans.projects_queries(
        call.queries_len, usual(call.query_size), call.hidden, call.size
    )
    call.project(but_queries=own)
    return _attended(call, need_weights, narrow, None)


@Kept
def recorded(steps: Steps, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``attention.recorded``: counts and projections follow what attention gives."""
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
    row = 0 if counts is None else call.queries_len if counts.dim() > 1 else 1
    call.given |= {"weights": weights, "counts": counts, "counts_row": row}
    if 0 in shape:
        for made in (context, counts):
            if made is not None:
                steps.make(Tensor.zero_, made)
    else:
        (_step if call.is_step else _many)(call, context)
    return context, steps.none(dtype) if weights is None else weights


@Kept
def attend_scores(steps: Steps, *given: Any) -> Tensor:
    """The operator ``attend_scores``."""
    queries, keys, w_v, features, w_f, activation, slope, _ = given
    call = Call.of_scores(steps, queries, keys, w_v, features, w_f, activation, slope)
    scores = steps.new(call.batch, call.queries_len, call.keys_len)
    if 0 not in scores.shape:
        _scores(call, scores, new_table(call, call.queries_len), lengths(call))
    return scores


def _step(call: Call, context: Tensor) -> None:
    """One launch and, where keys are split, one to combine."""
    batch, queries_len, value_size, new = (
        call.batch, call.queries_len, call.value_size, call.steps.new,
    )  # fmt: skip
    channels = 0 if call.w_f is None else call.w_f.shape[1]
    plan = plans.decode(
        usual(batch), queries_len, usual(call.keys_len), call.hidden, value_size, call.processors,
        call.size, call.shared, usual(channels),
    )  # fmt: skip
    splits, split_keys = call.split(plan)
    if plan.blocks["BLOCK_C"]:
        keys, features, w_f = call.keys, call.features, call.w_f
    else:
        keys, features, w_f = call.summed_keys, None, None
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    weighs = call.given["weights"] is not None
    scores = new(batch, queries_len, call.keys_len) if weighs else None
    parts, maxima, sums = context, None, None
    if splits > 1:
        parts = new(batch, queries_len, splits, value_size)
        maxima, sums = (new(batch, queries_len, splits) for _ in range(2))
    call.given |= {"scores": scores, "maxima": maxima, "sums": sums, "splits": splits}
    call.launch(
        decode_kernel, batch * splits * queries_len,
        keys=keys, context=parts, features=features, w_f=w_f,
        w_q=None if call.w_q is None else call.whole(call.w_q),
        Dq=call.queries.shape[2], C=channels, split_keys=split_keys, SPLIT=splits > 1,
        **plan.blocks,
    )  # fmt: skip
    if splits > 1:
        blocks = plans.combine(splits, value_size)
        programs = batch * queries_len, -(-value_size // blocks["BLOCK_D"]) or 1
        call.launch(combine_kernel, *programs, parts=parts, context=context, **blocks)


def _many(call: Call, context: Tensor) -> None:
    """All queries; where nothing but the context is wanted, as many at once as scores allow."""
    steps, given, total = call.steps, call.given, call.queries_len
    chunk = plans.query_chunk(usual(call.batch), usual(call.keys_len), GPU_STEP_QUERIES + 1)
    # A weight's place decides whether it is dropped: with dropout the queries stay together.
    together = any(given[name] is not None for name in ("weights", "counts", "seed"))
    if together or type(total) is not int or chunk >= total:
        _some(call, total, [(call, context)])
        return
    parts = []
    for first in range(0, total, chunk):
        some = min(chunk, total - first)
        out = steps.new(call.batch, some, call.value_size, dtype=call.dtype)
        parts.append((call.of_queries(first, some), out))
    _some(call, chunk, parts)
    for number, (part, out) in enumerate(parts):
        whole = steps.make(torch.narrow, context, 1, number * chunk, part.queries_len)
        steps.make(Tensor.copy_, whole, out)


def _some(call: Call, most: int, parts: list[tuple[Call, Tensor]]) -> None:
    """Parts of a call, of up to so many queries, one after the other in the same memory."""
    # Apart from the weights: programs of other features read them while the first writes weights.
    scores = call.steps.new(call.batch, most, call.keys_len)
    table = new_table(call, most)
    blocks = plans.products(usual(call.value_size), call.size, call.mask is not None)
    for part, context in parts:
        lens = lengths(part)
        _scores(part, scores, table, lens)
        count = -(-part.queries_len // blocks["BLOCK_Q"])
        count *= -(-part.value_size // blocks["BLOCK_D"]) or 1
        programs = part.batch * count
        part.launch(softmax_kernel, programs, scores=scores, context=context, lens=lens, **blocks)


def _scores(call: Call, scores: Tensor, table: Table, lens: Tensor | None) -> None:
    """Scores of all keys within the lengths."""
    queries, keys = call.queries, call.summed_keys
    make_table(call, queries, table)
    sizes = map(usual, (call.batch, call.queries_len, call.keys_len, call.hidden, call.size))
    blocks = plans.scores(*sizes)
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.queries_len // blocks["BLOCK_Q"])
    call.launch(
        scores_kernel, call.batch * count,
        query_table=table.entries, query_max=table.largest, second=queries.numel(), keys=keys,
        scores=scores, lens=lens, **blocks,
    )  # fmt: skip
