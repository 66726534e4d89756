"""A decoder step in one launch: 4 to 16 queries, or raw keys. Fewer: decode.py.

Roof: reading keys and values once, ``B Tk (H + Dv)`` numbers. A program takes a split of one
row's keys; if there are several splits, `combine_kernel` combines their parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import inverse_of, kept_keys, seen_keys, survivors, two_direct, within_split
from .products import product
from .tiles import VARYING, load_row, load_tile, program_blocks


@triton.jit(do_not_specialize=VARYING)
def step_kernel(
    queries, keys, values, w_v, context, scores, weights, maxima, sums, w_q, w_k, bias, projected,
    Tq, Tk, H, Dq, Dk, Dv, q_batch, q_row, k_batch, k_row, v_batch, v_row, splits, split_keys, lens,
    lens_batch, lens_row, mask, mask_batch, mask_row, mask_key, seed, threshold, scale_bits, slope,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Context and weights of at most BLOCK_Q queries; of a split, their parts.

    Args:
        queries: (B,Tq,H) projected, or (B,Tq,Dq) with ``w_q``.
        keys: (B,Tk,H) projected, or (B,Tk,Dk) with ``w_k``.
        context: (B,Tq,Dv); with SPLIT the unscaled sums (B,Tq,splits,Dv) in fp32.
        scores: (B,Tq,Tk), scratch in fp32; -inf where a query does not look. None without weights.
        weights: (B,Tq,Tk); with SPLIT left to `combine_kernel`.
        maxima: (B,Tq,splits) largest score, with SPLIT.
        sums: (B,Tq,splits) sum of exponentials, with SPLIT.
        split_keys: keys of one split, a multiple of BLOCK_K.
        w_q: (H,Dq), w_k: (H,Dk), bias: (H,): of the projections inside the kernel; or None.
        projected: (programs,Tq,H) in fp32, scratch for the queries with ``w_q``.
        slope: of leaky ReLU, on the left.
        lens, mask, seed: None where there are no lengths, no mask, no dropout.
    """
    split, _, b = program_blocks(splits, 1)
    i = tl.arange(0, BLOCK_Q)
    real = i < Tq
    row = b * Tq + i
    lengths = b * lens_batch
    first = split * split_keys
    stop = tl.minimum(first + split_keys, Tk)
    seen_rows = b * mask_batch + i.to(tl.int64) * mask_row
    empty, end = within_split(
        lens, lengths + i.to(tl.int64) * lens_row, mask, seen_rows, mask_key, first, stop, Tk, real,
        1024 // BLOCK_Q,
    )  # fmt: skip
    last = tl.minimum(stop, tl.max(end, axis=0))
    d = tl.arange(0, BLOCK_D)
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if w_q is not None:
        a = projected + (b * splits + split) * Tq * H
        for query in range(0, 1 if BLOCK_Q == 1 else Tq):
            row_of = queries + b * q_batch + tl.cast(query, tl.int64) * q_row
            project_row(row_of, w_q, a + query * H, H, Dq, BLOCK_H, BLOCK_X)
        a_row = H
        tl.debug_barrier()  # other threads stored parts of the row
    else:
        a = queries + b * q_batch
        a_row = q_row
    for k0 in range(first, last, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        key_rows = keys + b * k_batch + j.to(tl.int64) * k_row
        within = j[None, :] < end[:, None]
        seen = seen_keys(mask, seen_rows, j, mask_key, within & ~empty[:, None])
        looked = seen | (within & empty[:, None])
        units, weighed = H, j < last
        if mask is not None:  # of keys that nobody looks at neither scores nor values are read
            units = tl.where(tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) > 0, H, 0)
            weighed = tl.max(looked.to(tl.int32), axis=0) > 0
        for h0 in range(0, units, 2 * BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            h1 = h + BLOCK_H
            if w_k is not None:
                c0, c1 = project_tiles(
                    key_rows, j < last, w_k, bias, h, h1, H, Dk,
                    PRECISION, BLOCK_K, BLOCK_H, BLOCK_X,
                )  # fmt: skip
            else:
                c0 = load_tile(key_rows, j < last, h, H)
                c1 = load_tile(key_rows, j < last, h1, H)
            w0, w1 = load_row(w_v, h, H), load_row(w_v, h1, H)
            for query in range(0, 1 if BLOCK_Q == 1 else Tq):
                if k0 < kept_keys(lens, lengths + tl.cast(query, tl.int64) * lens_row, Tk):
                    row_of = a + tl.cast(query, tl.int64) * a_row
                    a0, a1 = load_row(row_of, h, H), load_row(row_of, h1, H)
                    t0, t1 = two_direct(a0, a1, c0, c1, slope, ACTIVATION, PRECISE, NATIVE)
                    part = tl.sum(t0 * w0 + t1 * w1, axis=1)
                    s += tl.where((i == query)[:, None], part[None, :], 0.0)
        s = tl.where(seen, s, tl.where(looked, 0.0, float("-inf")))
        higher = tl.maximum(most, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp(most - base)
        p = tl.exp(s - base[:, None])
        total = total * decay + tl.sum(p, axis=1)
        most = higher
        if scores is not None:
            here = real[:, None] & (j < Tk)[None, :]
            tl.store(scores + row[:, None] * Tk + j[None, :], s, mask=here)
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row[:, None], j[None, :])
        v = tl.load(
            values + b * v_batch + j.to(tl.int64)[:, None] * v_row + d[None, :],
            mask=weighed[:, None] & (d < Dv)[None, :],
            other=0.0,
        )
        if BLOCK_Q == 1:
            part = tl.sum(tl.trans(p) * v.to(tl.float32), axis=0)[None, :]
        else:
            part = product(p, v, PRECISION)
        acc = acc * decay[:, None] + part
    if scores is not None:
        hide_rest(scores, row, real, first, last, stop, Tk, BLOCK_K)
    inside = real[:, None] & (d < Dv)[None, :]
    if SPLIT:
        place = row * splits + split
        tl.store(maxima + place, most, mask=real)
        tl.store(sums + place, total, mask=real)
        tl.store(context + place[:, None] * Dv + d[None, :], acc, mask=inside)
    else:
        inverse = inverse_of(tl.where(real, total, 1.0))
        tl.store(context + row[:, None] * Dv + d[None, :], acc * inverse[:, None], mask=inside)
        if scores is not None:
            tl.debug_barrier()  # other threads stored the scores
            scale_scores(scores, weights, row, most, inverse, real, 0, Tk, 1, 128)


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
def project_row(x, weight, out, H, D, BLOCK_H: tl.constexpr, BLOCK_X: tl.constexpr):
    """out[h] = weight[h] . x for every h."""
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        tl.store(out + h, project_one(x, weight, h, H, D, BLOCK_H, BLOCK_X), mask=h < H)


@triton.jit
def project_tiles(
    rows, inside, weight, bias, h0, h1, H, D, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Rows times weight^T plus bias at the hidden units h0 and h1, on tensor cores."""
    c0 = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    c1 = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    for d0 in range(0, D, BLOCK_X):
        d = d0 + tl.arange(0, BLOCK_X)
        x = tl.load(rows[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        at0 = weight + h0.to(tl.int64)[None, :] * D + d[:, None]
        at1 = weight + h1.to(tl.int64)[None, :] * D + d[:, None]
        part0 = tl.load(at0, mask=(d < D)[:, None] & (h0 < H)[None, :], other=0.0)
        part1 = tl.load(at1, mask=(d < D)[:, None] & (h1 < H)[None, :], other=0.0)
        c0 += product(x, part0, PRECISION)
        c1 += product(x, part1, PRECISION)
    if bias is not None:
        c0 += load_row(bias, h0, H)
        c1 += load_row(bias, h1, H)
    return c0, c1


@triton.jit
def hide_rest(scores, row, real, first, last, stop, Tk, BLOCK_K: tl.constexpr):
    """Minus infinity for what a split, ``first`` to ``stop``, has in tiles from ``last`` on."""
    for k0 in range(tl.maximum(first, tl.cdiv(last, BLOCK_K) * BLOCK_K), stop, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        here = real[:, None] & (j < Tk)[None, :]
        tl.store(scores + row[:, None] * Tk + j[None, :], float("-inf"), mask=here)


@triton.jit
def scale_scores(scores, weights, row, most, inverse, real, part, Tk, parts, BLOCK_K: tl.constexpr):
    """Weights from scores: exp(s - most) * inverse. One of ``parts`` that share a row."""
    base = tl.where(most == float("-inf"), 0.0, most)
    for k0 in range(part * BLOCK_K, Tk, parts * BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        at = row[:, None] * Tk + j[None, :]
        here = real[:, None] & (j < Tk)[None, :]
        s = tl.load(scores + at, mask=here, other=float("-inf"))
        tl.store(weights + at, tl.exp(s - base[:, None]) * inverse[:, None], mask=here)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts, maxima, sums, context, scores, weights, Tk, Dv, splits, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Context and weights of one query from the parts of its splits; BLOCK_D features a program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    part = row * splits + s
    highest = tl.load(maxima + part, mask=s < splits, other=float("-inf"))
    most = tl.max(highest, axis=0)
    base = tl.where(most == float("-inf"), 0.0, most)
    factor = tl.exp(highest - base)
    total = tl.sum(factor * tl.load(sums + part, mask=s < splits, other=0.0), axis=0)
    at = parts + part[:, None] * Dv + d[None, :]
    tile = tl.load(at, mask=(s < splits)[:, None] & (d < Dv)[None, :], other=0.0)
    inverse = inverse_of(total)
    tl.store(context + row * Dv + d, tl.sum(factor[:, None] * tile, axis=0) * inverse, mask=d < Dv)
    if scores is not None:
        one, programs = tl.arange(0, 1), tl.maximum(tl.cdiv(Dv, BLOCK_D), 1)
        scale_scores(
            scores, weights, row + one, most + one, inverse + one, one == 0, tl.program_id(1), Tk,
            programs, 512,
        )  # fmt: skip
