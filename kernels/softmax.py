"""Masked softmax of scores and the weighted sum of the values, for many queries.

Roof: reading scores and values, writing weights and context; little against the scores themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import product
from .masking import finite, inverse_of, load_valid_len, raise_maximum, seen_keys, survivors
from .tiles import RUN, VARYING, load_stored, program_blocks, store_tile


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
    valid_len = load_valid_len(lens, lengths, Tk, real)
    if counts is not None:
        if d0 == 0:
            tl.store(counts + b * counts_row + i, valid_len, mask=i < counts_row)
    seen_rows = b * mask_batch + i.to(tl.int64) * mask_row
    # A row without valid keys is uniform over all keys: every score is zero.
    end = tl.where(real, tl.where(valid_len > 0, valid_len, Tk), 0)
    longest = tl.max(end, axis=0)
    most, total = maximum_and_total(
        scores, mask, row, seen_rows, mask_key, valid_len, end, Tk, splits, BLOCK_K
    )
    inverse = inverse_of(tl.where(real, total, 1.0))
    d = d0 + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    run = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for k0 in range(0, longest, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        s = masked_scores(scores, mask, row, seen_rows, mask_key, j, valid_len, end, Tk, splits)
        p = tl.exp(s - most[:, None]) * inverse[:, None]
        if weights is not None:
            if d0 == 0:
                store_tile(weights + row * Tk, real, j, Tk, p)
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row[:, None], j[None, :])
        if dropped is not None:
            store_tile(dropped + row * Tk, real, j, Tk, p)
        if context is not None:
            weighed = tl.max((s > float("-inf")).to(tl.int32), axis=0) > 0
            v = load_stored(values + b * v_batch + j.to(tl.int64) * v_row, weighed, d, Dv)
            sums, run = add_product(sums, run, p, v, k0 % (4 * BLOCK_K) == 3 * BLOCK_K, PRECISION)
    if context is not None:
        store_tile(context + row * Dv, real, d, Dv, sums + run)
    if weights is not None:
        if d0 == 0:
            for k0 in range(tl.cdiv(longest, BLOCK_K) * BLOCK_K, Tk, BLOCK_K):
                store_tile(weights + row * Tk, real, k0 + tl.arange(0, BLOCK_K), Tk, 0.0)


@triton.jit
def add_product(sums, run, p, v, full, PRECISION: tl.constexpr):
    """Adds p @ v to sums; of fp32, which adds up key by key, to a run of them until it is full."""
    if v.dtype == tl.float32:
        run += product(p, v, PRECISION)
        sums += tl.where(full, run, 0.0)
        run = tl.where(full, 0.0, run)
    else:
        sums += product(p, v, PRECISION)
    return sums, run


@triton.jit
def maximum_and_total(
    scores, mask, row, seen_rows, mask_key, valid_len, end, Tk, splits, BLOCK_K: tl.constexpr
):
    """The largest score of rows, zero where no key is seen, and the sum of exponentials."""
    longest = tl.max(end, axis=0)
    most = tl.full([row.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    for first in range(0, longest, RUN * BLOCK_K):
        run = tl.zeros([row.shape[0]], tl.float32)
        for k0 in range(first, tl.minimum(longest, first + RUN * BLOCK_K), BLOCK_K):
            j = k0 + tl.arange(0, BLOCK_K)
            s = masked_scores(scores, mask, row, seen_rows, mask_key, j, valid_len, end, Tk, splits)
            most, base, decay = raise_maximum(most, s, 1)
            total *= decay
            run = run * decay + tl.sum(tl.exp(s - base[:, None]), axis=1)
        total += run
    return finite(most), total


@triton.jit
def masked_scores(scores, mask, row, seen_rows, mask_key, j, valid_len, end, Tk, splits):
    """(rows,keys) scores: -inf where a row does not look, zero in a row without valid keys."""
    within, empty = j[None, :] < end[:, None], (valid_len == 0)[:, None]
    offsets = seen_rows[:, None] + j.to(tl.int64)[None, :] * mask_key
    seen = seen_keys(mask, offsets, within & ~empty)
    s = tl.zeros([row.shape[0], j.shape[0]], tl.float32)
    for split in range(splits):
        at = scores + (row * splits + split)[:, None] * Tk + j[None, :]
        s += tl.load(at, mask=seen, other=0.0)
    return tl.where(seen | (within & empty), s, float("-inf"))
