"""Second derivatives: backward of an operator by differentiable operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiate_again(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of a function of the reference that can be differentiated again, as needed."""
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
    input_grads = torch.autograd.grad(
        [out for out, _ in used],
        wanted,
        [grad for _, grad in used],
        create_graph=True,
        allow_unused=True,
    )
    remaining = iter(input_grads)
    return [next(remaining) if need else None for need in needed]


def _alias(tensor: Tensor) -> Tensor:
    """A tensor of the same numbers that has a gradient even if the first was frozen since."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
