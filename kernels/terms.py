"""Scores of many queries in 16 bits, four hidden units a fraction, by products on tensor cores.

With ``e = exp(-2 |x|)`` a projection x has two factors, (e, 1) if it is positive, else (1, e), and
``tanh(a + c) = (a1 c1 - a0 c0) / (a1 c1 + a0 c0)``. So the common denominator of four units is a
sum over the 16 choices of a factor of each: a product of 16 terms of the query, made once, and 16
of the key. The numerator is the same sum, each choice weighed by ``w0 + w1 + w2 + w3`` with the
signs that it gives them. No summand of a denominator is negative: nothing cancels there.

Roof, per (query, key, hidden unit): 8 multiplications on tensor cores, an eighth of a reciprocal,
an instruction to add up. Read beside it: a table of 8 bytes for each projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import TWO_LOG2_E, four_of, kept_keys, reciprocal, tanh_direct
from .tiles import VARYING, load_row, load_tile, program_blocks

# Terms are stored times this, so that fp16 has them to 2^-29 in full, and to 2^-39 in part.
UNIT = tl.constexpr(32768.0)
# Denominators, of two such, down to which what fp16 drops of their terms is a rounding of the sum.
LEAST = tl.constexpr(2.0)


@triton.jit(do_not_specialize=VARYING)
def terms_kernel(
    queries, keys, w_v, q_terms, k_terms, w_terms, w_scale, rows, Tq, Tk, H, quads, q_batch, q_row,
    k_batch, k_row, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Terms of queries and keys, and the weights of choices.

    Args:
        q_terms: (B,quads,Tq,16) in fp16, as ``k_terms``; 4 quads are at least the hidden units.
        w_terms: (quads,16) in fp16, divided by ``w_scale`` (1,), a power of two from the largest.
        rows: blocks of rows of the queries.
    """
    blocks = tl.cdiv(quads, BLOCK_U)
    program = tl.program_id(0)
    first, block = program % blocks * BLOCK_U, program // blocks
    if block == 0:
        weigh_choices(w_v, w_terms, w_scale, first, H, quads, BLOCK_U)
    elif block <= rows:
        terms_of_rows(
            queries, q_terms, block - 1, first, Tq, H, quads, q_batch, q_row, BLOCK_R, BLOCK_U
        )
    else:
        block -= rows + 1
        terms_of_rows(keys, k_terms, block, first, Tk, H, quads, k_batch, k_row, BLOCK_R, BLOCK_U)


@triton.jit
def terms_of_rows(
    x, out, block, first, T, H, quads, x_batch, x_row, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr
):
    """Terms of BLOCK_R rows from quad ``first`` on; zeros stand past the hidden units."""
    blocks = tl.cdiv(T, BLOCK_R)
    b = (block // blocks).to(tl.int64)
    t = block % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = first * 4 + tl.arange(0, 4 * BLOCK_U)
    value = load_tile(x + b * x_batch + t.to(tl.int64) * x_row, t < T, h, H)
    small = tl.exp2(tl.minimum(value * TWO_LOG2_E, value * -TWO_LOG2_E))
    below = four_of(tl.where(value > 0.0, small, 1.0), BLOCK_R, 4 * BLOCK_U)
    above = four_of(tl.where(value > 0.0, 1.0, small), BLOCK_R, 4 * BLOCK_U)
    choice = tl.arange(0, 16)[None, None, :]
    term = tl.full([BLOCK_R, BLOCK_U, 16], UNIT, tl.float32)
    for n in tl.static_range(4):
        upper = (choice >> n) & 1 == 1
        term *= tl.where(upper, above[n][:, :, None], below[n][:, :, None])
    u = first + tl.arange(0, BLOCK_U)
    at = ((b * quads + u)[None, :, None] * T + t[:, None, None]) * 16 + choice
    inside = (t < T)[:, None, None] & (u < quads)[None, :, None]
    tl.store(out + at, term.to(tl.float16), mask=inside)


@triton.jit
def weigh_choices(w_v, out, scale, first, H, quads, BLOCK_U: tl.constexpr):
    """What weighs each choice: at most one, so that times a term it is in fp16."""
    most = tl.zeros([1, 512], tl.float32)
    for h0 in range(0, H, 512):
        w = load_row(w_v, h0 + tl.arange(0, 512), H)
        most = tl.maximum(most, tl.maximum(w * 4.0, w * -4.0))
    largest = tl.minimum(tl.maximum(tl.max(tl.max(most, axis=1), axis=0), 1e-30), 1e30)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
    tl.store(scale, power)
    of_unit = four_of(
        load_row(w_v, first * 4 + tl.arange(0, 4 * BLOCK_U), H) / power, 1, 4 * BLOCK_U
    )
    choice = tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_U, 16], tl.float32)
    for n in tl.static_range(4):
        w = tl.reshape(of_unit[n], BLOCK_U, 1)
        total += tl.where((choice >> n) & 1 == 1, w, -w)
    u = first + tl.arange(0, BLOCK_U)[:, None]
    tl.store(out + u * 16 + choice, total.to(tl.float16), mask=u < quads)


