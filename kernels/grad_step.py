"""Backward of a decoder step of up to 16 queries, in three launches.

Roof: reading values and keys once and writing their gradients, ``2 B Tk (H + Dv)`` numbers; with
several queries 20 instructions per (query, key, hidden unit). A program takes a split of one
row's keys, whole rows in a tile. With one query, copies of the next tiles are under way while it
computes, and sums over keys stay in a thread until it ends. With several, a program of the keys is
a warp with one tile of some hidden units. The last kernel adds up what programs left.

Weights of a half type are rounded, and add up to one no more. Divided by their sum they do again:
then they are the softmax of scores that are off by a rounding at most, and the gradients of the
scores of a row add up to zero. Undivided, a weight near one would leave of its gradient, ``p (g -
sum p g)``, little but the rounding of p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import with_slope
from .masking import load_valid_len, seen_keys, softmax_gradients, survivors
from .tiles import RUN, VARYING, load_at, load_row, load_tile, program_blocks, store_sum, store_tile


@triton.jit(do_not_specialize=VARYING)
def step_values_kernel(
    values, weights, grad_context, grad_weights, grad_values, grads, means, masses, Tq, Tk, Dv,
    v_batch, v_row, gc_batch, gc_row, gw_batch, gw_row, splits, split_keys, lens, lens_batch,
    lens_row, mask, mask_batch, mask_row, mask_key, seed, threshold, scale_bits,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grads[b,i,j] = dropout(grad_context . value) + grad_weights where i looks at j, else zero.

    Args:
        grad_context: (B,Tq,Dv), or None, as ``grad_weights`` (B,Tq,Tk).
        grad_values: (B,Tk,Dv), sum_i dropout(weight) grad_context; or None.
        grads: (B,Tq,Tk) in fp32; or None.
        means: (B,Tq,splits), the split's part of sum_j weight grads.
        masses: that of sum_j weight, where they are of a half type, else None.
    """
    split, _, b = program_blocks(splits, 1)
    first, stop = split * split_keys, tl.minimum(split * split_keys + split_keys, Tk)
    valid_len, last = first_and_last(lens, b * lens_batch, lens_row, Tq, Tk, stop, BLOCK_Q)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Q)
    if grad_context is not None:
        context = load_row(grad_context + b * gc_batch, d, Dv)
    sums, mass = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32), tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for k0 in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        j = k0 + tl.arange(0, BLOCK_K)
        inside, at = j < stop, j.to(tl.int64)
        if grads is not None and grad_context is not None:
            v = load_tile(values + b * v_batch + at * v_row, j < last, d, Dv)
        value_grads = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        for query in tl.range(0, 1 if BLOCK_Q == 1 else Tq, num_stages=STAGES):
            i = tl.cast(query, tl.int64)
            row = b * Tq + i
            if BLOCK_Q > 1:
                valid_len = load_valid_len(lens, b * lens_batch + i * lens_row, Tk)
                if grad_context is not None:
                    context = load_row(grad_context + b * gc_batch + i * gc_row, d, Dv)
            p = load_at(weights + row * Tk + at, inside)
            if seed is not None:
                factor = survivors(seed, threshold, scale_bits, row, j)
            if grads is not None:
                g = tl.zeros_like(p) if grad_context is None else tl.sum(v * context, axis=1)
                if seed is not None and grad_context is not None:
                    g *= factor
                offsets = b * mask_batch + i * mask_row + at * mask_key
                seen = seen_keys(mask, offsets, inside & (j < valid_len))
                if grad_weights is not None:
                    g += load_at(grad_weights + b * gw_batch + i * gw_row + at, seen)
                g = tl.where(seen, g, 0.0)
                tl.store(grads + row * Tk + at, g, mask=inside)
                sums += tl.where((n == query)[:, None], (p * g)[None, :], 0.0)
                if masses is not None:
                    mass += tl.where((n == query)[:, None], p[None, :], 0.0)
            if grad_values is not None and grad_context is not None:
                value_grads += (p if seed is None else p * factor)[:, None] * context
        if grad_values is not None:
            store_tile(grad_values + (b * Tk + at) * Dv, inside, d, Dv, value_grads)
    if grads is not None:
        tl.store(means + (b * Tq + n) * splits + split, tl.sum(sums, axis=1), mask=n < Tq)
        if masses is not None:
            tl.store(masses + (b * Tq + n) * splits + split, tl.sum(mass, axis=1), mask=n < Tq)


