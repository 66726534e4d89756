"""What may take the place of the softmax where attention moves along its keys, step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.call import Call
from bahdanau_fast.reference import masked_softmax, visible

NORMALIZATIONS = ("softmax", "sigmoid", "forward", "stepwise")


def last_weights(previous: Tensor | None, call: Call) -> Tensor:
    """Weights of the last step as (B,Tq,Tk); None: all at the first key."""
    (batch, queries_len, _), keys_len = call.queries.shape, call.keys.shape[1]
    if previous is None:
        first = call.values.new_zeros((batch, queries_len, keys_len))
        first[..., :1] = 1.0
        return first
    shape = batch, queries_len, keys_len
    if previous.numel() != batch * queries_len * keys_len:
        need = f"be the weights of the last step, {shape}"
        checks.reject(ValueError, "previous", need, tuple(previous.shape))
    return previous.reshape(shape)


def within(window: tuple[int, int], previous: Tensor, mask: Tensor | None) -> Tensor:
    """The mask, and of the keys those in a window around the last step's largest weight."""
    before, after = window
    positions = torch.arange(previous.shape[2], device=previous.device)
    distance = positions - previous.argmax(2, keepdim=True)
    inside = (distance >= -before) & (distance <= after)
    return inside if mask is None else inside & mask


def normalized(how: str, scores: Tensor, previous: Tensor | None, call: Call) -> Tensor:
    """Weights (B,Tq,Tk) of scores, in their dtype; ``previous`` are those of the last step."""
    dtype, scores = scores.dtype, scores.to(torch.promote_types(scores.dtype, torch.float32))
    if how == "sigmoid":
        return masked_softmax(F.logsigmoid(scores), call.valid_lens, call.mask).to(dtype)
    assert previous is not None
    if how == "forward":
        softmax = masked_softmax(scores, call.valid_lens, call.mask)
        moved = (previous + _shifted(previous)) * softmax
        moved = moved / moved.sum(2, keepdim=True).clamp(min=torch.finfo(moved.dtype).tiny)
        return moved.to(dtype)
    stays = torch.sigmoid(scores)
    moved = previous * stays + _shifted(previous * (1.0 - stays))
    seen = visible(call.valid_lens, call.mask, scores.shape[2])
    return (moved if seen is None else moved.masked_fill(~seen, 0.0)).to(dtype)


def _shifted(weights: Tensor) -> Tensor:
    """Weights one key further on."""
    return F.pad(weights[..., :-1], (1, 0))
