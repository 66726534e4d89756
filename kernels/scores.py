"""Scores of many queries in fp32, or of ReLU: keys stay in registers in a loop over the queries.

Tanh in 16 bits, where there are tensor cores: rational_terms.py. Roof, per (query, key, hidden
unit): 3.5 fma-pipe operations and a quarter of a reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import NEAR_FOUR, SMALL, TANH, act, largest_of, of_tile, sum_of_four, tanh_precise
from .masking import load_valid_len
from .tiles import VARYING, power_of, program_blocks, two_rows, two_tiles


@triton.jit
def direct_scores(query, key_rows, inside, w_v, h0, H, BLOCK_H: tl.constexpr):
    """Scores of one query and some keys over 4 BLOCK_H units, of tanh; for any magnitude."""
    total = tl.zeros([inside.shape[0]], tl.float32)
    for h1 in range(h0, h0 + 4 * BLOCK_H, 2 * BLOCK_H):
        h = h1 + tl.arange(0, BLOCK_H)
        c0, c1 = two_tiles(key_rows, inside, h, H)
        a0, a1 = two_rows(query, h, H)
        w0, w1 = two_rows(w_v, h, H)
        total += tl.sum(tanh_precise(a0 + c0) * w0 + tanh_precise(a1 + c1) * w1, axis=1)
    return total


@triton.jit
def table_scores(e, c0, c1, c2, c3, w0, w1, w2, w3, small, h, H, NATIVE: tl.constexpr):
    """Scores of tanh of one query and some keys from what is stored of both."""
    e0, e1 = two_rows(e, h, H)
    e2, e3 = two_rows(e, h + 2 * h.shape[0], H)
    x0, x1, x2, x3 = c0 * e0 + 1.0, c1 * e1 + 1.0, c2 * e2 + 1.0, c3 * e3 + 1.0
    if small:
        v0, v1 = w0 * (c0 + e0), w1 * (c1 + e1)
        v2, v3 = w2 * (c2 + e2), w3 * (c3 + e3)
    else:  # of tanh itself: nothing cancels
        v0, v1 = w0 * (c0 * e0 - 1.0), w1 * (c1 * e1 - 1.0)
        v2, v3 = w2 * (c2 * e2 - 1.0), w3 * (c3 * e3 - 1.0)
    return tl.sum(sum_of_four(x0, x1, x2, x3, v0, v1, v2, v3, NATIVE), axis=1)


@triton.jit(do_not_specialize=VARYING)
def scores_kernel(
    queries, query_table, query_max, second, keys, w_v, scores, Tq, Tk, H, q_batch, q_row, k_batch,
    k_row, lens, lens_batch, lens_row, slope, ACTIVATION: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """scores[b,i,j] = w_v . act(queries[b,i] + keys[b,j]), for the valid keys.

    One program: BLOCK_Q queries, BLOCK_K keys. Scores of padded keys are not written.
    """
    key_block, query_block, b = program_blocks(tl.cdiv(Tk, BLOCK_K), tl.cdiv(Tq, BLOCK_Q))
    k0, first = key_block * BLOCK_K, query_block * BLOCK_Q
    i = first + tl.arange(0, BLOCK_Q)
    lengths = b * lens_batch
    valid_len = load_valid_len(lens, lengths + i.to(tl.int64) * lens_row, Tk, i < Tq)
    if k0 >= tl.max(tl.where(i < Tq, valid_len, 0), axis=0):
        return
    j = k0 + tl.arange(0, BLOCK_K)
    inside = j < Tk
    key_rows = keys + b * k_batch + j.to(tl.int64) * k_row
    for h0 in range(0, tl.maximum(H, 1), 4 * BLOCK_H):  # scores of no units are zero
        h = h0 + tl.arange(0, BLOCK_H)
        upper = h + 2 * BLOCK_H
        w0, w1 = two_rows(w_v, h, H)
        w2, w3 = two_rows(w_v, upper, H)
        c0, c1 = two_tiles(key_rows, inside, h, H)
        c2, c3 = two_tiles(key_rows, inside, upper, H)
        if ACTIVATION == TANH:
            most = tl.maximum(largest_of(c0), largest_of(c1))
            most = tl.maximum(most, tl.maximum(largest_of(c2), largest_of(c3)))
            small = most <= SMALL  # any query is valid then
            c0, c1 = of_tile(c0, small), of_tile(c1, small)
            c2, c3 = of_tile(c2, small), of_tile(c3, small)
            power = power_of(tl.abs(w0) + tl.abs(w1) + tl.abs(w2) + tl.abs(w3))  # in fp32's range
            w0, w1, w2, w3 = w0 / power, w1 / power, w2 / power, w3 / power
        for query in range(first, tl.minimum(first + BLOCK_Q, Tq)):
            if k0 < load_valid_len(lens, lengths + tl.cast(query, tl.int64) * lens_row, Tk):
                row = b * Tq + query
                out = scores + row * Tk + j
                before = tl.load(out, mask=inside & (h0 > 0), other=0.0)
                a = queries + b * q_batch + tl.cast(query, tl.int64) * q_row
                if ACTIVATION != TANH:
                    e0, e1 = two_rows(a, h, H)
                    e2, e3 = two_rows(a, upper, H)
                    v0 = w0 * act(c0 + e0, slope, ACTIVATION)
                    v1 = w1 * act(c1 + e1, slope, ACTIVATION)
                    v2 = w2 * act(c2 + e2, slope, ACTIVATION)
                    v3 = w3 * act(c3 + e3, slope, ACTIVATION)
                    part = tl.sum((v0 + v1) + (v2 + v3), axis=1)
                elif small or tl.load(query_max + row) + most <= NEAR_FOUR:
                    e = query_table + row * H + tl.where(small, second, 0)
                    part = table_scores(e, c0, c1, c2, c3, w0, w1, w2, w3, small, h, H, NATIVE)
                    part *= power
                else:
                    part = direct_scores(a, key_rows, inside, w_v, h0, H, BLOCK_H)
                tl.store(out, before + part, mask=inside)
        # The next hidden units add to scores that other threads stored.
        tl.debug_barrier()
