"""Rows and tiles: loading and storing them, and tables of their exponentials."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import exp_twice, largest_of, tanh_precise

# Numbers by which no kernel is compiled anew.
VARYING = [
    "Tq", "Tk", "rows", "splits", "split_keys", "parts", "w_rows", "g_batch", "g_row", "gw_batch",
    "gw_row", "lens_batch", "lens_row", "mask_batch", "mask_row", "threshold", "scale_bits",
    "counts_row", "padded",
]  # fmt: skip
# Turns of a loop after which its sum goes to another one: roundings grow with a sum.
RUN = tl.constexpr(32)


@triton.jit
def program_blocks(first_blocks, second_blocks):
    """The block on both axes, and the batch row in 64 bits: a division of those would be a call."""
    program = tl.program_id(0)
    rest = program // first_blocks
    b = (rest // second_blocks).to(tl.int64)
    return program % first_blocks, rest % second_blocks, b


@triton.jit
def load_at(x, mask):
    """Numbers at pointers, in fp32; zero outside the mask."""
    return tl.load(x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_row(x, h, H):
    """x[h] of one row as (1,BLOCK_H), zero past its end."""
    return load_at(x + h, h < H)[None, :]


@triton.jit
def load_stored(rows, inside, h, H, other=0.0):
    """The same of several rows, (BLOCK,BLOCK_H), as they are stored; ``other`` outside."""
    mask = inside[:, None] & (h < H)[None, :]
    return tl.load(rows[:, None] + h[None, :], mask=mask, other=other)


@triton.jit
def load_tile(rows, inside, h, H):
    """Several rows, (BLOCK,BLOCK_H), in fp32; zero outside."""
    return load_stored(rows, inside, h, H).to(tl.float32)


@triton.jit
def store_sum(x, h, H, tile, factor=None):
    """Write the sum of a tile's rows, times a (1,BLOCK_H) factor, as far as it goes."""
    total = tl.sum(tile, axis=0)[None, :]
    if factor is not None:
        total *= factor
    tl.store((x + h)[None, :], total, mask=(h < H)[None, :])


@triton.jit
def store_tile(rows, inside, h, H, value):
    """Write a (BLOCK,BLOCK_H) tile as far as it goes."""
    tl.store(rows[:, None] + h[None, :], value, mask=inside[:, None] & (h < H)[None, :])


@triton.jit
def power_of(x):
    """The power of two in max|x| of a tile, 2^-100 to 2^126: division by it does not round."""
    largest = tl.minimum(tl.maximum(largest_of(x), 1e-30), 8.6e37)
    return (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def two_rows(x, h, H):
    """Two neighbouring parts of one row."""
    return load_row(x, h, H), load_row(x, h + h.shape[0], H)


@triton.jit
def two_tiles(rows, inside, h, H):
    """Two neighbouring parts of several rows."""
    return load_tile(rows, inside, h, H), load_tile(rows, inside, h + h.shape[0], H)


@triton.jit
def store_two_tiles(rows, inside, h, H, value0, value1):
    """Write two neighbouring parts of several rows."""
    store_tile(rows, inside, h, H, value0)
    store_tile(rows, inside, h + h.shape[0], H, value1)


@triton.jit(do_not_specialize=["T"])
def tables_kernel(
    x, table, largest, second, T, H, x_batch, x_row, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """table[row] = exp(2 x[row]) in fp32 and largest[row] = max|x[row]|, infinite for NaN.

    From ``second`` on, tanh(x). An entry that is held is in a row whose maximum makes its readers
    take another path.
    """
    block, _, b = program_blocks(tl.cdiv(T, BLOCK_R), 1)
    t = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = t < T
    row = b * T + t
    entries = table + row * H
    source = x + b * x_batch + t.to(tl.int64) * x_row
    most = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        value = load_tile(source, inside, h, H)
        store_tile(entries, inside, h, H, exp_twice(value))
        store_tile(entries + second, inside, h, H, tanh_precise(value))
        most = tl.maximum(most, tl.where(value == value, tl.abs(value), float("inf")))
    tl.store(largest + row, tl.max(most, axis=1), mask=inside)
