"""Masked softmax of scores and the weighted sum of the values, for many queries.

Roof: reading scores and values, writing weights and context; little against the scores themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import inverse_of, kept_keys, survivors
from .products import product
from .tiles import program_blocks


@triton.jit(do_not_specialize=["Tq", "Tk", "lens_batch", "lens_row", "threshold", "scale_bits"])
def softmax_kernel(
    scores,
    values,
    lens,
    seed,
    weights,
    context,
    Tq,
    Tk,
    Dv,
    v_batch,
    v_row,
    lens_batch,
    lens_row,
    threshold,
    scale_bits,
    HAS_LENS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weights = softmax(scores) over the valid keys, context = dropout(weights) @ values.

    One program: BLOCK_Q queries, BLOCK_D features. The first features' program writes the weights.
    """
    feature_blocks = tl.maximum(tl.cdiv(Dv, BLOCK_D), 1)
    feature_block, query_block, b = program_blocks(feature_blocks, tl.cdiv(Tq, BLOCK_Q))
    d0 = feature_block * BLOCK_D
    i = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = b * Tq + i
    real = i < Tq
    lengths = b * lens_batch + i.to(tl.int64) * lens_row
    kept = tl.where(real, kept_keys(lens, lengths, Tk, HAS_LENS, mask=real), 1)
    # A row without valid keys is uniform over all keys: every score is zero.
    end = tl.where(kept > 0, kept, Tk)
    longest = tl.max(end, axis=0)

    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for k0 in range(0, longest, BLOCK_K):
        s = masked_scores(scores, row, k0, kept, end, real, Tk, BLOCK_K)
        higher = tl.maximum(most, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(s - base[:, None]), axis=1)
        most = higher
    most = tl.where(most == float("-inf"), 0.0, most)
    inverse = inverse_of(total)

    d = d0 + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for k0 in range(0, longest, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        s = masked_scores(scores, row, k0, kept, end, real, Tk, BLOCK_K)
        p = tl.exp(s - most[:, None]) * inverse[:, None]
        if WEIGHTS:
            if d0 == 0:
                here = real[:, None] & (j < Tk)[None, :]
                tl.store(weights + row[:, None] * Tk + j[None, :], p, mask=here)
        if DROPOUT:
            p *= survivors(seed, threshold, scale_bits, row[:, None], j[None, :])
        v = tl.load(
            values + b * v_batch + j.to(tl.int64)[:, None] * v_row + d[None, :],
            mask=(j < longest)[:, None] & (d < Dv)[None, :],
            other=0.0,
        )
        sums += product(p, v, PRECISION)
    out = context + row[:, None] * Dv + d[None, :]
    tl.store(out, sums, mask=real[:, None] & (d < Dv)[None, :])
    if WEIGHTS:
        if d0 == 0:
            for k0 in range(tl.cdiv(longest, BLOCK_K) * BLOCK_K, Tk, BLOCK_K):
                j = k0 + tl.arange(0, BLOCK_K)
                here = real[:, None] & (j < Tk)[None, :]
                tl.store(weights + row[:, None] * Tk + j[None, :], 0.0, mask=here)


@triton.jit
def masked_scores(scores, row, k0, kept, end, real, Tk, BLOCK_K: tl.constexpr):
    """(rows,BLOCK_K) scores: -inf past a row's end, zero in a row without valid keys."""
    j = k0 + tl.arange(0, BLOCK_K)
    there = real[:, None] & (j[None, :] < kept[:, None])
    s = tl.load(scores + row[:, None] * Tk + j[None, :], mask=there, other=0.0).to(tl.float32)
    return tl.where(j[None, :] < end[:, None], s, float("-inf"))
