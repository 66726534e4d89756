"""Losses of attention weights: what a decoder may pay for where it looks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.memory.shapes import lengths
from bahdanau_fast.reference import valid_mask

__all__ = ["coverage", "doubly_stochastic", "guided"]


def coverage(weights: Tensor, target_lens: Tensor | None = None) -> Tensor:
    """What is looked at twice: ``sum_j min(weight[t,j], sum of weight[s,j] over s < t)``.

    See, Liu and Manning 2017, https://arxiv.org/abs/1704.04368, equation 12.

    Args:
        weights: (B,T,Tk), of T steps of a decoder, such as ``AttentionGRU.attention_weights``.
        target_lens: None or (B,), also a list: steps from a row's length on do not count.

    Returns:
        The mean over the steps of all rows, a number in the dtype of weights.

    Raises:
        TypeError, ValueError: weights that are not floating (B,T,Tk), lengths that do not fit.

    >>> coverage(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])).item()
    0.25
    """
    steps = _mask("target_lens", target_lens, weights, 1)
    earlier = F.pad(weights.cumsum(1)[:, :-1], (0, 0, 1, 0))
    return _mean(torch.minimum(weights, earlier).sum(2), steps)


def guided(
    weights: Tensor,
    target_lens: Tensor | None = None,
    source_lens: Tensor | None = None,
    width: float = 0.2,
) -> Tensor:
    """What is far from the diagonal: ``weight[t,j] (1 - exp(-(j / Tk - t / T)^2 / (2 width^2)))``.

    Tachibana, Uenoyama and Aihara 2017, https://arxiv.org/abs/1710.08969, section 4.1.

    Args:
        weights: (B,T,Tk), of T steps of a decoder.
        target_lens: None or (B,): T of each row.
        source_lens: None or (B,): Tk of each row.
        width: of the diagonal.

    Returns:
        The mean over the steps and keys of all rows, a number in the dtype of weights.

    Raises:
        TypeError, ValueError: as for :func:`coverage`; a width that is no positive number.

    >>> guided(torch.eye(5).unsqueeze(0)).item()
    0.0
    """
    checks.finite("width", width)
    if width <= 0.0:
        checks.reject(ValueError, "width", "be positive", width)
    steps = _mask("target_lens", target_lens, weights, 1)
    keys = _mask("source_lens", source_lens, weights, 2)
    distance = _relative(keys).unsqueeze(1) - _relative(steps).unsqueeze(2)
    penalty = -torch.expm1(-distance.square() / (2.0 * width * width))
    return _mean(weights * penalty.to(weights.dtype), steps.unsqueeze(2) & keys.unsqueeze(1))


def doubly_stochastic(
    weights: Tensor, target_lens: Tensor | None = None, source_lens: Tensor | None = None
) -> Tensor:
    """What is looked at too little or too much: ``(1 - sum_t weight[t,j])^2``.

    Xu et al. 2015, https://arxiv.org/abs/1502.03044, equation 14.

    Args:
        weights: (B,T,Tk), of T steps of a decoder.
        target_lens: None or (B,): steps from a row's length on do not count.
        source_lens: None or (B,): keys from a row's length on do not count.

    Returns:
        The mean over the keys of all rows, a number in the dtype of weights.

    Raises:
        TypeError, ValueError: as for :func:`coverage`.

    >>> doubly_stochastic(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])).item()
    1.0
    """
    steps = _mask("target_lens", target_lens, weights, 1)
    keys = _mask("source_lens", source_lens, weights, 2)
    total = weights.masked_fill(~steps.unsqueeze(2), 0.0).sum(1)
    return _mean((1.0 - total).square(), keys)


def _mask(name: str, lens: Tensor | None, weights: Tensor, axis: int) -> Tensor:
    """(B,size of the axis): True before a row's length."""
    checks.rows("weights", weights, "B, T, Tk")
    batch, size = weights.shape[0], weights.shape[axis]
    lens = lengths(lens, weights)
    if lens is None:
        return torch.ones((batch, size), dtype=torch.bool, device=weights.device)
    checks.lens(lens, batch, size, weights.device)
    if lens.dim() != 1:
        checks.reject(ValueError, name, f"have shape ({batch},)", tuple(lens.shape))
    return valid_mask(lens, size).squeeze(1)


def _relative(mask: Tensor) -> Tensor:
    """Positions over the length of a row, fp32."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return positions / mask.sum(1, keepdim=True).clamp(min=1)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    total = x.masked_fill(~mask, 0.0).sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / mask.sum().clamp(min=1)).to(x.dtype)
