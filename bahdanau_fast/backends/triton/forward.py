"""The forward operators by the Triton kernels: allocate, plan and launch.

They serve CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import switches
from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton.call import KernelCall, usual
from bahdanau_fast.backends.triton.launch import PlanCache, Steps
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.decode import combine_kernel, decode_kernel
from bahdanau_fast.kernels.rational_terms import rational_scores_kernel, rational_terms_kernel
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel


@PlanCache
def attention(steps: Steps, *args: Any) -> tuple[Tensor, ...]:
    """The operator ``attention``; see :mod:`ops.attention`."""
    *inputs, need_weights, _, _, narrow = args
    call = KernelCall(steps, *inputs)
    # Torch projects keys; and queries, unless W_q is so small that the launch of a step reads it.
    in_launch = call.is_step and plans.projects_queries(
        call.queries_len, usual(call.query_size), call.hidden, call.size
    )
    call.project(but_queries=in_launch)
    return _attended(call, need_weights, narrow, None)


@PlanCache
def recorded(steps: Steps, *args: Any) -> tuple[Tensor, ...]:
    """The operator ``attention.recorded``: counts and projections follow attention's results."""
    *inputs, need_weights, _, _, narrow = args
    call = KernelCall(steps, *inputs)
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
    call: KernelCall, need_weights: bool, narrow: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Context and weights; fills ``counts`` unless None."""
    steps, shape = call.steps, (call.batch, call.queries_len, call.keys_len)
    dtype = call.dtype if narrow else torch.float32
    weights = steps.new(*shape, dtype=dtype) if need_weights else None
    row = 0 if counts is None else call.queries_len if counts.dim() > 1 else 1
    call.args |= {"weights": weights, "counts": counts, "counts_row": row}
    if 0 in shape:
        context = _new_context(call)
        for result in (context, counts):
            if result is not None:
                steps.make(Tensor.zero_, result)
    else:
        context = _step(call) if call.is_step else _many(call)
    return context, steps.none(dtype) if weights is None else weights


def _new_context(call: KernelCall) -> Tensor:
    return call.steps.new(call.batch, call.queries_len, call.value_size, dtype=call.dtype)


@PlanCache
def attend_scores(steps: Steps, *args: Any) -> Tensor:
    """The operator ``attend_scores``."""
    call = KernelCall.of_scores(steps, *args)
    if 0 in (call.batch, call.queries_len, call.keys_len):
        return steps.new(call.batch, call.queries_len, call.keys_len)
    # Splits that cancel would leave their roundings.
    scratch = _Scratch(call, call.queries_len, split=False)
    _scores(call, scratch, call.lengths())
    return scratch.scores


def _step(call: KernelCall) -> Tensor:
    """One launch and, where keys are split, one to combine."""
    context = _new_context(call)
    batch, queries_len, value_size = call.batch, call.queries_len, call.value_size
    new = call.steps.new
    channels = 0 if call.w_f is None else call.w_f.shape[1]
    plan = plans.decode(
        usual(batch), queries_len, usual(call.keys_len), call.hidden, value_size, call.size,
        call.gpu, usual(channels),
    )  # fmt: skip
    splits, split_keys = call.split(plan)
    if plan.blocks["BLOCK_C"]:
        keys, features, w_f = call.keys, call.features, call.w_f
    else:
        keys, features, w_f = call.summed_keys, None, None
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    weighs = call.args["weights"] is not None
    scores = new(batch, queries_len, call.keys_len) if weighs else None
    parts, maxima, sums = context, None, None
    if splits > 1:
        parts = new(batch, queries_len, splits, value_size)
        maxima, sums = (new(batch, queries_len, splits) for _ in range(2))
    call.args |= {"scores": scores, "maxima": maxima, "sums": sums, "splits": splits}
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
    return context


def _many(call: KernelCall) -> Tensor:
    """All queries; where nothing but the context is wanted, as many at once as scores allow."""
    total = call.queries_len
    chunk = plans.query_chunk(usual(call.batch), usual(call.keys_len), GPU_STEP_QUERIES + 1)
    # A weight's index decides whether it is dropped: with dropout the queries stay together.
    together = any(call.args[name] is not None for name in ("weights", "counts", "seed"))
    if together or type(total) is not int or chunk >= total:
        return _some(call, _Scratch(call, total))
    scratch, starts = _Scratch(call, chunk), range(0, total, chunk)
    parts = [call.of_queries(first, min(chunk, total - first)) for first in starts]
    return call.steps.make(_joined, *(_some(part, scratch) for part in parts))


def _joined(*contexts: Tensor) -> Tensor:
    return torch.cat(contexts, 1)


class _Scratch:
    """Memory for the scores of up to so many queries, and for terms or a table."""

    def __init__(self, call: KernelCall, most: int, split: bool = True) -> None:
        new, self.splits, self.raw = call.steps.new, 1, not split
        self.by_rational_terms = call.by_products and not switches.is_off("terms")
        if self.by_rational_terms:
            plan = self.plan = plans.rational_terms(
                usual(call.batch), usual(most), usual(call.keys_len), usual(call.hidden), split
            )
            self.splits, self.rows = plan.splits, call.batch
            if type(call.batch) is int:
                self.rows = min(plan.rows, call.batch)
            half: dict[str, Any] = {"dtype": torch.float16}
            self.terms = {
                "q_terms": new(self.rows, plan.quads, most, 16, **half),
                "k_terms": new(self.rows, plan.quads, call.keys_len, 16, **half),
                "w_terms": new(plan.quads, 16, **half),
                "w_scale": new(2),
            }
        else:
            self.table = call.new_table(most)
        # Apart from the weights: programs of other features read them while the first writes those.
        self.scores = new(call.batch, most * self.splits, call.keys_len)


def _some(call: KernelCall, scratch: _Scratch) -> Tensor:
    """The context of no more queries than there is memory for.

    Where all keys are seen a library multiplies, in 16 bits: values behind a mask may be NaN.
    """
    steps, weights, lens = call.steps, call.args["weights"], call.lengths()
    context, dropped, features = None, None, 0
    if call.precise or lens is not None:
        context, features = _new_context(call), call.value_size
    elif weights is None or weights.dtype != call.dtype or call.args["seed"] is not None:
        dropped = steps.new(call.batch, call.queries_len, call.keys_len, dtype=call.dtype)
    _scores(call, scratch, lens)
    blocks = plans.products(usual(features), call.size, call.gpu)
    count = -(-call.queries_len // blocks["BLOCK_Q"]) * (-(-features // blocks["BLOCK_D"]) or 1)
    call.launch(
        softmax_kernel, call.batch * count,
        scores=scratch.scores, dropped=dropped, context=context, lens=lens, Dv=features,
        splits=scratch.splits, **blocks,
    )  # fmt: skip
    if context is None:
        factors = weights if dropped is None else dropped
        context = steps.make(torch.bmm, factors, call.args["values"])
    return context


def _scores(call: KernelCall, scratch: _Scratch, lens: Tensor | None) -> None:
    """Scores (B,Tq,splits,Tk) of all keys within the lengths."""
    if scratch.by_rational_terms:
        _by_rational_terms(call, scratch, lens)
        return
    queries, table = call.queries, scratch.table
    call.make_table(queries, table)
    blocks = plans.scores(
        usual(call.batch), usual(call.queries_len), usual(call.keys_len), usual(call.hidden),
        call.size, call.gpu,
    )  # fmt: skip
    count = -(-call.keys_len // blocks["BLOCK_K"]) * -(-call.queries_len // blocks["BLOCK_Q"])
    call.launch(
        scores_kernel, call.batch * count,
        query_table=table.entries, query_max=table.largest, second=queries.numel(),
        keys=call.summed_keys, scores=scratch.scores, lens=lens, **blocks,
    )  # fmt: skip


def _by_rational_terms(call: KernelCall, scratch: _Scratch, lens: Tensor | None) -> None:
    """Scores by products of terms, of so many rows of the batch at once as scratch has terms."""
    plan, lengths_of = scratch.plan, (call.queries_len, call.keys_len)
    of_row = call.queries_len * plan.splits * call.keys_len
    count = -(-call.keys_len // plan.blocks["BLOCK_K"]) * plan.splits
    count *= -(-call.queries_len // plan.blocks["BLOCK_Q"])
    for first in range(0, call.batch, scratch.rows) if type(call.batch) is int else (0,):
        rows, scores = scratch.rows, scratch.scores
        some = {"queries": call.queries, "keys": call.summed_keys, "lens": lens}
        if type(call.batch) is int and rows < call.batch:
            rows = min(rows, call.batch - first)
            for name, x in some.items():
                if x is not None:
                    some[name] = call.steps.make(torch.narrow, x, 0, first, rows)
            scores = call.steps.make(_behind, scores, first * of_row)
        some |= scratch.terms
        blocks = [rows * -(-length // plan.tables["BLOCK_R"]) for length in lengths_of]
        programs = (1 + sum(blocks)) * -(-plan.quads // plan.tables["BLOCK_U"])
        call.launch(
            rational_terms_kernel, programs, rows=blocks[0], quads=plan.quads, **some, **plan.tables
        )
        call.launch(
            rational_scores_kernel, rows * count,
            scores=scores, quads=plan.quads, splits=plan.splits, RAW=scratch.raw, **some,
            **plan.blocks,
        )  # fmt: skip


def _behind(x: Tensor, start: int) -> Tensor:
    return x.view(-1)[start:]
