"""Additive attention in plain PyTorch: the definition every backend is tested against.

This is the only place where the formula is written in Python::

    score[b,i,j]  = w_v . act(W_q q[b,i] + W_k k[b,j] + W_f f[b,j])
    weight[b,i,:] = softmax_j(score, positions j >= valid_len masked)
    context[b,i]  = sum_j dropout(weight)[b,i,j] v[b,j]

where act is tanh or another activation, and f are optional features of the keys. It runs on any
device, in any floating dtype, and autograd differentiates it to any order.
Sizes: B batch, Tq queries, Tk keys, Dq/Dk/Dv feature sizes, C features of a key, H hidden units.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "TANH",
    "ScoreTerms",
    "additive_attention",
    "additive_scores",
    "attend",
    "causal_mask",
    "clipped",
    "masked_softmax",
    "projected_scores",
    "valid_mask",
    "visible",
]


class ScoreTerms(NamedTuple):
    """What a score has inside beside queries and keys: ``act(... + W_f f[b,j])``.

    Attributes:
        features: f, (B,Tk,C), or None.
        w_f: (H,C); with features.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid".
        negative_slope: of leaky_relu.
    """

    features: Tensor | None = None
    w_f: Tensor | None = None
    activation: str = "tanh"
    negative_slope: float = 0.01


#: No features, and tanh.
TANH = ScoreTerms()

# Lengths that torch compares with no positions, and those to which it would round the positions.
_COUNTED_IN_FP64 = (torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float16)


def valid_mask(valid_lens: Tensor, keys_len: int) -> Tensor:
    """The positions a query may attend to: ``mask[b,i,j] = j < valid_lens[b(,i)]``.

    Args:
        valid_lens: (B,) or (B,Tq), any integer or float dtype; 2.5 allows three positions.
        keys_len: Tk.

    Returns:
        Boolean (B,1,Tk) for one length per row, (B,Tq,Tk) for one length per query.
    """
    lens = valid_lens.unsqueeze(-1) if valid_lens.dim() == 1 else valid_lens
    if lens.dtype in _COUNTED_IN_FP64:
        lens = lens.double()
    positions = torch.arange(keys_len, device=valid_lens.device)
    return _replicate_like(valid_lens, positions) < lens.unsqueeze(-1)


def visible(valid_lens: Tensor | None, mask: Tensor | None, keys_len: int) -> Tensor | None:
    """The positions that lengths and mask both allow.

    Args:
        valid_lens: as for :func:`valid_mask`, or None.
        mask: None or bool (B,Tk), (B,1,Tk) or (B,Tq,Tk), True where a query may look.
        keys_len: Tk.

    Returns:
        Boolean (B,1,Tk) or (B,Tq,Tk); None without both.
    """
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(1)
    if valid_lens is None:
        return mask
    within = valid_mask(valid_lens, keys_len)
    return within if mask is None else mask & within


def causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Where query i may look at key j with causal attention: ``j <= i``.

    As with ``is_causal`` of torch's ``scaled_dot_product_attention``, the first query sees the
    first key alone, whatever Tq and Tk.

    Args:
        queries: (B,Tq,Dq).
        keys: (B,Tk,Dk).

    Returns:
        Boolean (B,Tq,Tk), a view of (Tq,Tk).
    """
    batch, queries_len, _ = queries.shape
    square = torch.ones(queries_len, keys.shape[1], dtype=torch.bool, device=keys.device).tril()
    return _replicate_like(keys, square).expand(batch, -1, -1)


def _replicate_like(tensor: Tensor, same: Tensor) -> Tensor:
    """What is the same on all ranks, as a DTensor where ``tensor`` is one."""
    if type(tensor) is Tensor or "torch.distributed.tensor" not in sys.modules:
        return same
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return same
    mesh = tensor.device_mesh
    return DTensor.from_local(same, mesh, [Replicate()] * mesh.ndim, run_check=False)


