"""Gradients through the activation: a tile of rows stays in registers in a loop over the others.

The score is symmetric in queries and keys, so one kernel computes both gradients: its rows are the
keys and the others the queries, or the reverse. Few queries: grad_step.py.

Roof, per (query, key, hidden unit) and pass: 6 fma-pipe operations and half a reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import NEAR_TWO, SMALL, largest_of, of_tile, reciprocal, with_slope
from .masking import rows_and_others
from .tiles import RUN, load_at, program_blocks, store_sum, store_two_tiles, two_rows, two_tiles


@triton.jit(do_not_specialize=["R", "O", "g_batch", "lens_batch"])
def grad_tanh_kernel(
    rows, others, table, largest, second, w_v, grad_scores, lens, out, w_parts, R, O, H, r_batch,
    r_row, o_batch, o_row, g_batch, g_row, g_other, lens_batch, slope, ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[b,r] = sum_o grad_scores[b,r,o] w_v act'(rows[b,r] + others[b,o]).

    One program: BLOCK_R rows, 2 BLOCK_H hidden units. A length per batch row, the largest of
    its queries, bounds the keys, which are the rows or the others.

    Args:
        rows, others: (B,R,H) and (B,O,H), with the strides of their first dimensions.
        table: exp(2 others), (B,O,H) fp32, and from ``second`` on their tanh; or None.
        largest: max|others|, (B,O).
        grad_scores: (B,R,O) as ``g_batch``, ``g_row``, ``g_other`` lay it.
        lens: (B,), with ``lens_batch``; or None.
        out: (B,R,H), contiguous; or None, as what follows.
        w_parts: (B,row blocks,H), the program's part of the gradient of w_v.
    """
    row_blocks = tl.cdiv(R, BLOCK_R)
    block, hidden_block, b = program_blocks(row_blocks, tl.cdiv(H, 2 * BLOCK_H))
    h = hidden_block * 2 * BLOCK_H + tl.arange(0, BLOCK_H)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside, last = rows_and_others(r, R, O, lens, b * lens_batch, ROWS_ARE_KEYS)
    row_pointers = rows + b * r_batch + r.to(tl.int64) * r_row
    w0, w1 = two_rows(w_v, h, H)
    c0, c1 = two_tiles(row_pointers, inside, h, H)
    if table is not None:
        most = tl.maximum(largest_of(c0), largest_of(c1))
        small = most <= SMALL  # any other is valid then
        c0, c1 = of_tile(c0, small), of_tile(c1, small)
    zero = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    sum0, sum1, w_sum0, w_sum1 = zero, zero, zero, zero
    gradients = grad_scores + b * g_batch + r.to(tl.int64) * g_row
    for first in range(0, last, RUN):
        run0, run1, w_run0, w_run1 = zero, zero, zero, zero
        for o in range(first, tl.minimum(last, first + RUN)):
            g = load_at(gradients + tl.cast(o, tl.int64) * g_other, inside)[:, None]
            other = others + b * o_batch + tl.cast(o, tl.int64) * o_row
            if table is None:
                t0, t1, s0, s1 = direct_slopes(other, c0, c1, g, h, H, slope, ACTIVATION, NATIVE)
            elif small or tl.load(largest + b * O + o) + most <= NEAR_TWO:
                e = table + (b * O + o) * H
                t0, t1, s0, s1 = table_slopes(e, second, c0, c1, small, h, H, NATIVE)
            else:
                r0, r1 = two_tiles(row_pointers, inside, h, H)
                t0, t1, s0, s1 = direct_slopes(other, r0, r1, g, h, H, slope, ACTIVATION, NATIVE)
            run0, run1 = run0 + g * s0, run1 + g * s1
            if w_parts is not None:
                w_run0, w_run1 = w_run0 + g * t0, w_run1 + g * t1
        sum0, sum1 = sum0 + run0, sum1 + run1
        if w_parts is not None:
            w_sum0, w_sum1 = w_sum0 + w_run0, w_sum1 + w_run1
    if out is not None:
        store_two_tiles(out + (b * R + r) * H, r < R, h, H, sum0 * w0, sum1 * w1)
    if w_parts is not None:
        part = w_parts + (b * row_blocks + block) * H
        store_sum(part, h, H, w_sum0)
        store_sum(part, h + BLOCK_H, H, w_sum1)


@triton.jit
def direct_slopes(other, c0, c1, g, h, H, slope, ACTIVATION: tl.constexpr, NATIVE: tl.constexpr):
    """The activation and slopes of rows and one other, of zero where there is no gradient."""
    a0, a1 = two_rows(other, h, H)
    t0, s0 = with_slope(a0 + c0, g, slope, ACTIVATION, True, NATIVE)
    t1, s1 = with_slope(a1 + c1, g, slope, ACTIVATION, True, NATIVE)
    return t0, t1, s0, s1


@triton.jit
def slope_of(e, NATIVE: tl.constexpr):
    """The slope of tanh from what `exp_twice` gives; zero where that is held."""
    r = reciprocal(1.0 + e, NATIVE)
    return 4.0 * tl.where(e < 1e-36, 0.0, e) * r * r


@triton.jit
def table_slopes(e, second, c0, c1, small, h, H, NATIVE: tl.constexpr):
    """Tanh and slopes of rows and one other from what is stored of both, with one reciprocal.

    Of exp(2 z) the slope is 4 e / (1 + e)^2: where tanh is one, 1 - tanh^2 would be a rounding, and
    not zero. Of tanh of the two, t and u, it is that of both over (1 + t u)^2. The other's, whose
    tanh may be nearly one, is from its exponential: from that tanh it would be a rounding.
    """
    e0, e1 = two_rows(e, h, H)
    if small:
        u0, u1 = two_rows(e + second, h, H)
        r0, r1 = two_reciprocals(c0 * u0 + 1.0, c1 * u1 + 1.0, NATIVE)
        t0, t1 = (c0 + u0) * r0, (c1 + u1) * r1
        s0 = (1.0 - c0 * c0) * slope_of(e0, NATIVE) * (r0 * r0)
        s1 = (1.0 - c1 * c1) * slope_of(e1, NATIVE) * (r1 * r1)
    else:
        z0, z1 = c0 * e0, c1 * e1
        r0, r1 = two_reciprocals(z0 + 1.0, z1 + 1.0, NATIVE)
        t0, t1 = 1.0 - 2.0 * r0, 1.0 - 2.0 * r1
        s0, s1 = 4.0 * z0 * (r0 * r0), 4.0 * z1 * (r1 * r1)
    return t0, t1, s0, s1


@triton.jit
def two_reciprocals(x0, x1, NATIVE: tl.constexpr):
    """1 / x0 and 1 / x1 by one reciprocal."""
    shared = reciprocal(x0 * x1, NATIVE)
    return shared * x1, shared * x0
