"""Loading rows and tiles over the hidden units: in parts of BLOCK_H, for shared reciprocals."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import exp_twice, tanh_precise

# Numbers by which no kernel is compiled anew.
VARYING = [
    "Tq", "Tk", "rows", "splits", "split_keys", "parts", "w_rows", "g_batch", "g_row", "gw_batch",
    "gw_row", "lens_batch", "lens_row", "mask_batch", "mask_row", "threshold", "scale_bits",
    "counts_row", "padded",
]  # fmt: skip


# Numbers that are added up one after the other grow, and with them each rounding: after so many
# turns of a loop their sum goes to another one.
RUN = tl.constexpr(32)


@triton.jit
def program_blocks(first_blocks, second_blocks):
    """The block of this program on both axes, and its batch row in 64 bits.

    Divided in 32 bits, since a 64-bit division is a function call.
    """
    program = tl.program_id(0)
    rest = program // first_blocks
    b = (rest // second_blocks).to(tl.int64)
    return program % first_blocks, rest % second_blocks, b


@triton.jit
def load_row(x, h, H):
    """x[h] of one row as (1,BLOCK_H), zero past its end."""
    return tl.load(x + h, mask=h < H, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_tile(rows, inside, h, H):
    """The same of several rows, (BLOCK,BLOCK_H); zero outside."""
    mask = inside[:, None] & (h < H)[None, :]
    return tl.load(rows[:, None] + h[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, h, H, value):
    """Write a (1,BLOCK_H) row as far as it goes."""
    tl.store((x + h)[None, :], value, mask=(h < H)[None, :])


@triton.jit
def store_tile(rows, inside, h, H, value):
    """Write a (BLOCK,BLOCK_H) tile as far as it goes."""
    tl.store(rows[:, None] + h[None, :], value, mask=inside[:, None] & (h < H)[None, :])


@triton.jit
def four_rows(x, h0, H, BLOCK_H: tl.constexpr):
    """Four neighbouring parts of one row."""
    h = h0 + tl.arange(0, BLOCK_H)
    return (
        load_row(x, h, H),
        load_row(x, h + BLOCK_H, H),
        load_row(x, h + 2 * BLOCK_H, H),
        load_row(x, h + 3 * BLOCK_H, H),
    )


@triton.jit
def four_tiles(rows, inside, h0, H, BLOCK_H: tl.constexpr):
    """Four neighbouring parts of several rows."""
    h = h0 + tl.arange(0, BLOCK_H)
    return (
        load_tile(rows, inside, h, H),
        load_tile(rows, inside, h + BLOCK_H, H),
        load_tile(rows, inside, h + 2 * BLOCK_H, H),
        load_tile(rows, inside, h + 3 * BLOCK_H, H),
    )


@triton.jit
def largest_of(x):
    """max|x| over a tile, infinite where one is NaN: tl.max alone would skip it."""
    return tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), axis=0)


@triton.jit
def of_tile(x, small):
    """The stored form of a tile of projections: exp(2 x), or tanh(x) of a small tile."""
    return tl.where(small, tanh_precise(x), exp_twice(x))
