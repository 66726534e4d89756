"""Which keys a query attends to, by length and mask; softmax and dropout over them."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import VARYING, load_at, program_blocks


@triton.jit
def load_valid_len(lens, offset, Tk, real=None):
    """Number of valid keys for a length, 0 to Tk; Tk without lengths."""
    if lens is None:
        valid_len = Tk + (offset * 0).to(tl.int32)
    else:
        length = tl.load(lens + offset, mask=real)
        if length.dtype.is_floating():
            length = tl.ceil(length.to(tl.float64))
        valid_len = tl.where(length > 0, tl.minimum(length, Tk), 0)  # NaN: no key
    return valid_len.to(tl.int32)


@triton.jit
def rows_and_others(r, R, O, lens, offset, ROWS_ARE_KEYS: tl.constexpr):
    """Which rows count, and how many others, where the length bounds the keys of the two."""
    inside = r < R
    if ROWS_ARE_KEYS:
        inside = r < load_valid_len(lens, offset, R)
        last = tl.where(tl.max(inside.to(tl.int32), axis=0) > 0, O, 0)
    else:
        last = load_valid_len(lens, offset, O)
    return inside, last


@triton.jit
def seen_keys(mask, offsets, valid):
    """Of the valid pairs of queries and keys, those that a mask shows at ``offsets``; else all."""
    if mask is not None:
        valid &= tl.load(mask + offsets, mask=valid, other=0) != 0
    return valid


@triton.jit
def last_seen(mask, mask_key, first, end, BLOCK_K: tl.constexpr):
    """One past the last key that a query's mask shows, from ``first`` to ``end``; 0 for none."""
    last = end * 0
    for k0 in range(first, end, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        seen = seen_keys(mask, j.to(tl.int64) * mask_key, j < end)
        last = tl.maximum(last, tl.max(tl.where(seen, j + 1, 0), axis=0))
    return last


@triton.jit
def finite(most):
    """The largest score; zero where no key is seen."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def raise_maximum(most, s, AXIS: tl.constexpr):
    """The largest score with those of a tile, that or zero, and what scales earlier sums."""
    higher = tl.maximum(most, tl.max(s, axis=AXIS))
    base = finite(higher)
    return higher, base, tl.exp(most - base)


@triton.jit
def inverse_of(total):
    """1 / total, rounded once: its error is in all weights of a row."""
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def softmax_gradients(weights, g, mean, inverse, inside, seen, ROUNDED: tl.constexpr):
    """Gradients of seen scores, weight * (g - mean), from those of weights: see `grad_step`.

    Of many g of a size that difference would round to one side in a row.
    """
    p = load_at(weights, inside)
    if ROUNDED:
        p *= inverse
    return tl.where(seen, p * g - p * mean, 0.0)


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


@triton.jit(do_not_specialize=VARYING)
def lengths_kernel(
    out, rows, Tk, lens, lens_batch, lens_row, mask, mask_batch, mask_row, mask_key,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Lengths (B,rows) up to the last key that the mask shows, within ``lens``."""
    i, _, b = program_blocks(rows, 1)
    valid_len = load_valid_len(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk)
    mask += b * mask_batch + i.to(tl.int64) * mask_row
    tl.store(out + b * rows + i, last_seen(mask, mask_key, 0, valid_len, BLOCK_K))