@triton.jit(do_not_specialize=VARYING)
def terms_scores_kernel(
    queries, keys, w_v, q_terms, k_terms, w_terms, w_scale, scores, Tq, Tk, H, quads, splits,
    q_batch, q_row, k_batch, k_row, lens, lens_batch, lens_row, NATIVE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scores[b,i,split,j] = w_v . tanh(queries[b,i] + keys[b,j]) over a split of the hidden units.

    One program: BLOCK_Q queries, BLOCK_K keys. Scores of padded keys may not be written. A tile is
    computed anew, unit by unit, if a denominator is small, or if the scores are: their error is
    about a rounding in fp16 of terms as large as w_v, eager's is one of the scores.
    """
    column, query_block, b = program_blocks(tl.cdiv(Tk, BLOCK_K) * splits, tl.cdiv(Tq, BLOCK_Q))
    split, k0 = column % splits, column // splits * BLOCK_K
    i, j = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q), k0 + tl.arange(0, BLOCK_K)
    real, inside = i < Tq, j < Tk
    kept = kept_keys(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk, real)
    kept = tl.where(real, kept, 0)
    if k0 >= tl.max(kept, axis=0):
        return
    each = quads // splits
    first = split * each
    s = tl.arange(0, 16)
    # Rows past the end read the last one, which costs nothing.
    a_at = tl.minimum(i, Tq - 1)[:, None] * 16 + s[None, :]
    c_at = tl.minimum(j, Tk - 1)[None, :] * 16 + s[:, None]
    a, c = q_terms + (b * quads + first) * Tq * 16, k_terms + (b * quads + first) * Tk * 16
    weight = w_terms + first * 16
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    least = tl.full([BLOCK_Q, BLOCK_K], float("inf"), tl.float32)
    for _ in tl.range(0, each, 2, num_stages=STAGES):
        a0, a1 = tl.load(a + a_at), tl.load(a + Tq * 16 + a_at)
        c0, c1 = tl.load(c + c_at), tl.load(c + Tk * 16 + c_at)
        d0, n0 = tl.dot(a0, c0), tl.dot(a0 * tl.load(weight + s)[None, :], c0)
        d1, n1 = tl.dot(a1, c1), tl.dot(a1 * tl.load(weight + 16 + s)[None, :], c1)
        total += (n0 * d1 + n1 * d0) * reciprocal(d0 * d1, NATIVE)
        least = tl.minimum(least, tl.minimum(d0, d1))
        a += Tq * 32
        c += Tk * 32
        weight += 32
    there = real[:, None] & (j[None, :] < kept[:, None])
    squares = tl.zeros([64, 16], tl.float32)
    for u0 in range(first, first + each, 64):
        u = u0 + tl.arange(0, 64)[:, None]
        w = tl.load(w_terms + u * 16 + s[None, :], mask=u < first + each, other=0.0).to(tl.float32)
        squares += w * w
    size = tl.sum(tl.sum(squares, axis=1), axis=0) * 0.0625  # of w_v, squared
    most = tl.max(tl.max(tl.where(there, tl.abs(total), 0.0), axis=1), axis=0)
    least = tl.min(tl.min(tl.where(there, least, LEAST), axis=1), axis=0)
    share: tl.constexpr = 0.5 if queries.dtype.element_ty == tl.float16 else 0.0625
    if (least >= LEAST) & (most * most >= share * share * size):
        total *= tl.load(w_scale)
    else:
        total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        query = queries + b * q_batch + i.to(tl.int64) * q_row
        key = keys + b * k_batch + j.to(tl.int64) * k_row
        for h in range(first * 4, tl.minimum((first + each) * 4, H)):
            a_h = tl.load(query + h, mask=real, other=0.0).to(tl.float32)
            c_h = tl.load(key + h, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_v + h).to(tl.float32)
            total += w * tanh_direct(a_h[:, None] + c_h[None, :], NATIVE)
    row = (b * Tq + query_block * BLOCK_Q) * splits + split
    at = tl.arange(0, BLOCK_Q)[:, None] * (splits * Tk) + j[None, :]
    tl.store(scores + row * Tk + at, total, mask=real[:, None] & inside[None, :])
