"""A step of location-sensitive attention as one operator.

    features = convolution along the keys of ``location``, the weights of earlier steps
    score[b,0,j] = w_v . act(queries[b,0] + keys[b,j] + W_f features[b,j])

``attend_location`` gives context, weights and features. Its backward is ``attend_backward``, and
``convolution_backward`` behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops.attend import (
    ACTIVATION,
    DROPOUT,
    LENS,
    attend_backward,
    attend_backward_onto,
    attend_fake,
    gradient_like,
    inside_of,
    needs_of,
)
from bahdanau_fast.ops.operator import Attention, Named, Operator

__all__ = ["attend_location", "convolution_backward", "convolved"]


def convolved(location: Tensor, w_conv: Tensor, b_conv: Tensor | None) -> Tensor:
    """Features (B,Tk,C) of the keys, from where earlier steps looked.

    Args:
        location: (B,inputs,Tk).
        w_conv: (C,inputs,taps), an odd number of taps.
        b_conv: (C,) or None.
    """
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
    named: Named,
    needed: list[bool],
    grads: Sequence[Tensor | None],
    shared: Any = None,
) -> list[Tensor | None]:
    grad_context, grad_weights, *rest = grads
    weights, needs = named["weights"], dict(zip(attend_location.inputs, needed, strict=True))
    through = any([needs.pop(name) for name in ("location", "w_conv", "b_conv")])
    needs["features"] = through
    onto = sums = None
    if shared is not None and shared.is_awaited():
        sums = shared.pending.sums()
        onto = sums.keys
        needs["keys"] &= onto is None
        if needs["values"] and grad_context is not None and named["dropout_p"] == 0.0:
            sums.add(weights.detach(), grad_context)
            needs["values"] = False
    given = (weights, grad_context, grad_weights, needs_of(tuple(needs), tuple(needs.values())))
    arguments = [named.get(name) for name in attend_backward_onto.names[5:]]
    if onto is None:
        found = attend_backward.overload(*given, *arguments)
    else:
        found = attend_backward_onto.overload(*given, onto, *arguments)
    of_queries, of_keys, of_values, of_w_v, of_features, of_w_f = found
    if sums is not None and needed[1]:
        sums.keys, of_keys = of_keys if onto is None else onto, None
    if sums is not None and not needs["values"]:
        of_values = None
    of_location = of_w_conv = of_b_conv = None
    if through:
        if rest and rest[0] is not None:
            of_features = of_features + rest[0]
        convolution = of_features, named["location"], named["w_conv"]
        if needed[4] or needed[5]:
            of_location, of_w_conv = convolution_backward.overload(
                *convolution, needed[4] + 2 * needed[5]
            )
        of_b_conv = of_features.sum((0, 1)) if needed[6] else None
    return [of_queries, of_keys, of_values, of_w_v, of_location, of_w_conv, of_b_conv, of_w_f]


_THROUGH = ("queries", "keys", "w_v", "location", "w_conv", "b_conv", "w_f")
attend_location = Attention(
    "attend_location(Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor location, "
    f"Tensor w_conv, Tensor? b_conv, Tensor w_f, {LENS}, {DROPOUT}, {ACTIVATION}) -> "
    "(Tensor context, Tensor weights, Tensor features)",
    _fake,
    {
        "queries": _THROUGH,
        "keys": _THROUGH,
        "values": _THROUGH,
        "w_v": _THROUGH,
        "location": ("w_conv",),
        "w_conv": ("location",),
        "b_conv": (),
        "w_f": _THROUGH,
    },
    _scores_of,
    _gradients,
)
# Bits of `needs`: 1 for the location, 2 for w_conv.
convolution_backward = Operator(
    "convolution_backward(Tensor grad_features, Tensor location, Tensor w_conv, int needs) -> "
    "(Tensor grad_location, Tensor grad_w_conv)",
    _convolution_backward_fake,
)
