"""A decoder step of up to 16 queries in one launch: whole rows of keys and values in a tile.

Roof: reading keys and values once, ``B Tk (H + Dv)`` numbers. A program takes one query and a split
of its row's keys; copies of the next tiles are under way while it computes. If there are several
splits, `combine_kernel` combines their results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import TANH, TWO_LOG2_E, act, four_of, held, product, sum_of_four, tanh_precise
from .masking import finite, inverse_of, last_seen, load_valid_len, raise_maximum, survivors
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
    """Context and weights of one query over all keys, or over those of a split.

    Args:
        queries: (B,Tq,H) projected, or (B,Tq,Dq) with ``w_q`` (H,Dq).
        keys: (B,Tk,H) projected.
        context: (B,Tq,Dv); with SPLIT the unscaled sums (B,Tq,splits,Dv) in fp32.
        scores: (B,Tq,Tk), scratch in fp32; -inf where a query does not look. None without weights.
        weights: (B,Tq,Tk); with SPLIT left to `combine_kernel`.
        maxima, sums: (B,Tq,splits) largest score and sum of exponentials, with SPLIT.
        features: (B,Tk,C), which times ``w_f`` (H,C) is added to the keys; or None.
        split_keys: keys of one split, a multiple of BLOCK_K.
        counts: (B,counts_row), how many keys the lengths leave, or None; without a mask.
    """
    split, i, b = program_blocks(splits, Tq)
    row = b * Tq + i
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    a = load_query(queries + b * q_batch + i.to(tl.int64) * q_row, w_q, h, H, Dq, BLOCK_X)
    w = load_row(w_v, h, H)
    first, stop = split * split_keys, tl.minimum(split * split_keys + split_keys, Tk)
    valid_len = load_valid_len(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk)
    if mask is not None:
        mask += b * mask_batch + i.to(tl.int64) * mask_row
    empty, end = seen_of_split(mask, mask_key, first, stop, valid_len, Tk)
    if counts is not None:
        in_counts = (split == 0) & (i < counts_row)
        tl.store(counts + b * counts_row + i, tl.where(empty, 0, end), mask=in_counts)
    last = tl.minimum(stop, end)
    most, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    # What is too narrow for copies, mask and features, is loaded a tile ahead.
    j = first + tl.arange(0, BLOCK_K)
    if mask is not None:
        shown = tl.load(mask + j.to(tl.int64) * mask_key, mask=j < stop, other=0)
    if features is not None:
        f, feature_rows = tl.arange(0, BLOCK_C), features + b * f_batch
        weight = tl.load(w_f + h * C + f[:, None], mask=(f < C)[:, None] & (h < H), other=0.0)
        x = load_tile(feature_rows + j.to(tl.int64) * f_row, j < stop, f, C)
    for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        j = k0 + tl.arange(0, BLOCK_K)
        seen, at = j < last, j.to(tl.int64)
        next_valid, next_at = j + BLOCK_K < last, at + BLOCK_K
        c = load_tile(keys + b * k_batch + at * k_row, seen, h, H)
        if features is not None:
            c += product(x, weight, PRECISION)
            x = load_tile(feature_rows + next_at * f_row, next_valid, f, C)
        if mask is not None:
            seen &= empty | (shown != 0)
            shown = tl.load(mask + next_at * mask_key, mask=next_valid, other=0)
        s = row_scores(a, c, w, slope, ACTIVATION, PRECISE, NATIVE, BLOCK_K, BLOCK_H)
        s = tl.where(seen, tl.where(empty, 0.0, s), float("-inf"))
        # Only here, since it takes registers.
        v = load_tile(values + b * v_batch + at * v_row, j < last, d, Dv)
        if mask is not None:
            v = tl.where(seen[:, None], v, 0.0)
        if scores is not None:
            tl.store(scores + row * Tk + j, s, mask=j < Tk)
        most, base, decay = raise_maximum(most, s, 0)
        p = tl.exp(s - base)
        total = total * decay + tl.sum(p, axis=0)
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row, j)
        acc = acc * decay + p[:, None] * v
    if scores is not None:
        for k0 in range(tl.maximum(first, tl.cdiv(last, BLOCK_K) * BLOCK_K), stop, BLOCK_K):
            j = k0 + tl.arange(0, BLOCK_K)
            tl.store(scores + row * Tk + j, float("-inf"), mask=j < Tk)
    store_result(
        context, maxima, sums, scores, weights, row, row * splits + split, most, total,
        tl.sum(acc, axis=0), d, Tk, Dv, SPLIT,
    )  # fmt: skip


@triton.jit
def store_result(
    context, maxima, sums, scores, weights, row, index, most, total, result, d, Tk, Dv,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """What a split leaves to `combine_kernel`, or context and weights of a row."""
    if SPLIT:
        tl.store(maxima + index, most)
        tl.store(sums + index, total)
        tl.store(context + index * Dv + d, result, mask=d < Dv)
    else:
        inverse = inverse_of(total)
        tl.store(context + row * Dv + d, result * inverse, mask=d < Dv)
        if scores is not None:
            tl.debug_barrier()  # other threads stored the scores
            scale_scores(scores, weights, row, most, inverse, 0, Tk, 1, 128)


@triton.jit
def seen_of_split(mask, mask_key, first, stop, valid_len, Tk):
    """Whether a query sees no key, so is uniform over all; where its keys of a split end."""
    end = valid_len
    if mask is not None:
        end = last_seen(mask, mask_key, first, tl.minimum(valid_len, stop), 1024)
        if end == 0:  # other splits may have some
            valid_len = last_seen(mask, mask_key, 0, valid_len, 1024)
    empty = valid_len == 0
    return empty, tl.where(empty, Tk, end)


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
        s = tl.sum(tl.fma(act(c + a, slope, ACTIVATION), w + zero, zero), axis=1)
    elif PRECISE:
        s = tl.sum(tl.fma(tanh_precise(c + a), w + zero, zero), axis=1)
    else:
        x = held(c * TWO_LOG2_E + a * TWO_LOG2_E) * 2.0**-16 + 2.0**-16  # in range, whatever w
        x0, x1, x2, x3 = four_of(x, BLOCK_K, BLOCK_H)
        w0, w1, w2, w3 = four_of(w * 2.0**-48, 1, BLOCK_H)
        # Not sum(w) alone: warps that hold the same row may add it up to other last bits.
        shared = sum_of_four(x0, x1, x2, x3, w0, w1, w2, w3, NATIVE)
        s = tl.sum((w0 + w1) + (w2 + w3) - 2.0**-15 * shared, axis=1) * 2.0**48
    return s


@triton.jit
def load_query(x, w_q, h, H, D, BLOCK_X: tl.constexpr):
    """One query (1,BLOCK_H), projected by w_q on the plain units unless that is None."""
    if w_q is None:
        query = load_row(x, h, H)
    else:
        total = tl.zeros([h.shape[0]], tl.float32)
        for d0 in range(0, D, BLOCK_X):
            d = d0 + tl.arange(0, BLOCK_X)
            tile = load_tile(w_q + h.to(tl.int64) * D, h < H, d, D)
            total += tl.sum(tile * load_row(x, d, D), axis=1)
        query = total[None, :]
    return query


@triton.jit
def scale_scores(scores, weights, row, most, inverse, program, Tk, programs, BLOCK_K: tl.constexpr):
    """Weights of a row from its scores, exp(s - most) * inverse: what one program makes of them."""
    base = finite(most)
    for k0 in range(program * BLOCK_K, Tk, programs * BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        s = tl.load(scores + row * Tk + j, mask=j < Tk, other=float("-inf"))
        tl.store(weights + row * Tk + j, tl.exp(s - base) * inverse, mask=j < Tk)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts, maxima, sums, context, scores, weights, Tk, Dv, splits, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Context and weights of one query from those of its splits; BLOCK_D features a program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    index = row * splits + s
    highest = tl.load(maxima + index, mask=s < splits, other=float("-inf"))
    most = tl.max(highest, axis=0)
    factor = tl.exp(highest - finite(most))
    total = tl.sum(factor * tl.load(sums + index, mask=s < splits, other=0.0), axis=0)
    tile = load_tile(parts + index * Dv, s < splits, d, Dv)
    inverse = inverse_of(total)
    tl.store(context + row * Dv + d, tl.sum(factor[:, None] * tile, axis=0) * inverse, mask=d < Dv)
    if scores is not None:
        programs = tl.maximum(tl.cdiv(Dv, BLOCK_D), 1)
        scale_scores(scores, weights, row, most, inverse, tl.program_id(1), Tk, programs, 512)