def masked_softmax(
    scores: Tensor, valid_lens: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Softmax over the last axis of (B,Tq,Tk) scores, without masked positions.

    A row without valid positions is uniform over all Tk positions, as with the course's fill of
    -1e6; in fp16 that fill is -inf and gives NaN, while this function gives uniform weights.

    Args:
        scores: (B,Tq,Tk), floating.
        valid_lens: None, (B,) or (B,Tq).
        mask: None, or bool (B,Tk), (B,1,Tk) or (B,Tq,Tk); with lengths, both hold.

    Returns:
        Weights (B,Tq,Tk) in the dtype of ``scores``.
    """
    valid = visible(valid_lens, mask, scores.shape[-1])
    if valid is None:
        return F.softmax(scores, dim=-1)
    none_valid = ~valid.any(-1, keepdim=True)
    scores = scores.masked_fill(~valid, float("-inf")).masked_fill(none_valid, 0.0)
    return F.softmax(scores, dim=-1)


def _activate(x: Tensor, terms: ScoreTerms) -> Tensor:
    if terms.activation == "relu":
        return F.relu(x)
    if terms.activation == "leaky_relu":
        return F.leaky_relu(x, terms.negative_slope)
    if terms.activation == "sigmoid":
        return torch.sigmoid(x)
    return torch.tanh(x)


def projected_scores(
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor | Callable[[Tensor], Tensor],
    terms: ScoreTerms = TANH,
) -> Tensor:
    """The scores (B,Tq,Tk) of projected queries and keys; arguments as of :func:`attend`."""
    if terms.features is not None and terms.w_f is not None:
        keys = keys + F.linear(terms.features, terms.w_f)
    hidden = _activate(queries.unsqueeze(2) + keys.unsqueeze(1), terms)
    scores = F.linear(hidden, w_v.reshape(1, -1)) if isinstance(w_v, Tensor) else w_v(hidden)
    return scores.squeeze(-1)


def clipped(scores: Tensor, clip: float | None) -> Tensor:
    """Scores u as ``clip * tanh(u)``; as they are where ``clip`` is None."""
    return scores if clip is None else clip * torch.tanh(scores)


def _projected(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    if weight is not None:
        return F.linear(x, weight, bias)
    return x if bias is None else x + bias


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor | Callable[[Tensor], Tensor],
    valid_lens: Tensor | None = None,
    dropout_p: float = 0.0,
    terms: ScoreTerms = TANH,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The part after the projections: scores, masked softmax, weighted sum.

    Args:
        queries: (B,Tq,H), already ``W_q q``.
        keys: (B,Tk,H), already ``W_k k``.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,); or a layer from (B,Tq,Tk,H) to (B,Tq,Tk,1).
        valid_lens: None, (B,) or (B,Tq).
        dropout_p: dropout probability of the weights in the weighted sum.
        terms: features of the keys, and the activation.
        mask: as for :func:`masked_softmax`.

    Returns:
        Context (B,Tq,Dv) and the weights (B,Tq,Tk) before dropout.
    """
    weights = masked_softmax(projected_scores(queries, keys, w_v, terms), valid_lens, mask)
    context = torch.bmm(F.dropout(weights, dropout_p), values)
    return context, weights


def additive_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor,
    valid_lens: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = True,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: str = "tanh",
    negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor | None]:
    """Additive attention (Bahdanau et al. 2014, https://arxiv.org/abs/1409.0473), unfused.

    Args:
        queries: (B,Tq,Dq).
        keys: (B,Tk,Dk).
        values: (B,Tk,Dv).
        w_q: (H,Dq); None for queries (B,Tq,H) that are projected.
        w_k: (H,Dk); None for keys (B,Tk,H) that are projected.
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq), any integer or float dtype.
        mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look; None for all.
        bias: (H,), added inside the tanh.
        dropout_p: dropout probability of the weights in the weighted sum.
        need_weights: also return the weights.
        features: (B,Tk,C), of the keys; optional.
        w_f: (H,C); with features.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid".
        negative_slope: of leaky_relu.

    Returns:
        Context (B,Tq,Dv), and the weights (B,Tq,Tk) before dropout or None.
    """
    terms = ScoreTerms(features, w_f, activation, negative_slope)
    context, weights = attend(
        *(_projected(queries, w_q), _projected(keys, w_k, bias), values, w_v),
        *(valid_lens, dropout_p, terms, mask),
    )
    return context, weights if need_weights else None


def additive_scores(
    queries: Tensor,
    keys: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor,
    *,
    bias: Tensor | None = None,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: str = "tanh",
    negative_slope: float = 0.01,
    clip: float | None = None,
) -> Tensor:
    """The scores u (B,Tq,Tk) of :func:`additive_attention`, which has the other arguments.

    They become ``clip * tanh(u)`` with a ``clip``, a number.
    """
    terms = ScoreTerms(features, w_f, activation, negative_slope)
    projected = _projected(queries, w_q), _projected(keys, w_k, bias)
    scores = projected_scores(*projected, w_v, terms)
    return clipped(scores, clip)
