"""Scores of many queries in 16 bits, four hidden units a fraction, by products on tensor cores.

With ``e = exp(-2 |x|)`` a projection x has two factors, (e, 1) if it is positive, else (1, e), and
``tanh(a + c) = (a1 c1 - a0 c0) / (a1 c1 + a0 c0)``. So the common denominator of four units is a
sum over the 16 choices of one factor per unit: a product of 16 terms of the query and 16 of the
key. The numerator is the same sum, a choice weighed by ``w0 + w1 + w2 + w3`` with the signs
that it gives them. No summand of a denominator is negative: nothing cancels in it.

Roof, per (query, key, hidden unit): 8 multiplications on tensor cores, an eighth of a reciprocal,
an instruction to add up. Read beside it: a table of 8 bytes for each projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import TWO_LOG2_E, four_of, held, near_zero, product, reciprocal, sum_of
from .masking import load_valid_len
from .tiles import VARYING, load_row, load_stored, power_of, program_blocks, store_tile

# Terms are stored times this, so that fp16 has them to 2^-29 in full, and to 2^-39 in part.
UNIT = tl.constexpr(2.0**15)
# The same of terms in fp32, and what a denominator of two such is at least: less than 2^-26 of it
# vanished with terms below 2^-126.
WIDE_UNIT, LEAST_WIDE = tl.constexpr(2.0**60), tl.constexpr(2.0**-40)


@triton.jit(do_not_specialize=VARYING)
def rational_terms_kernel(
    queries, keys, w_v, q_terms, k_terms, w_terms, w_scale, rows, Tq, Tk, H, quads, q_batch, q_row,
    k_batch, k_row, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Terms of queries and keys, and the weights of choices.

    Args:
        q_terms: (B,quads,Tq,16) in fp16, as ``k_terms``; 4 quads are at least the hidden units.
        w_terms: (quads,16) in fp16, divided by the first of ``w_scale`` (2,), a power of two from
            the largest. The second is the sum of squares of w_v, divided likewise.
        rows: blocks of rows of the queries.
    """
    blocks = tl.cdiv(quads, BLOCK_U)
    program = tl.program_id(0)
    first, block = program % blocks * BLOCK_U, program // blocks
    if block == 0:
        weigh_choices(w_v, w_terms, w_scale, first, H, quads, BLOCK_U)
    elif block <= rows:
        store_terms(
            queries, q_terms, block - 1, first, Tq, H, quads, q_batch, q_row, BLOCK_R, BLOCK_U
        )
    else:
        block -= rows + 1
        store_terms(keys, k_terms, block, first, Tk, H, quads, k_batch, k_row, BLOCK_R, BLOCK_U)


