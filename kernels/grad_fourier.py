"""Gradients through tanh in 16 bits, by products of Fourier sinusoids on tensor cores.

Repeated with a period P, the slope of tanh is a sum of few cosines, and tanh of sines::

    1 - tanh(z)^2 ~ 2 / P   + sum_n c_n cos(n v z),            v = 2 pi / P
    tanh(z)       ~ 2 z / P + sum_n c_n / (n v) sin(n v z),  c_n = 4 a / sinh(a) / P, a = n v pi / 2

as long as ``|z| + 4.8`` stays within P. A cosine of a sum is two products, of cosines and of sines:
so what a row needs of all others are their sinusoids, weighed by the gradients of the scores, a
matrix product. The sinusoids of the row and the factors c_n weigh that.

Roof, per (query, key, hidden unit) and pass: 32 multiplications on tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import TANH, largest_of, product, reciprocal, sum_of, with_slope
from .masking import rows_and_others
from .tiles import load_at, load_row, load_tile, program_blocks, store_sum, store_tile

HARMONICS = tl.constexpr(16)
# What a period has beside the largest |z|, and the largest with which harmonics fall off in time.
MARGIN = tl.constexpr(4.8)
LONGEST_BF16, LONGEST_F16 = tl.constexpr(18.8), tl.constexpr(15.2)
# Of the gradients of scores, weighed by w_v, what a tile of wide projections passes on at least:
# roundings of sinusoids are in what it does not pass on as well.
LEAST = tl.constexpr(2.0**-3)


@triton.jit
def sinusoids(x, period, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Cosines and sines of n 2 pi x / period, (ROWS,UNITS,16); the sine of n = 0 is x itself."""
    quarter = x * (1.5707963267948966 / period)
    y = quarter * quarter
    sine = quarter * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    cosine = 1.0 + y * (-0.5 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 - y * (1 / 3628800)))))
    sine, cosine = double(sine, cosine)
    sine1, cosine1 = double(sine, cosine)
    sine2, cosine2 = double(sine1, cosine1)
    sine4, cosine4 = double(sine2, cosine2)
    sine8, cosine8 = double(sine4, cosine4)
    zero = tl.zeros_like(x)
    cosines, sines = tl.join(zero + 1.0, cosine8), tl.join(zero, sine8)
    cosines, sines = with_rotated(cosines, sines, cosine4, sine4, (ROWS, UNITS, 4))
    cosines, sines = with_rotated(cosines, sines, cosine2, sine2, (ROWS, UNITS, 8))
    cosines, sines = with_rotated(cosines, sines, cosine1, sine1, (ROWS, UNITS, 16))
    return cosines, tl.where(tl.arange(0, HARMONICS)[None, None, :] == 0, x[:, :, None], sines)


@triton.jit
def double(sine, cosine):
    """Sine and cosine of twice the angle."""
    return 2.0 * sine * cosine, 1.0 - 2.0 * sine * sine


@triton.jit
def with_rotated(cosines, sines, cosine, sine, SHAPE: tl.constexpr):
    """Sinusoids, and after every one the same rotated by an angle."""
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    rotated_cosines = cosines * cosine - sines * sine
    rotated_sines = sines * cosine + cosines * sine
    cosines = tl.reshape(tl.join(cosines, rotated_cosines), SHAPE)
    return cosines, tl.reshape(tl.join(sines, rotated_sines), SHAPE)


@triton.jit
def load_others(others, first, last, o_row, h, H, BLOCK_O: tl.constexpr):
    """Others from ``first`` on, (BLOCK_O,BLOCK_H); zeros from ``last`` on."""
    o = first + tl.arange(0, BLOCK_O)
    return load_tile(others + o.to(tl.int64) * o_row, o < last, h, H)


@triton.jit
def load_gradients(
    grads, g_other, r, R, first, O, ROWS_ARE_KEYS: tl.constexpr, BLOCK_O: tl.constexpr
):
    """Gradients of scores, (rows,BLOCK_O). In memory rows of keys go on to a multiple of a tile."""
    o = first + tl.arange(0, BLOCK_O)
    valid = (o < O)[None, :] if ROWS_ARE_KEYS else (r < R)[:, None]
    return tl.load(grads[:, None] + o.to(tl.int64)[None, :] * g_other, mask=valid, other=0.0)


@triton.jit
def load_eight(others, grads, inside, first, last, o_row, g_other, h, H):
    """Eight others, (8,BLOCK_H), and gradients of their scores, (rows,1,8); zeros outside."""
    y, o = load_others(others, first, last, o_row, h, H, 8), first + tl.arange(0, 8)
    at = grads[:, None] + o.to(tl.int64)[None, :] * g_other
    return y, load_at(at, inside[:, None] & (o < last)[None, :])[:, None, :]


@triton.jit
def direct_sums(x, others, grads, inside, last, o_row, g_other, h, H, NATIVE: tl.constexpr):
    """Sums over the others of gradients times slopes, and times tanh, element by element."""
    slope_sums = tl.zeros([x.shape[0], x.shape[1], 8], tl.float32)
    tanh_sums = tl.zeros([x.shape[0], x.shape[1], 8], tl.float32)
    y, g = load_eight(others, grads, inside, 0, last, o_row, g_other, h, H)
    for first in range(0, last, 8):
        t, u = with_slope(x[:, :, None] + tl.trans(y)[None, :, :], g, 0.0, TANH, False, NATIVE)
        slope_sums += g * u
        tanh_sums += g * t
        y, g = load_eight(others, grads, inside, first + 8, last, o_row, g_other, h, H)
    return tl.sum(slope_sums, axis=2), tl.sum(tanh_sums, axis=2)


