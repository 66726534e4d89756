"""The kernels that ``torch.compile`` makes of the rewrite, as inductor of torch 2.13 writes them:
a program for each score; backward, two tensors of (B,Tq,Tk,H), and three sums over them, which
count as the library's: their bytes alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from benchmarks.contestants.expert import EXPERT, Kernels

__all__ = ["RIVALS"]


@triton.jit
def compiled_scores_kernel(queries, keys, w_v, scores, Tq, Tk, H, BLOCK_H: tl.constexpr):
    """``(tanh(q + k) * w).sum(-1)``, fused."""
    at = tl.program_id(0)
    pair, h = at // Tk, tl.arange(0, BLOCK_H)
    inside = h < H
    row = (pair // Tq) * Tk + at % Tk
    q = tl.load(queries + pair * H + h, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(keys + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_v + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + at, tl.sum(libdevice.tanh(q + k) * w, axis=0))


@triton.jit
def compiled_tanh_grad_kernel(queries, keys, w_v, grad_scores, tanh, grad, Tq: tl.constexpr,
                              Tk: tl.constexpr, H: tl.constexpr, COUNT: tl.constexpr,
                              BLOCK: tl.constexpr):  # fmt: skip
    """tanh once more, and its gradient: both (B,Tq,Tk,H), a program for each 1024 elements."""
    x = tl.program_id(0).to(tl.int64 if COUNT >= 1 << 31 else tl.int32) * BLOCK + tl.arange(
        0, BLOCK
    )
    inside, h, at = x < COUNT, x % H, x // H
    pair = at // Tk
    row = pair // Tq * Tk + at % Tk
    q = tl.load(queries + pair * H + h, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(keys + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_v + h, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_scores + at, mask=inside, other=0.0)
    t = libdevice.tanh(q + k)
    tl.store(tanh + x, t, mask=inside)
    tl.store(grad + x, g * w * (1.0 - t * t), mask=inside)


def compiled_scores(queries: Tensor, keys: Tensor, w_v: Tensor) -> Tensor:
    """Scores (B,Tq,Tk) in fp32; a plan for reductions as inductor's heuristics choose it."""
    (batch, queries_len, hidden), keys_len = queries.shape, keys.shape[1]
    scores = queries.new_empty((batch, queries_len, keys_len), dtype=torch.float32)
    block = triton.next_power_of_2(hidden)
    compiled_scores_kernel[(scores.numel(),)](
        queries, keys, w_v, scores, queries_len, keys_len, hidden, block,
        num_warps=min(max(block // 128, 2), 8),
    )  # fmt: skip
    return scores


def compiled_gradients(
    grad_scores: Tensor, queries: Tensor, keys: Tensor, w_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and w_v."""
    (batch, queries_len, hidden), keys_len = queries.shape, keys.shape[1]
    pairs = grad_scores.numel()
    tanh, grad = (queries.new_empty((batch, queries_len, keys_len, hidden)) for _ in range(2))
    compiled_tanh_grad_kernel[(triton.cdiv(pairs * hidden, 1024),)](
        queries, keys, w_v, grad_scores, tanh, grad, queries_len, keys_len, hidden,
        pairs * hidden, 1024, num_warps=4,
    )  # fmt: skip
    of_keys = grad.view_as(keys) if queries_len == 1 else grad.sum(1)
    of_w = torch.mm(grad_scores.view(1, pairs).to(w_v.dtype), tanh.view(pairs, hidden))
    return grad.sum(2), of_keys, of_w


RIVALS = {"compiled": Kernels(compiled_scores, compiled_gradients), "expert": EXPERT}
