"""What ends a decoder step: weights from scores, and a whole from the parts of splits."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import inverse_of
from .tiles import VARYING


@triton.jit
def scale_scores(scores, weights, row, most, inverse, real, part, Tk, parts, BLOCK_K: tl.constexpr):
    """Weights from scores: exp(s - most) * inverse. One of ``parts`` that share a row."""
    base = tl.where(most == float("-inf"), 0.0, most)
    for k0 in range(part * BLOCK_K, Tk, parts * BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        at = row[:, None] * Tk + j[None, :]
        here = real[:, None] & (j < Tk)[None, :]
        s = tl.load(scores + at, mask=here, other=float("-inf"))
        tl.store(weights + at, tl.exp(s - base[:, None]) * inverse[:, None], mask=here)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    parts, maxima, sums, context, scores, weights, Tk, Dv, splits, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Context and weights of one query from the parts of its splits; BLOCK_D features a program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    part = row * splits + s
    highest = tl.load(maxima + part, mask=s < splits, other=float("-inf"))
    most = tl.max(highest, axis=0)
    base = tl.where(most == float("-inf"), 0.0, most)
    factor = tl.exp(highest - base)
    total = tl.sum(factor * tl.load(sums + part, mask=s < splits, other=0.0), axis=0)
    at = parts + part[:, None] * Dv + d[None, :]
    tile = tl.load(at, mask=(s < splits)[:, None] & (d < Dv)[None, :], other=0.0)
    inverse = inverse_of(total)
    tl.store(context + row * Dv + d, tl.sum(factor[:, None] * tile, axis=0) * inverse, mask=d < Dv)
    if scores is not None:
        one, programs = tl.arange(0, 1), tl.maximum(tl.cdiv(Dv, BLOCK_D), 1)
        scale_scores(
            scores, weights, row + one, most + one, inverse + one, one == 0, tl.program_id(1), Tk,
            programs, 512,
        )  # fmt: skip
