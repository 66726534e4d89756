"""What an expert would write first: scores in one Triton kernel, with the GPU's own tanh.

Softmax and the product with the values are torch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .baselines import MASKED


@triton.jit
def _tanh(x, APPROX: tl.constexpr):
    if APPROX:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def scores_kernel(
    queries, keys, w_v, scores, queries_len, keys_len, hidden,
    APPROX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Scores (B,Tq,Tk) of projected queries (B,Tq,H) and keys (B,Tk,H)."""
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    q_rows = tl.program_id(2).to(tl.int64) * queries_len + q
    k_rows = tl.program_id(2).to(tl.int64) * keys_len + k
    has_q, has_k = (q < queries_len)[:, None], (k < keys_len)[:, None]
    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for start in range(0, hidden, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        has_h = h < hidden
        a = tl.load(queries + q_rows[:, None] * hidden + h, has_q & has_h, 0.0).to(tl.float32)
        c = tl.load(keys + k_rows[:, None] * hidden + h, has_k & has_h, 0.0).to(tl.float32)
        w = tl.load(w_v + h, has_h, 0.0).to(tl.float32)
        total += tl.sum(_tanh(a[:, None, :] + c[None, :, :], APPROX) * w, 2)
    tl.store(scores + q_rows[:, None] * keys_len + k, total, has_q & (k < keys_len))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Context and weights of projected queries and keys; without gradients."""
    (batch, queries_len, hidden), keys_len = queries.shape, keys.shape[1]
    scores = torch.empty(batch, queries_len, keys_len, device=queries.device)
    blocks = {"BLOCK_Q": 1 if queries_len == 1 else 4, "BLOCK_K": 32, "BLOCK_H": 64}
    grid = (triton.cdiv(keys_len, 32), triton.cdiv(queries_len, blocks["BLOCK_Q"]), batch)
    scores_kernel[grid](
        queries, keys, w_v, scores, queries_len, keys_len, hidden,
        APPROX=queries.device.type != "cpu", **blocks,
    )  # fmt: skip
    if valid_lens is not None:
        keep = torch.arange(keys_len, device=scores.device) < valid_lens[:, None, None]
        scores = torch.where(keep, scores, MASKED)
    weights = F.softmax(scores, dim=-1).to(values.dtype)
    return torch.bmm(weights, values), weights