@triton.jit
def rational_terms(value, scale, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Terms of projections (ROWS,4 UNITS), times a scale: (ROWS,UNITS,16) in fp32."""
    small = tl.exp2(tl.minimum(value * TWO_LOG2_E, value * -TWO_LOG2_E))
    below = four_of(tl.where(value > 0.0, small, 1.0), ROWS, 4 * UNITS)
    above = four_of(tl.where(value > 0.0, 1.0, small), ROWS, 4 * UNITS)
    choice = tl.arange(0, 16)[None, None, :]
    term = tl.full([ROWS, UNITS, 16], scale, tl.float32)
    for n in tl.static_range(4):
        upper = (choice >> n) & 1 == 1
        term *= tl.where(upper, above[n][:, :, None], below[n][:, :, None])
    return term


@triton.jit
def store_terms(
    x, out, block, first, T, H, quads, x_batch, x_row, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr
):
    """Terms of BLOCK_R rows from quad ``first`` on; past the hidden units tanh is one for all."""
    blocks = tl.cdiv(T, BLOCK_R)
    b = (block // blocks).to(tl.int64)
    t = block % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = first * 4 + tl.arange(0, 4 * BLOCK_U)
    rows = x + b * x_batch + t.to(tl.int64) * x_row
    value = load_stored(rows, t < T, h, H, float("inf")).to(tl.float32)
    term = rational_terms(value, UNIT, BLOCK_R, BLOCK_U)
    choice = tl.arange(0, 16)[None, None, :]
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
    power = power_of(tl.minimum(most, 1e30)) * 2.0
    squares = tl.zeros([1, 512], tl.float32)
    for h0 in range(0, H, 512):
        w = load_row(w_v, h0 + tl.arange(0, 512), H) / power
        squares += w * w
    tl.store(scale, power)
    tl.store(scale + 1, sum_of(squares))
    w = load_row(w_v, first * 4 + tl.arange(0, 4 * BLOCK_U), H) / power
    unit_weights = four_of(w, 1, 4 * BLOCK_U)
    choice = tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_U, 16], tl.float32)
    for n in tl.static_range(4):
        w = tl.reshape(unit_weights[n], BLOCK_U, 1)
        total += tl.where((choice >> n) & 1 == 1, w, -w)
    u = first + tl.arange(0, BLOCK_U)[:, None]
    tl.store(out + u * 16 + choice, total.to(tl.float16), mask=u < quads)


@triton.jit
def wide_scores(
    q_rows, k_rows, w_v, power, first, end, H, PRECISION: tl.constexpr, NATIVE: tl.constexpr
):
    """Scores over quads ``first`` to ``end`` over ``power``, and the least denominator, in fp32."""
    BLOCK_Q: tl.constexpr = q_rows.shape[0]
    BLOCK_K: tl.constexpr = k_rows.shape[0]
    choice = tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    least = tl.full([BLOCK_Q, BLOCK_K], float("inf"), tl.float32)
    for h0 in range(4 * first, tl.minimum(4 * end, H), 4):
        h = (h0 + tl.arange(0, 4))[None, :]
        a = tl.load(q_rows[:, None] + h, mask=h < H, other=float("inf")).to(tl.float32)
        c = tl.load(k_rows[:, None] + h, mask=h < H, other=float("inf")).to(tl.float32)
        a = tl.reshape(rational_terms(a, WIDE_UNIT, BLOCK_Q, 1), BLOCK_Q, 16)
        c = tl.trans(tl.reshape(rational_terms(c, WIDE_UNIT, BLOCK_K, 1), BLOCK_K, 16))
        weight = tl.zeros([1, 16], tl.float32)
        for n in tl.static_range(4):
            w = tl.load(w_v + h0 + n, mask=h0 + n < H, other=0.0).to(tl.float32) / power
            weight += tl.where((choice >> n) & 1 == 1, w, -w)
        below = wide_product(a, c, PRECISION)
        total += wide_product(a * weight, c, PRECISION) * reciprocal(below, NATIVE)
        least = tl.minimum(least, below)
    return total, least


@triton.jit
def direct_scores(q_rows, k_rows, w_v, power, first, end, H, NATIVE: tl.constexpr):
    """The same scores, element by element."""
    total = tl.zeros([q_rows.shape[0], k_rows.shape[0]], tl.float32)
    for h in range(4 * first, tl.minimum(4 * end, H)):
        a_h = tl.load(q_rows + h).to(tl.float32)
        c_h = tl.load(k_rows + h).to(tl.float32)
        w = tl.load(w_v + h).to(tl.float32) / power
        z = a_h[:, None] + c_h[None, :]
        away = 1.0 - 2.0 * reciprocal(1.0 + held(z * TWO_LOG2_E), NATIVE)
        total += w * near_zero(z, away)
    return total


@triton.jit
def wide_product(x, y, PRECISION: tl.constexpr):
    """X (M,K) @ y (K,N) of fp32 to 2^-16 of the largest summand, by bf16 on tensor cores."""
    x0, y0 = x.to(tl.bfloat16), y.to(tl.bfloat16)
    x1, y1 = (x - x0.to(tl.float32)).to(tl.bfloat16), (y - y0.to(tl.float32)).to(tl.bfloat16)
    rest = product(x1, y0, PRECISION, product(x0, y1, PRECISION))
    return product(x0, y0, PRECISION, rest)


@triton.jit
def is_accurate(total, least, valid, power, size, share, least_allowed, most, RAW: tl.constexpr):
    """Whether errors of ``share`` of |w_v| and of ``least_allowed`` over ``least`` may stay.

    They are weighed against half of what the scores of a row differ by, or ``most``; NaN may not.
    """
    highest = tl.max(tl.where(valid, total, -float("inf")), axis=1)
    lowest = tl.min(tl.where(valid, total, float("inf")), axis=1)
    spread = 0.5 * tl.max(highest - lowest, axis=0)
    if not RAW:  # a softmax takes differences as they are
        spread = tl.maximum(spread, 1.0 / power)
    spread = tl.minimum(spread, most / power)
    least = tl.min(tl.min(tl.where(valid, least, float("inf")), axis=1), axis=0)
    return (spread * spread >= share * share * size) & (least * spread >= least_allowed)


@triton.jit(do_not_specialize=VARYING)
def rational_scores_kernel(
    queries, keys, w_v, q_terms, k_terms, w_terms, w_scale, scores, Tq, Tk, H, quads, splits,
    q_batch, q_row, k_batch, k_row, lens, lens_batch, lens_row, RAW: tl.constexpr,
    PRECISION: tl.constexpr, NATIVE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """scores[b,i,split,j] = w_v . tanh(queries[b,i] + keys[b,j]) over a split of the hidden units.

    One program: BLOCK_Q queries, BLOCK_K keys. Scores of padded keys may not be written.

    Scores have an error of a rounding in fp16 of |w_v|, and of w_v by 2^-10 over a denominator. In
    eager code it is a rounding of half of what the scores of a row differ by: what is alike in all
    of them does not reach the weights, nor do roundings of ones, unless scores are wanted ``RAW``.
    A tile in which the first may be larger is computed anew.
    """
    column, query_block, b = program_blocks(tl.cdiv(Tk, BLOCK_K) * splits, tl.cdiv(Tq, BLOCK_Q))
    split, k0 = column % splits, column // splits * BLOCK_K
    i, j = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q), k0 + tl.arange(0, BLOCK_K)
    real = i < Tq
    valid_len = load_valid_len(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk, real)
    valid_len = tl.where(real, valid_len, 0)
    if k0 >= tl.max(valid_len, axis=0):
        return
    split_quads = quads // splits
    first, end = split * split_quads, (split + 1) * split_quads
    s = tl.arange(0, 16)
    # Rows past the end read the last one, which costs nothing.
    query, key = tl.minimum(i, Tq - 1), tl.minimum(j, Tk - 1)
    a_at, c_at = query[:, None] * 16 + s[None, :], key[None, :] * 16 + s[:, None]
    a, c = q_terms + (b * quads + first) * Tq * 16, k_terms + (b * quads + first) * Tk * 16
    weight = w_terms + first * 16
    a_step, c_step = tl.cast(Tq, tl.int64) * 32, tl.cast(Tk, tl.int64) * 32
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    least = tl.full([BLOCK_Q, BLOCK_K], float("inf"), tl.float32)
    for _ in tl.range(0, split_quads, 2, num_stages=STAGES):
        a0, a1 = tl.load(a + a_at), tl.load(a + Tq * 16 + a_at)
        c0, c1 = tl.load(c + c_at), tl.load(c + Tk * 16 + c_at)
        d0, n0 = tl.dot(a0, c0), tl.dot(a0 * tl.load(weight + s)[None, :], c0)
        d1, n1 = tl.dot(a1, c1), tl.dot(a1 * tl.load(weight + 16 + s)[None, :], c1)
        total += (n0 * d1 + n1 * d0) * reciprocal(d0 * d1, NATIVE)
        least = tl.minimum(least, tl.minimum(d0, d1))
        a += a_step
        c += c_step
        weight += 32
    valid = real[:, None] & (j[None, :] < valid_len[:, None])
    power, size = tl.load(w_scale), tl.load(w_scale + 1)
    share: tl.constexpr = 2.0**-1 if queries.dtype.element_ty == tl.float16 else 2.0**-4
    most: tl.constexpr = 64.0 * share  # of what a rounding is 2^-5: a weight that is 3 % off
    if not is_accurate(total, least, valid, power, size, share, 2.0 * share, most, RAW):
        q_rows = queries + b * q_batch + query.to(tl.int64) * q_row
        k_rows = keys + b * k_batch + key.to(tl.int64) * k_row
        total, least = wide_scores(q_rows, k_rows, w_v, power, first, end, H, PRECISION, NATIVE)
        if not is_accurate(total, least, valid, power, size, share / 32, LEAST_WIDE, most, RAW):
            total = direct_scores(q_rows, k_rows, w_v, power, first, end, H, NATIVE)
    rows = scores + ((b * Tq + i) * splits + split) * Tk
    store_tile(rows, real, j, Tk, total * power)
