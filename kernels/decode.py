"""A decoder step of up to 16 queries in one launch: whole rows of keys and values in a tile.

Roof: reading keys and values once, ``B Tk (H + Dv)`` numbers. A program takes one query and a split
of its row's keys; copies of the next tiles are under way while it computes. If there are several
splits, `combine_kernel` combines their parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .combine import scale_scores
from .elementary import (
    TANH,
    TWO_LOG2_E,
    four_of,
    held,
    inverse_of,
    rectified,
    sum_of_four,
    survivors,
    tanh_precise,
    within_split,
)
from .products import product
from .tiles import VARYING, load_row, load_tile, program_blocks


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    queries, keys, values, w_v, context, scores, weights, maxima, sums, w_q, features, w_f, Tq, Tk,
    H, Dq, Dv, C, q_batch, q_row, k_batch, k_row, v_batch, v_row, f_batch, f_row, splits,
    split_keys, lens, lens_batch, lens_row, mask, mask_batch, mask_row, mask_key, seed, threshold,
    scale_bits, slope, counts, counts_row, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr,
    NATIVE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Context and weights of one query; of a split, their parts.

    Args:
        queries: (B,Tq,H) projected, or (B,Tq,Dq) with ``w_q``.
        keys: (B,Tk,H) projected.
        context: (B,Tq,Dv); with SPLIT the unscaled sums (B,Tq,splits,Dv) in fp32.
        scores: (B,Tq,Tk), scratch in fp32; -inf where a query does not look. None without weights.
        weights: (B,Tq,Tk); with SPLIT left to `combine_kernel`.
        maxima: (B,Tq,splits) largest score, with SPLIT.
        sums: (B,Tq,splits) sum of exponentials, with SPLIT.
        w_q: (H,Dq), or None.
        features: (B,Tk,C), which times ``w_f`` (H,C) is added to the keys; or None.
        split_keys: keys of one split, a multiple of BLOCK_K.
        slope: of leaky ReLU, on the left.
        lens, mask, seed: None where there are no lengths, no mask, no dropout.
        counts: (B,counts_row), how many keys the lengths leave, or None; without a mask.
    """
    split, i, b = program_blocks(splits, Tq)
    row = b * Tq + i
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    query = queries + b * q_batch + i.to(tl.int64) * q_row
    if w_q is not None:
        a = project_one(query, w_q, h, H, Dq, BLOCK_H, BLOCK_X)[None, :]
    else:
        a = load_row(query, h, H)
    w = load_row(w_v, h, H)
    first = split * split_keys
    stop = tl.minimum(first + split_keys, Tk)
    one = tl.arange(0, 1)  # helpers take several queries
    length = b * lens_batch + i.to(tl.int64) * lens_row
    seen_row = b * mask_batch + i.to(tl.int64) * mask_row
    alone, end = within_split(
        lens, length + one, mask, seen_row + one, mask_key, first, stop, Tk, one == 0, 1024
    )
    empty = tl.max(alone.to(tl.int32), axis=0) > 0
    if counts is not None:
        count = tl.where(empty, 0, tl.max(end, axis=0))
        tl.store(counts + b * counts_row + i, count, mask=(split == 0) & (i < counts_row))
    last = tl.minimum(stop, tl.max(end, axis=0))
    most, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    # What is too narrow for copies, mask and features, is loaded a tile ahead.
    j = first + tl.arange(0, BLOCK_K)
    if mask is not None:
        shown = tl.load(mask + seen_row + j.to(tl.int64) * mask_key, mask=j < stop, other=0)
    if features is not None:
        f, of_row = tl.arange(0, BLOCK_C), features + b * f_batch
        weight = tl.load(w_f + h * C + f[:, None], mask=(f < C)[:, None] & (h < H), other=0.0)
        x = load_tile(of_row + j.to(tl.int64) * f_row, j < stop, f, C)
    for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        j = k0 + tl.arange(0, BLOCK_K)
        there, at = j < last, j.to(tl.int64)
        next_there, next_at = j + BLOCK_K < last, at + BLOCK_K
        c = load_tile(keys + b * k_batch + at * k_row, there, h, H)
        if features is not None:
            c += product(x, weight, PRECISION)
            x = load_tile(of_row + next_at * f_row, next_there, f, C)
        seen = there
        if mask is not None:
            seen = there & (empty | (shown != 0))
            shown = tl.load(mask + seen_row + next_at * mask_key, mask=next_there, other=0)
        s = row_scores(a, c, w, slope, ACTIVATION, PRECISE, NATIVE, BLOCK_K, BLOCK_H)
        s = tl.where(seen, tl.where(empty, 0.0, s), float("-inf"))
        # Only here, since it takes registers.
        v = load_tile(values + b * v_batch + at * v_row, there, d, Dv)
        if mask is not None:
            v = tl.where(seen[:, None], v, 0.0)
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
        acc = acc * decay + p[:, None] * v
    if scores is not None:
        hide_rest(scores, row + one, one == 0, first, last, stop, Tk, BLOCK_K)
    result = tl.sum(acc, axis=0)
    if SPLIT:
        place = row * splits + split
        tl.store(maxima + place, most)
        tl.store(sums + place, total)
        tl.store(context + place * Dv + d, result, mask=d < Dv)
    else:
        inverse = inverse_of(total + tl.zeros([1], tl.float32))
        tl.store(context + row * Dv + d, result * tl.max(inverse, axis=0), mask=d < Dv)
        if scores is not None:
            tl.debug_barrier()  # other threads stored the scores
            scale_scores(scores, weights, row + one, most + one, inverse, one == 0, 0, Tk, 1, 128)


