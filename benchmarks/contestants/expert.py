"""What an expert writes in an afternoon: Triton, in 16 bits with ``tanh.approx``; no (B,Tq,Tk,H).

Products with the values and sums of parts are the library's. Forward, a tile of keys stays in
registers and a loop goes over the queries; backward likewise, with the sums over keys tile by tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

MASKED = tl.constexpr(-1e6)
QUERIES, KEYS = 32, 8  # of a tile, forward
KEYS_BACKWARD, UNITS_BACKWARD = 16, 128


@triton.jit
def _tanh(x, APPROXIMATE: tl.constexpr):
    if not APPROXIMATE:
        return libdevice.tanh(x)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32,
                                     is_pure=True, pack=1)  # fmt: skip


@triton.jit
def scores_kernel(queries, keys, w_v, scores, Tq, Tk, H, APPROXIMATE: tl.constexpr,
                  BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Scores (B,Tq,Tk) of queries (B,Tq,H) and keys (B,Tk,H)."""
    b, tiles = tl.program_id(1), tl.cdiv(Tk, BLOCK_K)
    j, h = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H)
    inside = (j < Tk)[:, None] & (h < H)[None, :]
    k = tl.load(keys + (b * Tk + j)[:, None] * H + h[None, :], mask=inside, other=0.0)
    k = k.to(tl.float32)
    w = tl.load(w_v + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) // tiles * BLOCK_Q
    for i in range(first, tl.minimum(first + BLOCK_Q, Tq)):
        q = tl.load(queries + (b * Tq + i) * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        t = _tanh(k + q, APPROXIMATE)
        tl.store(scores + (b * Tq + i) * Tk + j, tl.sum(t * w, axis=1), mask=j < Tk)


@triton.jit
def softmax_kernel(scores, lens, weights, Tq, Tk, MASK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of a row, masked, into the dtype of the values."""
    row, j = tl.program_id(0), tl.arange(0, BLOCK_K)
    s = tl.load(scores + row * Tk + j, mask=j < Tk, other=float("-inf"))
    if MASK:
        s = tl.where((j < Tk) & (j >= tl.load(lens + row // Tq)), MASKED, s)
    e = tl.exp(s - tl.max(s, axis=0))
    tl.store(weights + row * Tk + j, e / tl.sum(e, axis=0), mask=j < Tk)


@triton.jit
def softmax_grad_kernel(weights, grads, lens, grad_scores, Tq, Tk, MASK: tl.constexpr,
                        BLOCK_K: tl.constexpr):  # fmt: skip
    """Of a row, into fp32; what is masked has none."""
    row, j = tl.program_id(0), tl.arange(0, BLOCK_K)
    p = tl.load(weights + row * Tk + j, mask=j < Tk, other=0.0).to(tl.float32)
    g = tl.load(grads + row * Tk + j, mask=j < Tk, other=0.0).to(tl.float32)
    g = p * (g - tl.sum(p * g, axis=0))
    if MASK:
        g = tl.where(j < tl.load(lens + row // Tq), g, 0.0)
    tl.store(grad_scores + row * Tk + j, g, mask=j < Tk)


@triton.jit
def gradients_kernel(queries, keys, w_v, grad_scores, query_parts, grad_keys, w_parts, Tq, Tk, H,
                     APPROXIMATE: tl.constexpr, BLOCK_K: tl.constexpr,
                     BLOCK_H: tl.constexpr):  # fmt: skip
    """Of a tile of keys: grad_keys (B,Tk,H); parts of grad_queries (B,tiles,Tq,H) and of w_v's."""
    b, tiles, parts = tl.program_id(1), tl.cdiv(Tk, BLOCK_K), tl.cdiv(H, BLOCK_H)
    tile = tl.program_id(0) // parts
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    h = tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H)
    at = (b * Tk + j)[:, None] * H + h[None, :]
    inside = (j < Tk)[:, None] & (h < H)[None, :]
    k = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_v + h, mask=h < H, other=0.0).to(tl.float32)
    of_keys = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    of_w = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    for i in tl.range(0, Tq, num_stages=3):
        q = tl.load(queries + (b * Tq + i) * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        g = tl.load(grad_scores + (b * Tq + i) * Tk + j, mask=j < Tk, other=0.0)[:, None]
        t = _tanh(k + q, APPROXIMATE)
        gt = g * t
        d = g - gt * t
        of_w += gt
        of_keys += d
        part = query_parts + ((b * tiles + tile) * Tq + i) * H + h
        tl.store(part, tl.sum(d, axis=0) * w, mask=h < H)
    tl.store(grad_keys + at, of_keys * w[None, :], mask=inside)
    tl.store(w_parts + (b * tiles + tile) * H + h, tl.sum(of_w, axis=0), mask=h < H)


# ---- launches ------------------------------------------------------------------------------------


def _tiles(queries: Tensor, keys: Tensor) -> tuple[Any, dict[str, int]]:
    """B, Tq, Tk and H, and of softmax kernels a row and its warps."""
    (batch, queries_len, hidden), keys_len = queries.shape, keys.shape[1]
    block = triton.next_power_of_2(keys_len)
    row = {"BLOCK_K": block, "num_warps": min(max(block // 128, 2), 8)}
    return (batch, queries_len, keys_len, hidden), row


def _approximate(keys: Tensor) -> bool:
    """Whether ``tanh.approx``, off by 2**-11, is there and right."""
    return torch.version.hip is None and keys.dtype is not torch.float32


class Attention(torch.autograd.Function):
    """``apply(queries, keys, values, w_v, lens)``: context and weights."""

    @staticmethod
    def forward(ctx, queries, keys, values, w_v, lens):  # type: ignore[no-untyped-def]
        (batch, tq, tk, hidden), row = _tiles(queries, keys)
        scores = queries.new_empty((batch, tq, tk), dtype=torch.float32)
        tile, block = min(QUERIES, triton.next_power_of_2(tq)), triton.next_power_of_2(hidden)
        scores_kernel[triton.cdiv(tk, KEYS) * triton.cdiv(tq, tile), batch](
            queries, keys, w_v, scores, tq, tk, hidden, _approximate(keys), tile, KEYS, block,
            num_warps=max(2, block // 256),
        )  # fmt: skip
        weights, mask = torch.empty_like(scores, dtype=values.dtype), lens is not None
        given = scores, lens if mask else scores, weights, tq, tk, mask
        softmax_kernel[(batch * tq,)](*given, **row)
        ctx.save_for_backward(weights, queries, keys, values, w_v, lens)
        ctx.mark_non_differentiable(weights)
        return torch.bmm(weights, values), weights

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        weights, queries, keys, values, w_v, lens = ctx.saved_tensors
        (batch, tq, tk, hidden), row = _tiles(queries, keys)
        grad_scores = torch.empty_like(weights, dtype=torch.float32)
        mask, of_weights = lens is not None, torch.bmm(grad, values.mT)
        given = weights, of_weights, lens if mask else weights, grad_scores, tq, tk, mask
        softmax_grad_kernel[(batch * tq,)](*given, **row)
        block_k = min(KEYS_BACKWARD, triton.next_power_of_2(tk))
        block_h = min(UNITS_BACKWARD, triton.next_power_of_2(hidden))
        tiles = triton.cdiv(tk, block_k)
        query_parts = grad_scores.new_empty((batch, tiles, tq, hidden))
        w_parts, grad_keys = grad_scores.new_empty((batch * tiles, hidden)), torch.empty_like(keys)
        gradients_kernel[tiles * triton.cdiv(hidden, block_h), batch](
            queries, keys, w_v, grad_scores, query_parts, grad_keys, w_parts, tq, tk, hidden,
            _approximate(keys), block_k, block_h, num_warps=2,
        )  # fmt: skip
        grad_queries = query_parts.sum(1, dtype=queries.dtype)
        of_w = w_parts.sum(0, dtype=w_v.dtype, keepdim=True)
        return grad_queries, grad_keys, torch.bmm(weights.mT, grad), of_w, None
