"""Gradients of the weights, the scores and the values.

Roof: bytes of values, gradients and (B,Tq,Tk) weights; the tanh is in `grad_tanh`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import product
from .masking import load_valid_len, seen_keys, softmax_gradients, survivors
from .tiles import VARYING, load_at, load_stored, program_blocks, store_tile


@triton.jit(do_not_specialize=VARYING)
def grad_weights_kernel(
    values, grad_context, grad_weights, out, Tq, Tk, Dv, v_batch, v_row, gc_batch, gc_row, gw_batch,
    gw_row, lens, lens_batch, lens_row, mask, mask_batch, mask_row, mask_key, seed, threshold,
    scale_bits, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Out = dropout(grad_context @ values^T) + grad_weights at valid keys, zero at masked ones."""
    key_block, query_block, b = program_blocks(tl.cdiv(Tk, BLOCK_K), tl.cdiv(Tq, BLOCK_Q))
    j = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
    i = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = i < Tq
    lengths = b * lens_batch + i.to(tl.int64) * lens_row
    valid_len = tl.where(real, load_valid_len(lens, lengths, Tk, real), 0)
    if tl.min(j, axis=0) >= tl.max(valid_len, axis=0):
        return
    row = b * Tq + i
    valid = real[:, None] & (j[None, :] < valid_len[:, None])
    wide_i, wide_j = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
    seen = seen_keys(mask, b * mask_batch + wide_i * mask_row + wide_j * mask_key, valid)
    weighed = tl.max(seen.to(tl.int32), axis=0) > 0
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if grad_context is not None:
        grad_rows = grad_context + b * gc_batch + i.to(tl.int64) * gc_row
        for d0 in range(0, Dv, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            g = load_stored(grad_rows, real, d, Dv)
            at = values + b * v_batch + wide_j * v_row + d[:, None]
            v = tl.load(at, mask=weighed[None, :] & (d < Dv)[:, None], other=0.0)
            total += product(g, v, PRECISION)
        if seed is not None:
            total *= survivors(seed, threshold, scale_bits, row[:, None], j[None, :])
    if grad_weights is not None:
        total += load_at(grad_weights + b * gw_batch + wide_i * gw_row + wide_j, seen)
    tl.store(out + row[:, None] * Tk + j[None, :], tl.where(seen, total, 0.0), mask=valid)


@triton.jit(do_not_specialize=VARYING)
def grad_softmax_kernel(
    weights, grads, out, Tq, Tk, padded, lens, lens_batch, lens_row, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Out = weights * (grads - sum(weights * grads)), maybe in place; zero at padded keys.

    A row of ``out`` has ``padded`` numbers, Tk or more. Weights that were rounded to a half type
    are divided by their sum: see `grad_step`.
    """
    i, _, b = program_blocks(Tq, 1)
    row = b * Tq + i
    valid_len = load_valid_len(lens, b * lens_batch + i.to(tl.int64) * lens_row, Tk)
    weights += row * Tk
    grads += row * Tk
    out += row * padded
    rounded: tl.constexpr = weights.dtype.element_ty != tl.float32
    total = tl.zeros([BLOCK_K], tl.float32)
    mass = tl.zeros([BLOCK_K], tl.float32)
    for k0 in range(0, valid_len, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        p = load_at(weights + j, j < valid_len)
        total += p * load_at(grads + j, j < valid_len)
        if rounded:
            mass += p
    mean, inverse = tl.sum(total, axis=0), 1.0
    if rounded:
        inverse = 1.0 / tl.where(valid_len > 0, tl.sum(mass, axis=0), 1.0)
        mean *= inverse
    for k0 in range(0, padded, BLOCK_K):
        j = k0 + tl.arange(0, BLOCK_K)
        valid = j < valid_len
        g = load_at(grads + j, valid)
        s = softmax_gradients(weights + j, g, mean, inverse, valid, valid, rounded)
        tl.store(out + j, s, mask=j < padded)


@triton.jit(do_not_specialize=VARYING)
def grad_values_kernel(
    weights, grad_context, out, Tq, Tk, Dv, gc_batch, gc_row, seed, threshold, scale_bits,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[b,j] = sum_i dropout(weights)[b,i,j] grad_context[b,i]."""
    key_block, feature_block, b = program_blocks(tl.cdiv(Tk, BLOCK_K), tl.cdiv(Dv, BLOCK_D))
    j = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
    d = feature_block * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for q0 in range(0, Tq, BLOCK_Q):
        i = q0 + tl.arange(0, BLOCK_Q)
        row = b * Tq + i
        both = (j < Tk)[:, None] & (i < Tq)[None, :]
        p = tl.load(weights + row[None, :] * Tk + j[:, None], mask=both, other=0.0).to(tl.float32)
        if seed is not None:
            p *= survivors(seed, threshold, scale_bits, row[None, :], j[:, None])
        g = load_stored(grad_context + b * gc_batch + i.to(tl.int64) * gc_row, i < Tq, d, Dv)
        total += product(p, g, PRECISION)
    store_tile(out + (b * Tk + j) * Dv, j < Tk, d, Dv, total)
