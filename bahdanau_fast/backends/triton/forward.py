"""The forward operator by the Triton kernels: allocates, plans and launches.

Serves CUDA and ROCm tensors, and under ``TRITON_INTERPRET=1`` CPU tensors too, slowly, to test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.backends.route import GPU_STEP_QUERIES, is_gpu_step
from bahdanau_fast.backends.triton.call import Call, lengths, make_table, processors, strides
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.combine import combine_kernel
from bahdanau_fast.kernels.decode import decode_kernel
from bahdanau_fast.kernels.scores import scores_kernel
from bahdanau_fast.kernels.softmax import softmax_kernel

__all__ = ["attend", "attend_counted", "attend_scores", "attend_step"]


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
    narrow: bool = False,
    *,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator ``attend``; see :mod:`ops.attend`.

    ``table`` and ``keys_max`` are not read: these kernels make what they need in registers. How
    many keys the lengths leave is written to ``counts``, of their shape.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk), fp32 or ``narrow``; (0,) if not wanted.

    Raises:
        TypeError: a dtype that these kernels do not compute, or of lengths or a mask.
        ValueError: lengths, a mask or features of another shape or device; no such activation.
    """
    given = (valid_lens, mask, seed, dropout_p, features, w_f, activation, negative_slope)
    call = Call(queries, keys, values, w_v, *given)
    if counts is not None:
        call.counted = {"counts": counts, "counts_row": call.queries_len if counts.dim() > 1 else 1}
    context, weights = _results(call, need_weights, narrow)
    if context.numel() + weights.numel() == 0 or call.keys_len == 0:
        return context, weights
    step = is_gpu_step(call.queries_len, call.hidden, call.features)
    chunk = plans.query_chunk(call.batch, call.keys_len, GPU_STEP_QUERIES + 1)
    with call.guard():
        if step:
            _step(call, context, weights)
        # A weight's place decides whether it is dropped: with dropout the queries stay together.
        elif need_weights or counts is not None or chunk >= call.queries_len or dropout_p > 0.0:
            _many(call, context, weights)
        else:
            for part in range(0, call.queries_len, chunk):
                some = slice(part, part + chunk)
                lens, seen = valid_lens, call.seen["mask"]
                if lens is not None and lens.dim() == 2:
                    lens = lens[:, some]
                if seen is not None and seen.shape[1] > 1:
                    seen = seen[:, some]
                given = (lens, seen, None, 0.0, None, None, activation, negative_slope)
                part_of = Call(queries[:, some], call.keys, values, w_v, *given)
                out, none = _results(part_of, False)
                _many(part_of, out, none)
                context[:, some] = out
    return context, weights