@triton.jit(do_not_specialize=VARYING)
def step_keys_kernel(
    queries, keys, w_v, weights, grads, means, masses, grad_keys, q_parts, w_parts, Tq, Tk, H,
    q_batch, q_row, k_batch, k_row, g_batch, g_row, g_key, splits, split_keys, parts, lens,
    lens_batch, lens_row, mask, mask_batch, mask_row, mask_key, slope, ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_keys[b,j] = w_v sum_i s[b,i,j] act'(query + key), with s the gradients of the scores.

    Args:
        weights: (B,Tq,Tk), for s = weight (grads - mean) where a query looks; None if ``grads``,
            laid as ``g_batch``, ``g_row`` and ``g_key`` say, are those of the scores.
        means: (B,Tq,parts), which are added up; ``masses`` likewise, or None.
        grad_keys: (B,Tk,H); or None, as what follows.
        q_parts: (B,Tq,splits,H), a split's part of a query's gradient; of several splits are tiles.
        w_parts: (B,splits,H), that of w_v.
    """
    hidden_block, split, b = program_blocks(tl.cdiv(H, BLOCK_H), splits)
    first, stop = split * split_keys, tl.minimum(split * split_keys + split_keys, Tk)
    valid_len, last = first_and_last(lens, b * lens_batch, lens_row, Tq, Tk, stop, BLOCK_Q)
    h, n = hidden_block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    w, a = load_row(w_v, h, H), load_row(queries + b * q_batch, h, H)
    if weights is not None:
        mean, inverse = mean_of(means, masses, b * Tq * parts, n, parts)
    q_sum = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    w_sum = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    for k0 in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        j = k0 + tl.arange(0, BLOCK_K)
        inside, at = j < stop, j.to(tl.int64)
        c = load_tile(keys + b * k_batch + at * k_row, j < last, h, H)
        key_grads = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
        for query in tl.range(0, 1 if BLOCK_Q == 1 else Tq, num_stages=STAGES):
            i = tl.cast(query, tl.int64)
            row = b * Tq + i
            s = load_at(grads + b * g_batch + i * g_row + at * g_key, inside)
            if BLOCK_Q > 1:
                a = load_row(queries + b * q_batch + i * q_row, h, H)
            if weights is not None:
                if BLOCK_Q > 1:
                    valid_len = load_valid_len(lens, b * lens_batch + i * lens_row, Tk)
                    mean, inverse = mean_of(means, masses, row * parts, n, parts)
                offsets = b * mask_batch + i * mask_row + at * mask_key
                seen = seen_keys(mask, offsets, inside & (j < valid_len))
                p = weights + row * Tk + at
                s = softmax_gradients(p, s, mean, inverse, inside, seen, masses is not None)
            t, u = with_slope(c + a, s[:, None], slope, ACTIVATION, PRECISE, NATIVE)
            u *= s[:, None]
            key_grads += u
            if w_parts is not None:
                w_sum += s[:, None] * t
            if q_parts is not None and BLOCK_Q == 1:
                q_sum += u
            elif q_parts is not None:
                store_sum(q_parts + (row * splits + split) * H, h, H, u, w)
        if grad_keys is not None:
            store_tile(grad_keys + (b * Tk + at) * H, inside, h, H, key_grads * w)
    if q_parts is not None and BLOCK_Q == 1:
        store_sum(q_parts + (b * splits + split) * H, h, H, q_sum, w)
    if w_parts is not None:
        store_sum(w_parts + (b * splits + split) * H, h, H, w_sum)


@triton.jit
def first_and_last(lens, offset, lens_row, Tq, Tk, stop, BLOCK_Q: tl.constexpr):
    """Keys that the first query may see, and the end of those up to ``stop`` that any may."""
    valid_len = load_valid_len(lens, offset, Tk)
    most = valid_len
    for query in range(1, 1 if BLOCK_Q == 1 else Tq):
        row = offset + tl.cast(query, tl.int64) * lens_row
        most = tl.maximum(most, load_valid_len(lens, row, Tk))
    return valid_len, tl.minimum(stop, most)


@triton.jit
def mean_of(means, masses, row, n, parts):
    """sum_j weight grads of a query from its parts, and what scales its weights to a sum of one."""
    mean, inverse = tl.sum(load_at(means + row + n, n < parts), axis=0), 1.0
    if masses is not None:
        inverse = 1.0 / tl.sum(load_at(masses + row + n, n < parts), axis=0)
        mean *= inverse
    return mean, inverse


@triton.jit(do_not_specialize=VARYING)
def step_sums_kernel(
    q_parts, grad_queries, w_parts, grad_w, splits, w_rows, H, BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Adds up parts: of w_v (w_rows,H) to (H,), of queries (rows,splits,H) to (rows,H); or None."""
    program = tl.program_id(0)
    if w_parts is not None:
        w_blocks = tl.cdiv(H, BLOCK_W)
        if program < w_blocks:
            add_parts(w_parts, grad_w, program * BLOCK_W, w_rows, H, BLOCK_R, BLOCK_W)
        program -= w_blocks
    if q_parts is not None:
        if program >= 0:
            blocks = tl.cdiv(H, BLOCK_H)
            row, h0 = (program // blocks).to(tl.int64), program % blocks * BLOCK_H
            row_parts = q_parts + row * splits * H
            add_parts(row_parts, grad_queries + row * H, h0, splits, H, BLOCK_S, BLOCK_H)


@triton.jit
def add_parts(parts, out, h0, rows, H, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """out[h] = sum_r parts[r,h] at BLOCK_H of the hidden units."""
    h = h0 + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    for first in range(0, rows, RUN * BLOCK_R):
        run = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        for r0 in range(first, tl.minimum(rows, first + RUN * BLOCK_R), BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            run += load_tile(parts + r.to(tl.int64) * H, r < rows, h, H)
        total += run
    store_sum(out, h, H, total)
