"""Masked softmax of scores and the weighted sum of the values, for many queries.

Roof: reading scores and values, writing weights and context; little against the scores themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import inverse_of, kept_keys, last_seen, seen_keys, survivors
from .products import product
from .tiles import RUN, VARYING, program_blocks


@triton.jit(do_not_specialize=VARYING)
def softmax_kernel(
    scores, values, weights, dropped, context, Tq, Tk, Dv, v_batch, v_row, lens, lens_batch,
    lens_row, mask, mask_batch, mask_row, mask_key, seed, threshold, scale_bits, counts, counts_row,
    splits, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Weights = softmax(scores) over the valid keys, context = dropout(weights) @ values.

    Scores (B,Tq,splits,Tk) are the sums of their splits. Weights go to ``dropped`` (B,Tq,Tk) too,
    after dropout and in its type, for a library to multiply; those, or the context, may be None.

    Lengths go to the last key that the mask shows, if there is one; see `lengths_kernel`. Without
    one they are written to ``counts`` (B,counts_row), unless that is None.
    One program: BLOCK_Q queries, BLOCK_D features. The first features' program writes the weights.
    """
    feature_blocks = tl.maximum(tl.cdiv(Dv, BLOCK_D), 1)
    feature_block, query_block, b = program_blocks(feature_blocks, tl.cdiv(Tq, BLOCK_Q))
    d0 = feature_block * BLOCK_D
    i = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = b * Tq + i
    real = i < Tq
    lengths = b * lens_batch + i.to(tl.int64) * lens_row
    kept = kept_keys(lens, lengths, Tk, real)
    if counts is not None:
        if d0 == 0:
            tl.store(counts + b * counts_row + i, kept, mask=i < counts_row)
    seen_rows = b * mask_batch + i.to(tl.int64) * mask_row
    # A row without valid keys is uniform over all keys: every score is zero.
    end = tl.where(real, tl.where(kept > 0, kept, Tk), 0)
    longest = tl.max(end, axis=0)

    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(0, longest, RUN * BLOCK_K):
        run = tl.zeros([BLOCK_Q], tl.float32)
        for k0 in range(first, tl.minimum(longest, first + RUN * BLOCK_K), BLOCK_K):
            s = masked_scores(
                scores, mask, row, seen_rows, mask_key, k0, kept, end, Tk, splits, BLOCK_K
            )
            higher = tl.maximum(most, tl.max(s, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp(most - base)
            total *= decay
            run = run * decay + tl.sum(tl.exp(s - base[:, None]), axis=1)
            most = higher
        total += run
    most = tl.where(most == float("-inf"), 0.0, most)
    inverse = inverse_of(tl.where(real, total, 1.0))

    d = d0 + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    run = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for k0 in range(0, longest, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        s = masked_scores(
            scores, mask, row, seen_rows, mask_key, k0, kept, end, Tk, splits, BLOCK_K
        )
        p = tl.exp(s - most[:, None]) * inverse[:, None]
        if weights is not None:
            if d0 == 0:
                here = real[:, None] & (j < Tk)[None, :]
                tl.store(weights + row[:, None] * Tk + j[None, :], p, mask=here)
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row[:, None], j[None, :])
        if dropped is not None:
            here = real[:, None] & (j < Tk)[None, :]
            tl.store(dropped + row[:, None] * Tk + j[None, :], p, mask=here)
        if context is not None:
            weighed = tl.max((s > float("-inf")).to(tl.int32), axis=0) > 0
            v = tl.load(
                values + b * v_batch + j.to(tl.int64)[:, None] * v_row + d[None, :],
                mask=weighed[:, None] & (d < Dv)[None, :],
                other=0.0,
            )
            if values.dtype.element_ty == tl.float32:  # adds up BLOCK_K of them one after the other
                run += product(p, v, PRECISION)
                full = k0 % (4 * BLOCK_K) == 3 * BLOCK_K
                sums += tl.where(full, run, 0.0)
                run = tl.where(full, 0.0, run)
            else:
                sums += product(p, v, PRECISION)
    if context is not None:
        out = context + row[:, None] * Dv + d[None, :]
        tl.store(out, sums + run, mask=real[:, None] & (d < Dv)[None, :])
    if weights is not None:
        if d0 == 0:
            for k0 in range(tl.cdiv(longest, BLOCK_K) * BLOCK_K, Tk, BLOCK_K):
                j = k0 + tl.arange(0, BLOCK_K)
                here = real[:, None] & (j < Tk)[None, :]
                tl.store(weights + row[:, None] * Tk + j[None, :], 0.0, mask=here)


@triton.jit
def masked_scores(
    scores, mask, row, seen_rows, mask_key, k0, kept, end, Tk, splits, BLOCK_K: tl.constexpr
):
    """(rows,BLOCK_K) scores: -inf where a row does not look, zero in a row without valid keys."""
    j = k0 + tl.arange(0, BLOCK_K)
    within, empty = j[None, :] < end[:, None], (kept == 0)[:, None]
    seen = seen_keys(mask, seen_rows, j, mask_key, within & ~empty)
    s = tl.zeros([row.shape[0], BLOCK_K], tl.float32)
    for split in range(splits):
        at = scores + (row * splits + split)[:, None] * Tk + j[None, :]
        s += tl.load(at, mask=seen, other=0.0)
    return tl.where(seen | (within & empty), s, float("-inf"))


@triton.jit(do_not_specialize=VARYING)
def lengths_kernel(
    out, rows, Tk, lens, lens_batch, lens_row, mask, mask_batch, mask_row, mask_key,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Lengths (B,rows) up to the last key that the mask shows, of those within the lengths given.

    One program: a row.
    """
    i, _, b = program_blocks(rows, 1)
    one = tl.arange(0, 1)
    kept = kept_keys(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk) + one
    seen_row = b * mask_batch + i.to(tl.int64) * mask_row + one
    length = last_seen(mask, seen_row, mask_key, 0, kept, BLOCK_K)
    tl.store(out + b * rows + i + one, length)
