"""Arithmetic that the kernels share: tanh by reciprocals, products.

Sizes: B batch, Tq queries, Tk keys, H hidden units, Dv features of a value. Sums are fp32.
``NATIVE`` allows NVIDIA instructions, which the interpreter and other GPUs do not have.

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
# Activations, by index in bahdanau_fast.checks.
TANH, RELU, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)
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
def act(z, slope, ACTIVATION: tl.constexpr):
    """ReLU of z, leaky ReLU or sigmoid; NaN of NaN."""
    rectified = tl.where(z <= 0.0, 0.0 if ACTIVATION == RELU else slope * z, z)
    return 1.0 / (1.0 + tl.exp2(z * (-0.5 * TWO_LOG2_E))) if ACTIVATION == SIGMOID else rectified


@triton.jit
def near_zero(z, away):
    """Tanh of z to 2e-6: by its series near zero, else ``away``, which is rounded as a one is."""
    return tl.where(tl.abs(z) < 0.04, z - z * z * z * 0.333333333, away)


@triton.jit
def with_slope(z, g, slope, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """The activation of z and its slope, for any magnitude; of zero where the gradient g is."""
    z = tl.where(g == 0.0, 0.0, z)  # NaN reaches only the queries that attend to it
    if ACTIVATION != TANH:
        t = act(z, slope, ACTIVATION)
        step = tl.where(z > 0.0, 1.0, 0.0 if ACTIVATION == RELU else slope)
        u = t * (1.0 - t) if ACTIVATION == SIGMOID else step
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
def sum_of(x):
    """The sum of a tile: of each row, then of those."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def largest_of(x):
    """max|x| over a tile, infinite where one is NaN: tl.max alone would skip it."""
    return tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), axis=0)


@triton.jit
def of_tile(x, small):
    """The stored form of a tile of projections: exp(2 x), or tanh(x) of a small tile."""
    return tl.where(small, tanh_precise(x), exp_twice(x))


@triton.jit
def product(x, y, PRECISION: tl.constexpr, plus=None):
    """X (M,K) @ y (K,N) in fp32, added to ``plus``: on tensor cores if y has a half type.

    ``PRECISION`` is what tl.dot does with fp32: "ieee", or "tf32" where the user allows it. With
    "fp32" half types are multiplied as fp32, the same products, exactly: in the interpreter, which
    cannot multiply bf16, and where there are no tensor cores for them.
    """
    if PRECISION == "fp32":
        x, y = x.to(y.dtype).to(tl.float32), y.to(tl.float32)
        result = tl.dot(x, y, plus, input_precision="ieee")
    elif y.dtype == tl.float32:
        result = tl.dot(x.to(tl.float32), y, plus, input_precision=PRECISION)
    else:
        result = tl.dot(x.to(y.dtype), y, plus)
    return result
