"""The forward operator by the Triton kernels: allocates, plans and launches.

Serves CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.backends.route import GPU_STEP_QUERIES, is_gpu_step
from bahdanau_fast.backends.triton.call import Call, make_table, processors
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel
from bahdanau_fast.kernels.step import combine_kernel, step_kernel

__all__ = ["attend", "attend_step"]


def attend(
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
    need_weights: bool = True,
    precise: bool = True,
    backend: int = 0,
) -> tuple[Tensor, Tensor]:
    """The operator ``attend``; see :mod:`ops.attend`.

    ``table`` and ``keys_max`` are not read: these kernels make what they need in registers.

    Returns:
        Context (B,Tq,Dv) and fp32 weights (B,Tq,Tk); (0,) if not wanted.

    Raises:
        TypeError: a dtype that these kernels do not compute, or lengths that are bool.
        ValueError: a mask, features or another activation, or lengths of another shape or device.
    """
    given = (valid_lens, mask, seed, dropout_p, features, activation)
    call = Call(queries, keys, values, w_v, *given)
    context, weights = _results(call, need_weights)
    if context.numel() + weights.numel() == 0 or call.keys_len == 0:
        return context, weights
    shared = plans.step_shared(call.queries_len, call.features, call.size)
    step = is_gpu_step(call.queries_len, call.features, shared, call.limits)
    chunk = plans.query_chunk(call.batch, call.keys_len, GPU_STEP_QUERIES + 1)
    with call.guard():
        if step:
            _step(call, context, weights)
        # A weight's place decides whether it is dropped: with dropout the queries stay together.
        elif need_weights or chunk >= call.queries_len or call.drops:
            _many(call, context, weights)
        else:
            for part in range(0, call.queries_len, chunk):
                some = slice(part, part + chunk)
                lens = valid_lens
                if lens is not None and lens.dim() == 2:
                    lens = lens[:, some]
                part_of = Call(queries[:, some], keys, values, w_v, lens, None)
                out, none = _results(part_of, False)
                _many(part_of, out, none)
                context[:, some] = out
    return context, weights


def attend_step(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
    bias: Tensor | None,
    w_v: Tensor,
    valid_lens: Tensor | None = None,
    mask: Tensor | None = None,
    table: Tensor | None = None,
    keys_max: Tensor | None = None,
    need_weights: bool = True,
) -> tuple[Tensor, Tensor]:
    """The operator ``attend_step``; see :mod:`ops.whole`. Tq is at most 16.

    Returns:
        Context (B,Tq,Dv) and fp32 weights (B,Tq,Tk); (0,) if not wanted.
    """
    call = Call(queries, keys, values, w_v, valid_lens, mask)
    context, weights = _results(call, need_weights)
    if context.numel() + weights.numel() and call.keys_len:
        with call.guard():
            _step(call, context, weights, w_q, w_k, bias)
    return context, weights


def _results(call: Call, need_weights: bool) -> tuple[Tensor, Tensor]:
    """Where context and weights go; a context of no keys is zero."""
    shape = (call.batch, call.queries_len, call.keys_len) if need_weights else (0,)
    weights = call.new(*shape, dtype=torch.float32)
    context = call.new(call.batch, call.queries_len, call.features, dtype=call.queries.dtype)
    return (context if call.keys_len else context.zero_()), weights


def _step(
    call: Call,
    context: Tensor,
    weights: Tensor,
    w_q: Tensor | None = None,
    w_k: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """One launch and, where keys are split, one to combine; projects what has a weight here."""
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    sizes = (batch, queries_len, keys_len, call.hidden, features)
    of_device = (processors(call.device), call.size, call.limits.shared)
    candidates = plans.step(*sizes, *of_device, w_k is not None)
    _launch_step(call, candidates[0], context, weights, w_q, w_k, bias)


def _launch_step(
    call: Call,
    plan: plans.StepPlan,
    context: Tensor,
    weights: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
    bias: Tensor | None,
) -> None:
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    need_weights = weights.numel() > 0
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    scores = call.new(batch, queries_len, keys_len) if need_weights else weights
    split = plan.splits > 1
    parts = call.new(batch, queries_len, plan.splits, features) if split else context
    maxima, sums = (
        (call.new(batch, queries_len, plan.splits) for _ in range(2)) if split else (parts, parts)
    )
    programs = batch * plan.splits
    projected = call.new(programs, queries_len, call.hidden) if w_q is not None else parts
    # What a flag turns off is not read; any tensor stands in its place.
    weight_of = [call.queries if w is None else w.contiguous() for w in (w_q, w_k, bias)]
    step_kernel[(programs,)](
        call.queries, call.keys, call.values, call.w_v, call.lens, call.seed, parts, scores,
        weights, maxima, sums, *weight_of, projected, queries_len, keys_len, call.hidden,
        call.queries.shape[2], call.keys.shape[2], features,
        *call.queries.stride()[:2], *call.keys.stride()[:2], *call.values.stride()[:2],
        *call.lens_strides, *call.dropout, plan.splits, plan.split_keys,
        **call.kind, HAS_LENS=call.has_lens, DROPOUT=call.drops, WEIGHTS=need_weights,
        SPLIT=split, RAW_QUERIES=w_q is not None, RAW_KEYS=w_k is not None,
        HAS_BIAS=bias is not None, PRECISION=call.precision, **plan.blocks,
    )  # fmt: skip
    if split:
        blocks = plans.combine(plan.splits, features)
        combine_kernel[(batch * queries_len, -(-features // blocks["BLOCK_D"]) or 1)](
            parts, maxima, sums, call.lens, context, scores, weights, queries_len, keys_len,
            features, *call.lens_strides, plan.splits,
            HAS_LENS=call.has_lens, WEIGHTS=need_weights, **blocks,
        )  # fmt: skip


def _many(call: Call, context: Tensor, weights: Tensor) -> None:
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    need_weights = weights.numel() > 0
    # Apart from the weights: programs of other features read them while the first writes weights.
    scores = call.new(batch, queries_len, keys_len)
    table = make_table(call, call.queries)

    def launch(blocks: dict[str, Any]) -> None:
        count = -(-keys_len // blocks["BLOCK_K"]) * -(-queries_len // blocks["BLOCK_Q"])
        scores_kernel[(batch * count,)](
            call.queries, table.entries, table.largest, call.queries.numel(), call.keys,
            call.w_v, call.lens, scores,
            queries_len, keys_len, call.hidden, *call.queries.stride()[:2],
            *call.keys.stride()[:2], *call.lens_strides, **call.kind, FACTORED=table.factored,
            HAS_LENS=call.has_lens, **blocks,
        )  # fmt: skip

    sizes = (batch, queries_len, keys_len, call.hidden)
    launch(plans.scores(*sizes, call.size)[0])
    blocks = plans.products(features, call.size)
    count = -(-queries_len // blocks["BLOCK_Q"]) * (-(-features // blocks["BLOCK_D"]) or 1)
    softmax_kernel[(batch * count,)](
        scores, call.values, call.lens, call.seed, weights, context, queries_len, keys_len,
        features, *call.values.stride()[:2], *call.lens_strides, *call.dropout,
        HAS_LENS=call.has_lens, DROPOUT=call.drops, WEIGHTS=need_weights,
        PRECISION=call.precision, **blocks,
    )  # fmt: skip
