"""A step of location-sensitive attention as one operator.

    features = convolution along the keys of ``location``, the weights of earlier steps
    score[b,0,j] = w_v . act(queries[b,0] + keys[b,j] + W_f features[b,j])

``location_attend`` gives context, weights and features. Its backward is that of ``general_attend``,
and ``location_convolution_backward`` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.ops import TAGS, library
from bahdanau_fast.ops.again import attend_again
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.inside import general
from bahdanau_fast.ops.lifetime import Lifetime
from bahdanau_fast.ops.shared_gradients import SharedNode
from bahdanau_fast.reference import Inside

__all__ = ["attend_location", "convolved"]

library.define(
    "location_attend(Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor? valid_lens, "
    "Tensor location, Tensor w_conv, Tensor? b_conv, Tensor w_f, int activation, "
    "float negative_slope, Tensor? seed, float dropout_p) -> (Tensor context, Tensor weights, "
    "Tensor features)",
    tags=TAGS,
)
# Bits of `needs`: 1 for the location, 2 for w_conv.
library.define(
    "location_convolution_backward(Tensor grad_features, Tensor location, Tensor w_conv, int needs)"
    " -> (Tensor grad_location, Tensor grad_w_conv)",
    tags=TAGS,
)
_op = torch.ops.bahdanau_fast.location_attend.default
# The same past OpOverload's __call__, for eager calls.
_now = _op._op
_convolution_backward = torch.ops.bahdanau_fast.location_convolution_backward.default
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


def _convolution_backward_fake(
    _: Tensor, location: Tensor, w_conv: Tensor, needs: int
) -> tuple[Tensor, Tensor]:
    return (
        location.new_empty(location.shape if needs & 1 else (0,)),
        w_conv.new_empty(w_conv.shape if needs & 2 else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    activation, negative_slope, seed, dropout_p = inputs[9:]
    ctx.save_for_backward(*inputs[:9], seed, *output[1:])
    ctx.numbers = activation, negative_slope, dropout_p
    ctx.shared = None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = [bool(ctx.needs_input_grad[at]) for at in _PLACES]
    results: list[Tensor | None] = [None] * 13
    for at, gradient in zip(_PLACES, _found(ctx, needed, *grads), strict=True):
        results[at] = gradient
    return tuple(results)


def _found(ctx: Any, needed: list[bool], *grads: Tensor | None) -> list[Tensor | None]:
    """Gradients of the differentiable inputs, as far as they are needed."""
    if all(grad is None for grad in grads):
        return [None] * len(_PLACES)
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled():
        found = _again(ctx, needed, grads)
    else:
        found = _gradients(ctx, needed, *grads)
    return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]


def _gradients(
    ctx: Any,
    needed: list[bool],
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    grad_features: Tensor | None,
) -> Sequence[Tensor | None]:
    *tensors, location, w_conv, _, w_f, seed, weights, features = ctx.saved_tensors
    activation, negative_slope, dropout_p = ctx.numbers
    through = any(needed[4:7])  # the convolution
    kept = onto = None
    if ctx.shared is not None and ctx.shared.is_awaited():
        kept = ctx.shared.pending.sums()
        onto = kept.keys
        if needed[2] and grad_context is not None and dropout_p == 0.0:
            kept.add(weights.detach(), grad_context)
            needed[2] = False
    wanted = [needed[0], needed[1] and onto is None, *needed[2:4], through, needed[7]]
    inputs = (*tensors, features, w_f, activation, negative_slope, seed, dropout_p)
    *found, grad, grad_w_f = general.attend_backward(
        inputs, weights, grad_context, grad_weights, wanted, onto
    )
    if kept is not None and needed[1]:
        kept.keys, needed[1] = found[1] if onto is None else onto, False
    if not through:
        return (*found, None, None, None, grad_w_f)
    if grad_features is not None:
        grad = grad + grad_features
    needs = needed[4] + 2 * needed[5]
    convolution = _convolution_backward(grad, location, w_conv, needs) if needs else (None, None)
    return (*found, *convolution, grad.sum((0, 1)) if needed[6] else None, grad_w_f)


def _again(ctx: Any, needed: list[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    *inputs, seed, weights, _ = ctx.saved_tensors
    activation, negative_slope, dropout_p = ctx.numbers
    valid_lens = inputs.pop(4)

    def scores(*tensors: Any) -> tuple[Tensor, Tensor]:
        queries, keys, _, w_v, location, w_conv, b_conv, w_f = tensors
        features = convolved(location, w_conv, b_conv)
        inside = general.inside_of(features, w_f, activation, negative_slope)
        return reference.projected_scores(queries, keys, w_v, inside), features

    link = Link(inputs[2], seed, dropout_p)
    return attend_again(scores, inputs, needed, weights, valid_lens, link, grads)


torch.library.register_fake("bahdanau_fast::location_attend", _fake, lib=library)
torch.library.register_fake(
    "bahdanau_fast::location_convolution_backward", _convolution_backward_fake, lib=library
)
torch.library.register_autograd(
    "bahdanau_fast::location_attend", _backward, setup_context=_setup_context, lib=library
)


class _Located(torch.autograd.Function):
    """The same for eager calls: gives the weights; the context gets a node behind them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, w_f, rest, shared, lifetime, link = inputs
        valid_lens, *numbers = rest
        given = (*tensors[:4], valid_lens, *tensors[4:], w_f, *numbers)
        with torch._C._AutoDispatchBelowAutograd():
            output = _now(*given)
        _setup_context(ctx, given, output)
        ctx.shared, ctx.link = shared, link
        ctx.due = None if lifetime is None else lifetime.begin()
        link.context, weights, _ = output
        made: Tensor = weights
        return made

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = [bool(need) for need in ctx.needs_input_grad[: len(_PLACES)]]
        grad_context = ctx.link.take()
        needed[2] = needed[2] and grad_context is not None
        found = _found(ctx, needed, grad_context, grad_weights, None)
        if ctx.due is not None and ctx.due.after_backward():
            ctx.shared = None
        return (*found, None, None, None, None)


# The weights; with queries, keys, values, w_v, location, w_conv, b_conv, w_f, the other inputs,
# shared node, lifetime and link.
_located: Callable[..., Tensor] = _Located.apply


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
    traced: bool,
    shared: SharedNode | None,
    lifetime: Lifetime | None,
) -> tuple[Tensor | None, Tensor, Link | None]:
    """Context (B,Tq,Dv) and weights (B,Tq,Tk), these fp64 for fp64 and else fp32; and None.

    Of a recorded call the context is in the link, which is the third result.

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
        traced: the call is traced: it has to be the operator itself.
        shared: the node that keys, values and w_v are behind, which their gradients are left to.
        lifetime: of the nodes that this call shares with others.
    """
    _, *others = general.numbers(inside)
    w_f, *numbers = others
    tensors = (queries, keys, values, w_v, location, w_conv, b_conv, w_f)
    given = (*tensors[:4], valid_lens, *tensors[4:], *numbers, seed, dropout_p)
    if traced:
        context, weights, _ = _op(*given)
        return context, weights, None
    if checks.needs_gradient(*tensors):
        rest, link = (valid_lens, *numbers, seed, dropout_p), Link(values, seed, dropout_p)
        return None, _located(*tensors, rest, shared, lifetime, link), link
    with torch._C._AutoDispatchBelowAutograd():
        context, weights, _ = _now(*given)
    return context, weights, None
