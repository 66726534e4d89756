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
    INPUTS,
    LENS,
    NEED,
    attend_fake,
    attention,
    attention_gradients,
    gradient_like,
    terms_of,
)
from bahdanau_fast.ops.operator import AttentionOperator, Named, Operator


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
    terms = terms_of(named)._replace(features=features)
    scores = reference.projected_scores(named["queries"], named["keys"], named["w_v"], terms)
    return scores, features


def _gradients(
    arguments: Any, results: Sequence[Any], needs: int, grads: Sequence[Tensor | None], *rest: Any
) -> list[Tensor | None]:
    weights, features = results
    needed = {name: needs >> index & 1 for index, name in enumerate(_INPUTS)}
    needed["features"] = needed["location"] or needed["w_conv"] or needed["b_conv"]
    needs = sum(NEED[name] for name in INPUTS if needed.get(name))
    of_attention = {name: getattr(arguments, name) for name in _OF_ATTENTION}
    inputs = attention.arguments(features=features, **of_attention)
    by_name = attention_gradients(inputs, (weights,), needs, grads, *rest)._asdict()
    if needed["features"]:
        grad = by_name["features"]
        if len(grads) > 2 and grads[2] is not None:
            grad = grad + grads[2]
        if needed["location"] or needed["w_conv"]:
            convolution_needs = needed["location"] + 2 * needed["w_conv"]
            by_name["location"], by_name["w_conv"] = convolution_backward.overload(
                grad, arguments.location, arguments.w_conv, convolution_needs
            )
        by_name["b_conv"] = grad.sum((0, 1)) if needed["b_conv"] else None
    return [by_name.get(name) for name in _INPUTS]


_INPUTS = ("queries", "keys", "values", "w_v", "location", "w_conv", "b_conv", "w_f")
_NEEDING: dict[str, Any] = {"location": ("w_conv",), "w_conv": ("location",), "b_conv": ()}
_THROUGH = tuple(name for name in _INPUTS if name != "values")
attend_location = AttentionOperator(
    "attend_location(Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor location, "
    f"Tensor w_conv, Tensor? b_conv, Tensor w_f, {LENS}, {DROPOUT}, {ACTIVATION}) -> "
    "(Tensor context, Tensor weights, Tensor features)",
    _fake,
    _INPUTS,
    lambda name, _: _NEEDING.get(name, _THROUGH),
    _scores_of,
    _gradients,
)
_OF_ATTENTION = [name for name in attend_location.names if name in attention.names]
# Bits of `needs`: 1 for the location, 2 for w_conv.
convolution_backward = Operator(
    "convolution_backward(Tensor grad_features, Tensor location, Tensor w_conv, int needs) -> "
    "(Tensor grad_location, Tensor grad_w_conv)",
    _convolution_backward_fake,
)