def attend_counted(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator ``attend.counted``; see :mod:`ops.attend`.

    Raises:
        ValueError: no lengths, or a mask beside them.
    """
    lens, mask = given[6:8]
    if lens is None or mask is not None:
        got = "None" if lens is None else "both"
        checks.reject(ValueError, "valid_lens", "be given, without a mask", got)
    counts = torch.empty(lens.shape, dtype=torch.int32, device=lens.device)
    return *attend(*given, counts=counts), counts


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
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator ``attend_step``; see :mod:`ops.whole`. Tq is at most 16, H and Dv 2048.

    Keys are projected by torch's product.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk), fp32 or ``narrow``; (0,) if not wanted.
    """
    if w_k is not None:
        keys = torch.nn.functional.linear(keys, w_k, bias)
    call = Call(queries, keys, values, w_v, valid_lens, mask)
    context, weights = _results(call, need_weights, narrow)
    if context.numel() + weights.numel() and call.keys_len:
        with call.guard():
            _step(call, context, weights, w_q)
    return context, weights


def attend_scores(
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.01,
    backend: int = 0,
) -> Tensor:
    """The operator ``attend_scores``; see :mod:`ops.attend`.

    Returns:
        fp32 (B,Tq,Tk).
    """
    given = (None, None, None, 0.0, features, w_f, activation, negative_slope)
    call = Call(queries, keys, keys, w_v, *given)
    scores = call.new(call.batch, call.queries_len, call.keys_len)
    if scores.numel():
        with call.guard():
            _scores(call, scores, lengths(call))
    return scores


def _results(call: Call, need_weights: bool, narrow: bool = False) -> tuple[Tensor, Tensor]:
    """Where context and weights go; a context of no keys is zero."""
    shape, dtype = (call.batch, call.queries_len, call.keys_len), call.queries.dtype
    of_weights = dtype if narrow else torch.float32
    weights = call.new(*(shape if need_weights else (0,)), dtype=of_weights)
    context = call.new(*shape[:2], call.features, dtype=dtype)
    return (context if call.keys_len else context.zero_()), weights


def _step(call: Call, context: Tensor, weights: Tensor, w_q: Tensor | None = None) -> None:
    """One launch and, where keys are split, one to combine; projects queries if W_q is given."""
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    sizes = batch, queries_len, keys_len, call.hidden, features
    channels = 0 if call.inside is None else call.inside[1].shape[1]
    plan = plans.decode(*sizes, processors(call.device), call.size, call.limits.shared, channels)
    own = plan.blocks.get("BLOCK_C")
    of_keys, w_f = call.inside if own and call.inside else (None, None)
    keys = call.plain_keys if own else call.keys
    # Apart from the weights: a tile smaller than the program is read by several threads at once.
    scores = call.new(batch, queries_len, keys_len) if weights.numel() else None
    parts, maxima, sums, split = context, None, None, plan.splits > 1
    if split:
        parts = call.new(batch, queries_len, plan.splits, features)
        maxima, sums = call.new(2, batch, queries_len, plan.splits)
    given = {
        "queries": call.queries, "keys": keys, "values": call.values, "w_v": call.w_v,
        "context": parts, "scores": scores, "weights": weights, "maxima": maxima, "sums": sums,
        "w_q": None if w_q is None else w_q.contiguous(), "Tq": queries_len, "Tk": keys_len,
        "H": call.hidden, "Dq": call.queries.shape[2], "Dv": features, "splits": plan.splits,
        "split_keys": plan.split_keys, "SPLIT": split,
        **strides(q=call.queries, k=keys, v=call.values), **call.seen, **call.dropout,
        **call.kind, **call.counted, **plan.blocks,
    }  # fmt: skip
    decode_kernel[(batch * plan.splits * queries_len,)](
        features=of_keys, w_f=w_f, C=channels, PRECISION=call.precision, **strides(f=of_keys),
        **given,
    )  # fmt: skip
    if split:
        blocks = plans.combine(plan.splits, features)
        combine_kernel[(batch * queries_len, -(-features // blocks["BLOCK_D"]) or 1)](
            parts=parts, maxima=maxima, sums=sums, context=context, scores=scores,
            weights=weights, Tk=keys_len, Dv=features, splits=plan.splits, **blocks,
        )  # fmt: skip


def _many(call: Call, context: Tensor, weights: Tensor) -> None:
    batch, queries_len, keys_len, features = (
        call.batch, call.queries_len, call.keys_len, call.features,
    )  # fmt: skip
    # Apart from the weights: programs of other features read them while the first writes weights.
    scores = call.new(batch, queries_len, keys_len)
    bounds = lengths(call)
    _scores(call, scores, bounds)
    blocks = plans.products(features, call.size, call.seen["mask"] is not None)
    count = -(-queries_len // blocks["BLOCK_Q"]) * (-(-features // blocks["BLOCK_D"]) or 1)
    softmax_kernel[(batch * count,)](
        scores=scores, values=call.values, weights=weights if weights.numel() else None,
        context=context, Tq=queries_len, Tk=keys_len, Dv=features, **strides(v=call.values),
        **(call.seen | bounds), **call.dropout, **call.counted, PRECISION=call.precision, **blocks,
    )  # fmt: skip


def _scores(call: Call, scores: Tensor, bounds: dict[str, Any]) -> None:
    """Scores of all keys within the lengths."""
    batch, queries_len, keys_len = scores.shape
    table = make_table(call, call.queries)
    blocks = plans.scores(batch, queries_len, keys_len, call.hidden, call.size)
    count = -(-keys_len // blocks["BLOCK_K"]) * -(-queries_len // blocks["BLOCK_Q"])
    scores_kernel[(batch * count,)](
        queries=call.queries, query_table=table.entries, query_max=table.largest,
        second=call.queries.numel(), keys=call.keys, w_v=call.w_v, scores=scores, Tq=queries_len,
        Tk=keys_len, H=call.hidden, **strides(q=call.queries, k=call.keys), **bounds, **call.kind,
        **blocks,
    )  # fmt: skip
