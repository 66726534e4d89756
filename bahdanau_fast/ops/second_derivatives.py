"""Second derivatives: backward of an operator, made of what can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bahdanau_fast.ops.context import Link, gradients_of_context

__all__ = ["attend_again", "differentiate_again"]


def attend_again(
    scores: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    weights: Tensor,
    seen: Tensor | None,
    link: Link,
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of attention that can be differentiated again (``create_graph=True``).

    Args:
        scores: the reference on ``inputs``, giving the scores (B,Tq,Tk), and whatever the operator
            gives beside context and weights.
        inputs: to be differentiated; the third are the values (B,Tk,Dv).
        needed: which of them want a gradient.
        weights: (B,Tq,Tk), a result of the operator, in its graph.
        seen: from :func:`reference.visible`, or None.
        link: what dropout depends on.
        grads: of context, weights and whatever follows, as far as they are there.

    Returns:
        A gradient, or None, per input.
    """
    (grad_context, grad_weights, *others), values = grads, inputs[2]
    grad_values = grad_scores = None
    if grad_context is not None:
        assert values is not None
        looked, grad_values = gradients_of_context(
            grad_context, weights, values, link, (True, needed[2])
        )
        assert looked is not None
        grad_weights = looked if grad_weights is None else looked + grad_weights
    if grad_weights is not None:
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        grad_weights = grad_weights.to(weights.dtype)
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
        if seen is not None:  # where a query sees nothing the weights are constants
            grad_scores = grad_scores.masked_fill(~seen, 0.0)
    asked = [*needed[:2], False, *needed[3:]]
    found = differentiate_again(scores, inputs, asked, (grad_scores, *others))
    found[2] = grad_values
    return found


def differentiate_again(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by the reference.

    Args:
        function: the reference on ``inputs``.
        inputs: what the operator was called with.
        needed: which of them want a gradient.
        grads: of the function's results, as far as they are there.

    Returns:
        A gradient, or None, per input.
    """
    if not any(needed):
        return [None] * len(needed)
    # Aliases: where one input was computed from another (a query from the keys, projected keys from
    # values that are the keys) a gradient stops at the operator, and does not go on to that other.
    inputs = [
        None if tensor is None else _alias(tensor) if need else tensor.detach()
        for tensor, need in zip(inputs, needed, strict=True)
    ]
    used = [
        (out.to(grad.dtype), grad)
        for out, grad in zip(function(*inputs), grads, strict=False)
        if grad is not None
    ]
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = torch.autograd.grad(
        [out for out, _ in used],
        wanted,
        [grad for _, grad in used],
        create_graph=True,
        allow_unused=True,
    )
    each = iter(found)
    return [next(each) if need else None for need in needed]


def _alias(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor of its own, that has a gradient even if it was frozen since."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
