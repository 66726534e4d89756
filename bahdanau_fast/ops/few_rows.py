"""``x @ weight.T + bias`` of a few rows by this package's product; fp32, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.ops.operator import Operator


def _backward_fake(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = grad.shape[-1]
    return (
        grad.new_empty((0,) if weight is None else (*grad.shape[:-1], weight.shape[1])),
        grad.new_empty((0,) if x is None else (hidden, x.shape[-1])),
        grad.new_empty((hidden if of_bias else 0,)),
    )


_project = Operator(
    "project(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
# The gradient of x needs the weight, the gradient of the weight needs x.
_project_backward = Operator(
    "project_backward(Tensor grad, Tensor? x, Tensor? weight, bool of_bias) -> "
    "(Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _backward_fake,
)
#: ``x @ weight.T + bias`` of x (...,D), weight (H,D) and bias (H,) or None; not differentiable.
multiply = _project.now


@functools.cache
def is_there() -> bool:
    """Whether the C++ extension is loaded; it is with the package, or never."""
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel("bahdanau_fast::project", "CPU"))


def gradients(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, of_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x unless weight is None, weight unless x is, and bias; not differentiable again."""
    grad_x, grad_weight, grad_bias = _project_backward.now(grad, x, weight, of_bias)
    return (
        None if weight is None else grad_x,
        None if x is None else grad_weight,
        grad_bias if of_bias else None,
    )