@triton.jit
def row_scores(
    a, c, w, slope, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The scores of one query (1,BLOCK_H) and keys (BLOCK_K,BLOCK_H).

    Multiplied by fma, so that no addition becomes one: of two lanes that add up each other's
    products, each would round the other's, and hold another sum.
    """
    zero = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    if ACTIVATION != TANH:
        s = tl.sum(tl.fma(rectified(c + a, slope, ACTIVATION), w + zero, zero), axis=1)
    elif PRECISE:
        s = tl.sum(tl.fma(tanh_precise(c + a), w + zero, zero), axis=1)
    else:
        x = 1.0 + held(c * TWO_LOG2_E + a * TWO_LOG2_E)
        x0, x1, x2, x3 = four_of(x, BLOCK_K, BLOCK_H)
        w0, w1, w2, w3 = four_of(w, 1, BLOCK_H)
        # Not sum(w) alone: warps that hold the same row may add it up to other last bits.
        shared = sum_of_four(x0, x1, x2, x3, w0, w1, w2, w3, NATIVE)
        s = tl.sum((w0 + w1) + (w2 + w3) - 2.0 * shared, axis=1)
    return s


@triton.jit
def project_one(x, weight, h, H, D, BLOCK_H: tl.constexpr, BLOCK_X: tl.constexpr):
    """weight[h] . x of one row, (BLOCK_H,), on the plain units."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for d0 in range(0, D, BLOCK_X):
        d = d0 + tl.arange(0, BLOCK_X)
        tile = load_tile(weight + h.to(tl.int64) * D, h < H, d, D)
        total += tl.sum(tile * load_row(x, d, D), axis=1)
    return total


@triton.jit
def hide_rest(scores, row, real, first, last, stop, Tk, BLOCK_K: tl.constexpr):
    """Minus infinity for what a split, ``first`` to ``stop``, has in tiles from ``last`` on."""
    for k0 in range(tl.maximum(first, tl.cdiv(last, BLOCK_K) * BLOCK_K), stop, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        here = real[:, None] & (j < Tk)[None, :]
        tl.store(scores + row[:, None] * Tk + j[None, :], float("-inf"), mask=here)
