"""Exponentials of projected rows, for the kernels that use each row many times."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import exp_twice, tanh_precise
from .tiles import program_blocks


@triton.jit(do_not_specialize=["T"])
def tables_kernel(
    x, table, largest, second, T, H, x_batch, x_row, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """table[row] = exp(2 x[row]) in fp32 and largest[row] = max|x[row]|; NaN where x has one.

    From ``second`` on, tanh(x).

    An entry that is held is in a row whose maximum makes its readers take another path.
    """
    block, _, b = program_blocks(tl.cdiv(T, BLOCK_R), 1)
    t = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = t < T
    row = b * T + t
    source = x + b * x_batch + t.to(tl.int64) * x_row
    most = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        mask = inside[:, None] & (h < H)[None, :]
        value = tl.load(source[:, None] + h[None, :], mask=mask, other=0.0).to(tl.float32)
        entry = table + row[:, None] * H + h[None, :]
        tl.store(entry, exp_twice(value), mask=mask)
        tl.store(entry + second, tanh_precise(value), mask=mask)
        most = tl.maximum(most, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    # tl.max skips NaN; the sum does not.
    nan = tl.sum(tl.where(most == most, 0, 1), axis=1)
    result = tl.where(nan > 0, float("nan"), tl.max(most, axis=1))
    tl.store(largest + row, result, mask=inside)
