"""A step of location-sensitive attention as one operator.

    features = convolution along the keys of ``location``, the weights of earlier steps
    score[b,0,j] = w_v . act(queries[b,0] + keys[b,j] + W_f features[b,j])

``attend_location`` gives context, weights and features. Its backward is ``attention_backward``, and
``convolution_backward`` behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops.attention import (
    ACTIVATION,
    DROPOUT,
    LENS,
    NEED,
    attend_fake,
    attention_gradients,
    gradient_like,
    inside_of,
)
from bahdanau_fast.ops.operator import Attention, Named, Operator

__all__ = ["attend_location", "convolution_backward", "convolved"]


def convolved(location: Tensor, w_conv: Tensor, b_conv: Tensor | None) -> Tensor:
    """Features (B,Tk,C) of the keys, from where earlier steps looked (:class:`call.Located`)."""
    return F.conv1d(location, w_conv, b_conv, padding=w_conv.shape[2] // 2).transpose(1, 2)


def _fake(
    queries: Tensor, values: Tensor, location: Tensor, w_conv: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (location.shape[0], w_conv.shape[0], location.shape[2])
    return *attend_fake(queries, values), location.new_empty(shape).transpose(1, 2)


def _convolution_backward_fake(
    location: Tensor, w_conv: Tensor, needs: int, **_: Any
) -> tuple[Tensor, Tensor]:
    return gradient_like(location, needs & 1), gradient_like(w_conv, needs & 2)


def _scores_of(named: Named) -> tuple[Tensor, Tensor]:
    features = convolved(named["location"], named["w_conv"], named["b_conv"])
    inside = inside_of(named)._replace(features=features)
    scores = reference.projected_scores(named["queries"], named["keys"], named["w_v"], inside)
    return scores, features


def _gradients(
    saved: Sequence[Any],
    numbers: Sequence[Any],
    needs: int,
    grads: Sequence[Tensor | None],
    backend: str | None,
    shared: Any,
) -> list[Tensor | None]:
    location, w_conv, _, w_f, lens, mask, seed, weights, features = saved[4:]
    of_location, of_w_conv, of_b_conv, of_w_f = (needs >> place & 1 for place in (4, 5, 6, 7))
    of_features = of_location or of_w_conv or of_b_conv
    needs = needs & 15 | of_features * NEED["features"] | of_w_f * NEED["w_f"]
    # Of projected queries and keys, without tables.
    tensors = (*saved[:4], None, None, None, features, w_f, lens, mask, None, None, seed)
    results, given = (weights, None, None), (*numbers, 0)
    found = attention_gradients(results, tensors, given, needs, grads, backend, shared)
    (*others,), grad, grad_w_f = found[:4], found[7], found[8]
    if grad is None or not of_features:
        return [*others, None, None, None, grad_w_f]
    if len(grads) > 2 and grads[2] is not None:
        grad = grad + grads[2]
    convolution: Sequence[Tensor | None] = (None, None)
    if of_location or of_w_conv:
        given = (grad, location, w_conv, of_location + 2 * of_w_conv)
        convolution = convolution_backward.overload(*given)
    return [*others, *convolution, grad.sum((0, 1)) if of_b_conv else None, grad_w_f]


_INPUTS = ("queries", "keys", "values", "w_v", "location", "w_conv", "b_conv", "w_f")
_NEEDING: dict[str, Any] = {"location": ("w_conv",), "w_conv": ("location",), "b_conv": ()}
_THROUGH = tuple(name for name in _INPUTS if name != "values")
attend_location = Attention(
    "attend_location(Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor location, "
    f"Tensor w_conv, Tensor? b_conv, Tensor w_f, {LENS}, {DROPOUT}, {ACTIVATION}) -> "
    "(Tensor context, Tensor weights, Tensor features)",
    _fake,
    _INPUTS,
    lambda name, _: _NEEDING.get(name, _THROUGH),
    _scores_of,
    _gradients,
)
# Bits of `needs`: 1 for the location, 2 for w_conv.
convolution_backward = Operator(
    "convolution_backward(Tensor grad_features, Tensor location, Tensor w_conv, int needs) -> "
    "(Tensor grad_location, Tensor grad_w_conv)",
    _convolution_backward_fake,
)
