"""A decoder step of one to three queries in one launch: whole rows of keys and values in a tile.

Roof: reading keys and values once, ``B Tk (H + Dv)`` numbers. A program takes one query and a split
of its row's keys; copies of the next tiles are under way while it computes. If there are several
splits, `combine_kernel` combines their parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import (
    TANH,
    TWO_LOG2_E,
    held,
    inverse_of,
    kept_keys,
    last_seen,
    rectified,
    sum_of_four,
    survivors,
    tanh_precise,
)
from .step import scale_scores
from .tiles import program_blocks


@triton.jit(
    do_not_specialize=[
        "Tq",
        "Tk",
        "lens_batch",
        "lens_row",
        "mask_batch",
        "mask_row",
        "threshold",
        "scale_bits",
        "splits",
        "split_keys",
    ]
)
def decode_kernel(
    queries,
    keys,
    values,
    w_v,
    context,
    scores,
    weights,
    maxima,
    sums,
    w_q,
    Tq,
    Tk,
    H,
    Dq,
    Dv,
    q_batch,
    q_row,
    k_batch,
    k_row,
    v_batch,
    v_row,
    splits,
    split_keys,
    lens,
    lens_batch,
    lens_row,
    mask,
    mask_batch,
    mask_row,
    mask_key,
    seed,
    threshold,
    scale_bits,
    slope,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    NATIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Context and weights of one query; of a split, their parts. Arguments as `step_kernel` has."""
    split, i, b = program_blocks(splits, Tq)
    row = b * Tq + i
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    query = queries + b * q_batch + i.to(tl.int64) * q_row
    if w_q is not None:
        a = project_one(query, w_q, h, H, Dq, BLOCK_H, BLOCK_X)
    else:
        a = tl.load(query + h, mask=h < H, other=0.0).to(tl.float32)
    w = tl.load(w_v + h, mask=h < H, other=0.0).to(tl.float32)
    first = split * split_keys
    stop = tl.minimum(first + split_keys, Tk)
    kept = kept_keys(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk)
    end, seen_row = kept, b * mask_batch + i.to(tl.int64) * mask_row
    if mask is not None:
        one = tl.zeros([1], tl.int32)
        limit = tl.minimum(kept, stop) + one
        end = tl.max(last_seen(mask, seen_row + one, mask_key, first, limit, 1024), axis=0)
        if end == 0:  # there may be some in other splits
            limit = kept + one
            kept = tl.max(last_seen(mask, seen_row + one, mask_key, 0, limit, 1024), axis=0)
    # A row without valid keys is uniform over all keys: every score is zero.
    empty = kept == 0
    last = tl.minimum(stop, tl.where(empty, Tk, end))
    most, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        j = k0 + tl.arange(0, BLOCK_K)
        there, at = j < last, j.to(tl.int64)[:, None]
        c = tl.load(
            keys + b * k_batch + at * k_row + h[None, :],
            mask=there[:, None] & (h < H)[None, :],
            other=0.0,
        )
        v = tl.load(
            values + b * v_batch + at * v_row + d[None, :],
            mask=there[:, None] & (d < Dv)[None, :],
            other=0.0,
        )
        seen = there
        if mask is not None:
            shown = tl.load(mask + seen_row + j.to(tl.int64) * mask_key, mask=there, other=0)
            seen = there & (empty | (shown != 0))
            v = tl.where(seen[:, None], v, 0.0)
        s = row_scores(a, c.to(tl.float32), w, slope, ACTIVATION, PRECISE, NATIVE, BLOCK_K, BLOCK_H)
        s = tl.where(seen, tl.where(empty, 0.0, s), float("-inf"))
        if scores is not None:
            tl.store(scores + row * Tk + j, s, mask=j < Tk)
        higher = tl.maximum(most, tl.max(s, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp(most - base)
        p = tl.exp(s - base)
        total = total * decay + tl.sum(p, axis=0)
        most = higher
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row, j)
        acc = acc * decay + p[:, None] * v.to(tl.float32)
    if scores is not None:
        for k0 in range(tl.maximum(first, tl.cdiv(last, BLOCK_K) * BLOCK_K), stop, BLOCK_K):
            j = k0 + tl.arange(0, BLOCK_K)
            tl.store(scores + row * Tk + j, float("-inf"), mask=j < Tk)
    result = tl.sum(acc, axis=0)
    if SPLIT:
        place = row * splits + split
        tl.store(maxima + place, most)
        tl.store(sums + place, total)
        tl.store(context + place * Dv + d, result, mask=d < Dv)
    else:
        one = tl.arange(0, 1)
        inverse = inverse_of(total + tl.zeros([1], tl.float32))
        tl.store(context + row * Dv + d, result * tl.max(inverse, axis=0), mask=d < Dv)
        if scores is not None:
            tl.debug_barrier()  # other threads stored the scores
            scale_scores(scores, weights, row + one, most + one, inverse, one == 0, Tk, 128)


@triton.jit
def project_one(x, weight, h, H, D, BLOCK_H: tl.constexpr, BLOCK_X: tl.constexpr):
    """The product weight @ x of one row, on the plain units."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for d0 in range(0, D, BLOCK_X):
        d = d0 + tl.arange(0, BLOCK_X)
        at = weight + h.to(tl.int64)[:, None] * D + d[None, :]
        tile = tl.load(at, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(
            tile * tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)[None, :], axis=1
        )
    return total


@triton.jit
def row_scores(
    a,
    c,
    w,
    slope,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The scores of one query (BLOCK_H) and keys (BLOCK_K,BLOCK_H)."""
    if ACTIVATION != TANH:
        s = tl.sum(rectified(c + a[None, :], slope, ACTIVATION) * w[None, :], axis=1)
    elif PRECISE:
        s = tl.sum(tanh_precise(c + a[None, :]) * w[None, :], axis=1)
    else:
        x = 1.0 + held(c * TWO_LOG2_E + (a * TWO_LOG2_E)[None, :])
        x0, x1, x2, x3 = four_of(x, BLOCK_K, BLOCK_H)
        w0, w1, w2, w3 = four_of(w[None, :], 1, BLOCK_H)
        shared = tl.sum(sum_of_four(x0, x1, x2, x3, w0, w1, w2, w3, NATIVE), axis=1)
        s = tl.sum(w, axis=0) - 2.0 * shared
    return s


@triton.jit
def four_of(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every fourth column from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, ROWS, COLUMNS // 2, 2))
    x0, x2 = tl.split(tl.reshape(even, ROWS, COLUMNS // 4, 2))
    x1, x3 = tl.split(tl.reshape(odd, ROWS, COLUMNS // 4, 2))
    return x0, x1, x2, x3
