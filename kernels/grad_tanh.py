"""Gradients through the activation: a tile of rows stays in registers in a loop over the others.

The score is symmetric in queries and keys, so one kernel computes both gradients: its rows are the
keys and the others the queries, or the reverse. Few queries: grad_step.py.

Roof, per (query, key, hidden unit) and pass: 6 fma-pipe operations and half a reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import (
    NEAR_TWO,
    SMALL,
    rows_and_others,
    slope_of,
    two_slopes,
    two_sums,
    with_slope,
)
from .tiles import (
    RUN,
    largest_of,
    load_row,
    load_tile,
    of_tile,
    program_blocks,
    store_row,
    store_tile,
)


@triton.jit(do_not_specialize=["R", "O", "g_batch", "kept_batch"])
def grad_tanh_kernel(
    rows, others, table, largest, second, w_v, grad_scores, kept, out, w_parts, R, O, H, r_batch,
    r_row, o_batch, o_row, g_batch, g_row, g_other, kept_batch, slope, ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[b,r] = sum_o grad_scores[b,r,o] w_v act'(rows[b,r] + others[b,o]).

    One program: BLOCK_R rows, 2 BLOCK_H hidden units. A length per batch row, the largest of
    its queries, bounds the keys, which are the rows or the others.

    Args:
        rows: (B,R,H), with ``r_batch`` and ``r_row``.
        others: (B,O,H), with ``o_batch`` and ``o_row``.
        table: exp(2 others), (B,O,H) fp32, and from ``second`` on their tanh; or None.
        largest: max|others|, (B,O).
        w_v: (H,).
        grad_scores: (B,R,O) as ``g_batch``, ``g_row``, ``g_other`` lay it.
        kept: (B,) lengths, with ``kept_batch``; or None.
        out: (B,R,H), contiguous; or None, as what follows.
        w_parts: (B,row blocks,H), the program's part of the gradient of w_v.
    """
    row_blocks = tl.cdiv(R, BLOCK_R)
    block, hidden_block, b = program_blocks(row_blocks, tl.cdiv(H, 2 * BLOCK_H))
    h = hidden_block * 2 * BLOCK_H + tl.arange(0, BLOCK_H)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside, last = rows_and_others(r, R, O, kept, b * kept_batch, ROWS_ARE_KEYS)
    row_pointers = rows + b * r_batch + r.to(tl.int64) * r_row
    w0, w1 = load_row(w_v, h, H), load_row(w_v, h + BLOCK_H, H)
    c0 = load_tile(row_pointers, inside, h, H)
    c1 = load_tile(row_pointers, inside, h + BLOCK_H, H)
    if table is not None:
        most = tl.maximum(largest_of(c0), largest_of(c1))
        small = most <= SMALL
        c0, c1 = of_tile(c0, small), of_tile(c1, small)
    zero = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    sum0, sum1 = zero, zero
    w_sum0, w_sum1 = zero, zero
    gradients = grad_scores + b * g_batch + r.to(tl.int64) * g_row
    for first in range(0, last, RUN):
        run0, run1 = zero, zero
        w_run0, w_run1 = zero, zero
        for o in range(first, tl.minimum(last, first + RUN)):
            at = gradients + tl.cast(o, tl.int64) * g_other
            g = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
            other = others + b * o_batch + tl.cast(o, tl.int64) * o_row
            if table is not None:
                # In a small tile any other is valid.
                if small or tl.load(largest + b * O + o) + most <= NEAR_TWO:
                    entries = table + (b * O + o) * H
                    e0, e1 = load_row(entries, h, H), load_row(entries, h + BLOCK_H, H)
                    if small:
                        e0, e1 = slope_of(e0, NATIVE), slope_of(e1, NATIVE)
                        entries += second
                        u0, u1 = load_row(entries, h, H), load_row(entries, h + BLOCK_H, H)
                        t0, t1, s0, s1 = two_sums(c0, c1, u0, u1, e0, e1, NATIVE)
                    else:
                        t0, t1, s0, s1 = two_slopes(c0 * e0, c1 * e1, NATIVE)
                else:
                    r0 = load_tile(row_pointers, inside, h, H)
                    r1 = load_tile(row_pointers, inside, h + BLOCK_H, H)
                    t0, t1, s0, s1 = direct_slopes(
                        other, r0, r1, g, h, H, slope, ACTIVATION, NATIVE, BLOCK_H
                    )
            else:
                t0, t1, s0, s1 = direct_slopes(
                    other, c0, c1, g, h, H, slope, ACTIVATION, NATIVE, BLOCK_H
                )
            s0, s1 = g * s0, g * s1
            run0 += s0
            run1 += s1
            if w_parts is not None:
                w_run0 += g * t0
                w_run1 += g * t1
        sum0 += run0
        sum1 += run1
        if w_parts is not None:
            w_sum0 += w_run0
            w_sum1 += w_run1
    if out is not None:
        target = out + (b * R + r) * H
        store_tile(target, r < R, h, H, sum0 * w0)
        store_tile(target, r < R, h + BLOCK_H, H, sum1 * w1)
    if w_parts is not None:
        part = w_parts + (b * row_blocks + block) * H
        store_row(part, h, H, tl.sum(w_sum0, axis=0)[None, :])
        store_row(part, h + BLOCK_H, H, tl.sum(w_sum1, axis=0)[None, :])


@triton.jit
def direct_slopes(
    other, c0, c1, g, h, H, slope, ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The activation and slopes of rows and one other; zero where there is no gradient."""
    # NaN reaches only the queries that attend to it.
    none = g == 0.0
    z0 = tl.where(none, 0.0, load_row(other, h, H) + c0)
    z1 = tl.where(none, 0.0, load_row(other, h + BLOCK_H, H) + c1)
    t0, s0 = with_slope(z0, slope, ACTIVATION, True, NATIVE)
    t1, s1 = with_slope(z1, slope, ACTIVATION, True, NATIVE)
    return t0, t1, s0, s1