@triton.jit
def fourier_sums(x, cos_sums, sin_sums, period, TANHS: tl.constexpr, NATIVE: tl.constexpr):
    """The same sums from those of gradients times the others' sinusoids; of tanh only if wanted."""
    cos_sums = tl.reshape(cos_sums, x.shape[0], x.shape[1], HARMONICS)
    sin_sums = tl.reshape(sin_sums, x.shape[0], x.shape[1], HARMONICS)
    cosines, sines = sinusoids(x, period, x.shape[0], x.shape[1])
    n = tl.arange(0, HARMONICS)[None, None, :].to(tl.float32)
    angle = n * (6.283185307179586 / period)
    a = tl.maximum(angle, 1e-6) * 1.5707963267948966
    factor = 8.0 * a * reciprocal((tl.exp(a) - tl.exp(-a)) * period, NATIVE)
    factor = tl.where(n == 0.0, 2.0 / period, factor)
    harmonics = cosines * cos_sums - tl.where(n == 0.0, 0.0, sines) * sin_sums
    slope_sums, tanh_sums = tl.sum(harmonics * factor, axis=2), tl.zeros_like(x)
    if TANHS:
        factor *= tl.where(n == 0.0, 1.0, reciprocal(tl.maximum(angle, 1e-6), NATIVE))
        tanh_sums = tl.sum((sines * cos_sums + cosines * sin_sums) * factor, axis=2)
    return slope_sums, tanh_sums


@triton.jit(do_not_specialize=["R", "O", "lens_batch"])
def grad_fourier_kernel(
    rows, others, w_v, grad_scores, lens, out, w_parts, R, O, H, r_batch, r_row, o_batch, o_row,
    g_batch, g_row, g_other, lens_batch, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
    ROWS_ARE_KEYS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `grad_tanh_kernel`, one program: BLOCK_R rows, BLOCK_H hidden units.

    Gradients of scores are in the type of the rows. A tile is computed element by element if its
    projections are too large, or if tanh is one nearly everywhere: slopes are right to a rounding
    of the largest, which is one.
    """
    row_blocks = tl.cdiv(R, BLOCK_R)
    block, hidden_block, b = program_blocks(row_blocks, tl.cdiv(H, BLOCK_H))
    h = hidden_block * BLOCK_H + tl.arange(0, BLOCK_H)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside, last = rows_and_others(r, R, O, lens, b * lens_batch, ROWS_ARE_KEYS)
    x = load_tile(rows + b * r_batch + r.to(tl.int64) * r_row, inside, h, H)
    w = load_row(w_v, h, H)
    others += b * o_batch
    grads = grad_scores + b * g_batch + r.to(tl.int64) * g_row
    far = tl.zeros([BLOCK_O, BLOCK_H], tl.float32)
    for first in range(0, last, BLOCK_O):
        y = load_others(others, first, last, o_row, h, H, BLOCK_O)
        far = tl.maximum(far, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    most = largest_of(x) + largest_of(far)
    longest: tl.constexpr = LONGEST_F16 if rows.dtype.element_ty == tl.float16 else LONGEST_BF16
    slopes, tanhs = tl.zeros_like(x), tl.zeros_like(x)
    period = most + MARGIN
    accurate = period <= longest
    if accurate:
        cos_sums = tl.zeros([BLOCK_R, BLOCK_H * HARMONICS], tl.float32)
        sin_sums = tl.zeros([BLOCK_R, BLOCK_H * HARMONICS], tl.float32)
        y = load_others(others, 0, last, o_row, h, H, BLOCK_O)
        for first in tl.range(0, last, BLOCK_O, num_stages=STAGES):
            g = load_gradients(grads, g_other, r, R, first, O, ROWS_ARE_KEYS, BLOCK_O)
            cosines, sines = sinusoids(y, period, BLOCK_O, BLOCK_H)
            y = load_others(others, first + BLOCK_O, last, o_row, h, H, BLOCK_O)
            cosines = tl.reshape(cosines, BLOCK_O, BLOCK_H * HARMONICS).to(g.dtype)
            sines = tl.reshape(sines, BLOCK_O, BLOCK_H * HARMONICS).to(g.dtype)
            cos_sums += product(g, cosines, PRECISION)
            sin_sums += product(g, sines, PRECISION)
        slopes, tanhs = fourier_sums(x, cos_sums, sin_sums, period, w_parts is not None, NATIVE)
    if accurate & (most > 3.0):
        squares = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
        for first in range(0, last, BLOCK_O):
            g = load_gradients(grads, g_other, r, R, first, O, ROWS_ARE_KEYS, BLOCK_O)
            squares += g.to(tl.float32) * g.to(tl.float32)
        least = sum_of(squares) * tl.sum(w * w) * (LEAST * LEAST)
        accurate = sum_of(slopes * w * (slopes * w)) > least  # neither zero nor infinite
    if not accurate:
        slopes, tanhs = direct_sums(x, others, grads, inside, last, o_row, g_other, h, H, NATIVE)
    if out is not None:
        store_tile(out + (b * R + r) * H, r < R, h, H, slopes * w)
    if w_parts is not None:
        store_sum(w_parts + (b * row_blocks + block) * H, h, H, tanhs)
