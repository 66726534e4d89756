"""A step of location-sensitive attention as one operator.

    features = convolution along the keys of ``location``, the weights of earlier steps
    score[b,0,j] = w_v . act(queries[b,0] + keys[b,j] + W_f features[b,j])

``location_attend`` gives context, weights and features. Its backward is that of ``general_attend``,
and torch's gradient of a convolution behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops import TAGS, library
from bahdanau_fast.ops.again import differentiate_again
from bahdanau_fast.ops.inside import general
from bahdanau_fast.reference import Inside

__all__ = ["attend_location", "convolved"]

library.define(
    "location_attend(Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor? valid_lens, "
    "Tensor location, Tensor w_conv, Tensor? b_conv, Tensor w_f, int activation, "
    "float negative_slope, Tensor? seed, float dropout_p) -> (Tensor context, Tensor weights, "
    "Tensor features)",
    tags=TAGS,
)
_op = torch.ops.bahdanau_fast.location_attend.default
_convolution_backward = torch.ops.aten.convolution_backward.default
# Where the differentiable inputs are among the arguments.
_PLACES = (0, 1, 2, 3, 5, 6, 7, 8)


def convolved(location: Tensor, w_conv: Tensor, b_conv: Tensor | None) -> Tensor:
    """Features (B,Tk,C) of the keys, from where earlier steps looked.

    Args:
        location: (B,inputs,Tk).
        w_conv: (C,inputs,taps), an odd number of taps.
        b_conv: (C,) or None.
    """
    return F.conv1d(location, w_conv, b_conv, padding=w_conv.shape[2] // 2).transpose(1, 2)


def _fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    queries, values, location, w_conv = (inputs[at] for at in (0, 2, 5, 6))
    shape = (location.shape[0], w_conv.shape[0], location.shape[2])
    context, weights = general.attend_fake(queries, None, values)
    return context, weights, location.new_empty(shape).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    activation, negative_slope, seed, dropout_p = inputs[9:]
    ctx.save_for_backward(*inputs[:9], seed, *output[1:])
    ctx.numbers = activation, negative_slope, dropout_p
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = [bool(ctx.needs_input_grad[at]) for at in _PLACES]
    grad_context, grad_weights, grad_features = grads
    if grad_context is None and grad_weights is None and grad_features is None:
        return (None,) * 13
    if torch.is_grad_enabled():
        found: Sequence[Tensor | None] = _again(ctx, needed, grads)
    else:
        found = _gradients(ctx, needed, *grads)
    results: list[Tensor | None] = [None] * 13
    for at, gradient, need in zip(_PLACES, found, needed, strict=True):
        results[at] = gradient if need else None
    return tuple(results)


def _gradients(
    ctx: Any,
    needed: list[bool],
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    grad_features: Tensor | None,
) -> Sequence[Tensor | None]:
    *tensors, location, w_conv, b_conv, w_f, seed, weights, features = ctx.saved_tensors
    activation, negative_slope, dropout_p = ctx.numbers
    through = any(needed[4:7])  # the convolution
    wanted = [*needed[:4], through, needed[7]]
    inputs = (*tensors, features, w_f, activation, negative_slope, seed, dropout_p)
    *found, grad, grad_w_f = general.attend_backward(
        inputs, weights, grad_context, grad_weights, wanted
    )
    if not through:
        return (*found, None, None, None, grad_w_f)
    if grad_features is not None:
        grad = grad + grad_features
    bias_sizes = None if b_conv is None else [b_conv.shape[0]]
    padding = [w_conv.shape[2] // 2]
    convolution = _convolution_backward(
        *(grad.transpose(1, 2), location, w_conv, bias_sizes),
        *([1], padding, [1], False, [0], 1, needed[4:7]),
    )
    return (*found, *convolution, grad_w_f)


def _again(ctx: Any, needed: list[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    *inputs, _, _, _ = ctx.saved_tensors
    activation, negative_slope, dropout_p = ctx.numbers
    valid_lens = inputs.pop(4)

    def function(*tensors: Any) -> tuple[Tensor, ...]:
        queries, keys, values, w_v, location, w_conv, b_conv, w_f = tensors
        features = convolved(location, w_conv, b_conv)
        inside = general.inside_of(features, w_f, activation, negative_slope)
        attended = reference.attend(queries, keys, values, w_v, valid_lens, inside=inside)
        return (*attended, features)

    return differentiate_again(function, inputs, needed, dropout_p, grads)


torch.library.register_fake("bahdanau_fast::location_attend", _fake, lib=library)
torch.library.register_autograd(
    "bahdanau_fast::location_attend", _backward, setup_context=_setup_context, lib=library
)


def attend_location(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    location: Tensor,
    w_conv: Tensor,
    b_conv: Tensor | None,
    inside: Inside,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Context (B,Tq,Dv) and weights (B,Tq,Tk), these fp64 for fp64 and else fp32.

    Args:
        queries: (B,Tq,H), projected.
        keys: (B,Tk,H), projected.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        location: (B,inputs,Tk), the weights of earlier steps.
        w_conv: (C,inputs,taps).
        b_conv: (C,) or None.
        inside: ``w_f`` (H,C) and the activation; its features are None.
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
    """
    _, *others = general.numbers(inside)
    context, weights, _ = _op(
        queries, keys, values, w_v, valid_lens, location, w_conv, b_conv, *others, seed, dropout_p
    )
    return context, weights
