"""Second derivatives: backward of an operator, made of what can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["differentiate_again"]


def differentiate_again(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    needed: list[bool],
    dropout_p: float,
    output_grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again (``create_graph=True``), by the reference.

    Args:
        function: the reference on ``inputs``, giving the results of the operator.
        inputs: what the operator was called with.
        needed: which of them want a gradient.
        dropout_p: of that call.
        output_grads: gradients of the results, the first that of the context.

    Returns:
        A gradient, or None, per input.

    Raises:
        NotImplementedError: with dropout, whose mask the reference does not know.
    """
    if dropout_p > 0.0 and output_grads[0] is not None:
        raise NotImplementedError(
            "a second derivative through dropped-out attention weights is not implemented: "
            "use backend='reference', or dropout 0"
        )
    # Aliases: where one input was computed from another (a query from the keys, projected keys from
    # values that are the keys) a gradient stops at the operator, and does not go on to that other.
    inputs = [
        _alias(tensor) if need and tensor is not None else tensor
        for tensor, need in zip(inputs, needed, strict=True)
    ]
    outputs = function(*inputs)
    used = [
        (out.to(grad.dtype), grad)
        for out, grad in zip(outputs, output_grads, strict=True)
        if out is not None and grad is not None
    ]
    grads = iter(
        torch.autograd.grad(
            [out for out, _ in used],
            [
                tensor
                for tensor, need in zip(inputs, needed, strict=True)
                if need and tensor is not None
            ],
            [grad for _, grad in used],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(grads) if need else None for need in needed]


def _alias(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor of its own, that has a gradient even if it was frozen since."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
