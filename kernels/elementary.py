"""Functions that the kernels share: tanh by reciprocals, lengths, dropout.

Sizes: B batch, Tq queries, Tk keys, H hidden units, Dv features of a value. Sums are fp32.
``NATIVE`` allows NVIDIA instructions; without it the code is plain Triton, as the interpreter and
other GPUs need it.

Tanh is ``tanh(z) = 1 - 2 r`` with ``r = 1 / (1 + exp(2 z))``. Several elements share one
reciprocal, ``w0/x0 + w1/x1 = (w0 x1 + w1 x0) / (x0 x1)``, and where ``z = a + c`` stays small
``exp(2 z)`` is the product of ``exp(2 a)`` and ``exp(2 c)``, computed once per query and per key.
Near zero ``1 - 2 r`` loses relative precision; if every ``|c|`` is small, fp32 uses
``tanh(z) = (tanh(a) + tanh(c)) / (1 + tanh(a) tanh(c))`` instead, from the tanh of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

TWO_LOG2_E = tl.constexpr(2.8853900817779268)
# Products of four denominators 1 + 2^x, or of two, stay below 2^127 for x up to these.
LARGEST = tl.constexpr(31.0)
# |c| up to which 1 + tanh(a) tanh(c) is at least 0.24, whatever a is.
SMALL = tl.constexpr(1.0)
# Activations, by their places in bahdanau_fast.checks.
TANH, RELU = tl.constexpr(0), tl.constexpr(1)
# |a| + |c| up to which exp(2 a) exp(2 c) keeps to them: x log(2) / 2.
NEAR_FOUR, NEAR_TWO = tl.constexpr(10.7), tl.constexpr(21.4)


@triton.jit
def exp_twice(x):
    """exp(2 x), to an ulp for |x| <= 43, held there, as 2^n exp(2 r) with |r| at most log(2) / 4.

    NVIDIA's exp2 may be off by four times that much, which all scores of a row would have in them.
    """
    x = tl.minimum(tl.maximum(x, -43.0), 43.0)
    n = tl.floor(x * TWO_LOG2_E + 0.5)
    r = (x - n * 0.346572876) - n * 7.143034e-7
    p = r * 0.0884116516 + 0.267803222
    p = p * r + 0.666694403
    p = p * r + 1.33332157
    p = p * r + 1.99999976
    p = (p * r + 2.0) * r + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(total):
    """1 / total, rounded once: its error is in all weights of a row."""
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def weigh_difference(weight, x, mean):
    """Weight * (x - mean).

    The difference itself, of one mean and many x of a size, would be rounded to the same side for
    all of them, which adds up over a row.
    """
    return weight * x - weight * mean


@triton.jit
def reciprocal(x, NATIVE: tl.constexpr):
    """1 / x, for x of ordinary size."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def held(exponent):
    """2^exponent, held at 2^31 where tanh is one, so that a few can be multiplied."""
    return tl.exp2(tl.minimum(exponent, LARGEST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def sum_of_four(x0, x1, x2, x3, w0, w1, w2, w3, NATIVE: tl.constexpr):
    """w0/x0 + w1/x1 + w2/x2 + w3/x3 with one reciprocal."""
    lower = x0 * x1
    upper = x2 * x3
    weighted = (w0 * x1 + w1 * x0) * upper + (w2 * x3 + w3 * x2) * lower
    return weighted * reciprocal(lower * upper, NATIVE)


@triton.jit
def four_of(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every fourth column from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, ROWS, COLUMNS // 2, 2))
    x0, x2 = tl.split(tl.reshape(even, ROWS, COLUMNS // 4, 2))
    x1, x3 = tl.split(tl.reshape(odd, ROWS, COLUMNS // 4, 2))
    return x0, x1, x2, x3


@triton.jit
def two_slopes(e0, e1, NATIVE: tl.constexpr):
    """Tanh and its slope of both, from exp(2 z), with one reciprocal.

    The slope is 4 e / (1 + e)^2: where tanh is one, 1 - tanh^2 would be a rounding, and not zero.
    """
    x0, x1 = e0 + 1.0, e1 + 1.0
    shared = reciprocal(x0 * x1, NATIVE)
    r0, r1 = shared * x1, shared * x0
    return 1.0 - 2.0 * r0, 1.0 - 2.0 * r1, 4.0 * e0 * (r0 * r0), 4.0 * e1 * (r1 * r1)


@triton.jit
def slope_of(e, NATIVE: tl.constexpr):
    """The slope of tanh from what `exp_twice` gives; zero where that is held."""
    r = reciprocal(1.0 + e, NATIVE)
    return 4.0 * tl.where(e < 1e-36, 0.0, e) * r * r


@triton.jit
def two_sums(t0, t1, u0, u1, u_slope0, u_slope1, NATIVE: tl.constexpr):
    """Tanh of two sums and its slopes from tanh of the terms, with one reciprocal.

    The slope is that of both terms over (1 + t u)^2. Of u, whose tanh may be nearly one, it is
    given: from that tanh it would be a rounding.
    """
    x0, x1 = t0 * u0 + 1.0, t1 * u1 + 1.0
    shared = reciprocal(x0 * x1, NATIVE)
    sum0, sum1 = (t0 + u0) * (shared * x1), (t1 + u1) * (shared * x0)
    slope0 = (1.0 - t0 * t0) * u_slope0
    slope1 = (1.0 - t1 * t1) * u_slope1
    r0, r1 = shared * x1, shared * x0
    return sum0, sum1, slope0 * (r0 * r0), slope1 * (r1 * r1)


@triton.jit
def tanh_precise(z):
    """Tanh to about one rounding of fp32, near zero too."""
    e = tl.exp(-2.0 * tl.abs(z))
    away = (1.0 - e) / (1.0 + e)
    away = tl.where(z < 0, -away, away)
    # A polynomial in z^2, fitted to tanh(z) / z over |z| <= 0.6: largest error 3e-9 of it.
    y = z * z
    p = -0.00590588 * y + 0.02080539
    p = p * y - 0.05378669
    p = p * y + 0.13331958
    p = p * y - 0.33333299
    return tl.where(y < 0.36, z + z * (p * y), away)


@triton.jit
def rectified(z, slope, ACTIVATION: tl.constexpr):
    """ReLU of z, or leaky ReLU; NaN of NaN."""
    return tl.where(z <= 0.0, 0.0 if ACTIVATION == RELU else slope * z, z)


@triton.jit
def tanh_direct(z, NATIVE: tl.constexpr):
    """Tanh for any magnitude, to 2e-6 of it: 1 - 2 r, or z - z^3 / 3 near zero."""
    return near_zero(z, 1.0 - 2.0 * reciprocal(1.0 + held(z * TWO_LOG2_E), NATIVE))


@triton.jit
def near_zero(z, away):
    """Tanh of z: near zero by its series, else ``away``, which has the rounding of a one."""
    return tl.where(tl.abs(z) < 0.04, z - z * z * z * 0.333333333, away)


@triton.jit
def with_slope(z, slope, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """The activation of z and its slope, for any magnitude."""
    if ACTIVATION != TANH:
        t = rectified(z, slope, ACTIVATION)
        u = tl.where(z > 0.0, 1.0, 0.0 if ACTIVATION == RELU else slope)
    else:
        e = tl.exp2(tl.abs(z) * -TWO_LOG2_E)
        r = reciprocal(1.0 + e, NATIVE)
        u = 4.0 * e * (r * r)  # where tanh is one, 1 - tanh^2 would be a rounding
        if PRECISE:
            t = tanh_precise(z)
            u = tl.where(e < 0.125, u, 1.0 - t * t)
        else:
            t = r - e * r
            t = near_zero(z, tl.where(z < 0.0, -t, t))
    return t, u


@triton.jit
def kept_keys(lens, offset, Tk, real=None):
    """Number of valid keys for a length, 0 to Tk; Tk without lengths."""
    if lens is None:
        kept = Tk + (offset * 0).to(tl.int32)
    else:
        length = tl.load(lens + offset, mask=real)
        if length.dtype.is_floating():
            length = tl.ceil(length.to(tl.float64))
            kept = tl.where(length > 0, tl.minimum(length, Tk * 1.0), 0.0)  # NaN: no key
        else:
            length = length.to(tl.int64)
            kept = tl.where(length > 0, tl.minimum(length, Tk), 0)
    return kept.to(tl.int32)


@triton.jit
def rows_and_others(r, R, O, kept, offset, ROWS_ARE_KEYS: tl.constexpr):
    """Which rows there are, and how many others, where the length bounds the keys of the two."""
    inside = r < R
    if ROWS_ARE_KEYS:
        inside = r < kept_keys(kept, offset, R)
        last = tl.where(tl.max(inside.to(tl.int32), axis=0) > 0, O, 0)
    else:
        last = kept_keys(kept, offset, O)
    return inside, last


@triton.jit
def seen_keys(mask, rows, keys, mask_key, there):
    """Of the pairs of queries and keys that are ``there``, those that a mask shows; else all."""
    if mask is not None:
        at = mask + rows[:, None] + keys.to(tl.int64)[None, :] * mask_key
        there &= tl.load(at, mask=there, other=0) != 0
    return there


@triton.jit
def last_seen(mask, rows, mask_key, first, end, BLOCK_K: tl.constexpr):
    """One past the last key that a mask shows, from ``first`` to the row's end; 0 for none."""
    found = end * 0
    for k0 in range(first, tl.max(end, axis=0), BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        seen = seen_keys(mask, rows, j, mask_key, j[None, :] < end[:, None])
        found = tl.maximum(found, tl.max(tl.where(seen, j[None, :] + 1, 0), axis=1))
    return found


@triton.jit
def within_split(
    lens, lengths, mask, seen_rows, mask_key, first, stop, Tk, real, BLOCK_K: tl.constexpr
):
    """Of the real queries, which see no key at all, and where the keys end that they look at.

    Those of a split, from ``first`` to ``stop``. A query that sees none is uniform over all keys.
    """
    kept = tl.where(real, kept_keys(lens, lengths, Tk, real), 0)
    end = kept
    if mask is not None:
        end = last_seen(mask, seen_rows, mask_key, first, tl.minimum(kept, stop), BLOCK_K)
        if tl.min(tl.where(real, end, 1), axis=0) == 0:  # there may be some in other splits
            kept = last_seen(mask, seen_rows, mask_key, 0, kept, BLOCK_K)
    empty = real & (kept == 0)
    return empty, tl.where(empty, Tk, end)


@triton.jit
def survivors(seed, threshold, scale_bits, row, keys):
    """Factor of each weight under dropout, as csrc/common/philox.h draws it: 0 or 1 / (1 - p).

    The number of weight (row, j) is lane j % 4 of the Philox block with the counter
    (j / 4, row low, row high, 0); from ``threshold`` = p 2^32 on it survives. ``scale_bits`` are
    those of 1 / (1 - p) in fp64, which Triton would hand over in fp32.
    """
    zero = (row + keys) * 0
    lane0, lane1, lane2, lane3 = tl.philox(
        tl.load(seed),
        (zero + keys // 4).to(tl.uint32),
        ((zero + row) & 0xFFFFFFFF).to(tl.uint32),
        ((zero + row) >> 32).to(tl.uint32),
        zero.to(tl.uint32),
    )
    lane = keys % 4 + zero
    lower = tl.where(lane == 0, lane0, lane1)
    upper = tl.where(lane == 2, lane2, lane3)
    number = tl.where(lane < 2, lower, upper).to(tl.uint32).to(tl.int64)
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.where(number >= threshold, scale, 0.0)
