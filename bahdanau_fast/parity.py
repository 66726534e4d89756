"""The parity rule: how far a backend may be from the exact result.

For context, weights and every gradient::

    max|ours - exact| <= 2 * max|eager - exact| + atol

``exact`` is the reference in float64 on the same inputs, ``eager`` is the reference in the tested
dtype, and ``atol`` is two roundings of the result's largest element in that dtype.
``python -m bahdanau_fast check``, the benchmarks and the tests share this rule.

A gradient is a sum of many products, and eager's error is that of one order of adding them. A
library picks it by the shape: cut finely, a sum adds little to the roundings of its products, and a
right result in another order would not be within twice the error. Products of both signs add up to
about ``sqrt(k)`` of them after k additions, each of which rounds what is there: a run of
:data:`RUN` additions has the variance of ``RUN / 2`` roundings of each product, and adding up the
runs less than that. So benchmarks, whose eager results are cut otherwise than the calls they time,
add ``sqrt(RUN / 2)`` times what the exact result changes by if each product of a score and of its
gradient is rounded once (:func:`rounded_products`), in no less than fp32, as sums are. A single run
of 40 000 has 35 times as much, and breaks the rule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["RUN", "allowed", "error", "rounded_products"]

#: Additions one after the other that a right sum may have.
RUN = 32


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, computed in float64.

    Args:
        result: any shape, any floating dtype.
        exact: the same shape.

    Returns:
        ``max|result - exact|``; 0 for empty tensors, inf if the difference is inf or NaN.

    >>> error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    0.5
    """
    if exact.numel() == 0:
        return 0.0
    largest = float((result.double() - exact.double()).abs().max())
    return math.inf if math.isnan(largest) else largest


def rounded_products(w_v: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A layer in the place of w_v for the reference: each product moved by up to a rounding.

    Args:
        w_v: (1,H) or (H,).
        dtype: that is tested; of half types, sums are fp32.
    """
    step = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    generator = torch.Generator(w_v.device).manual_seed(0)

    def layer(hidden: Tensor) -> Tensor:
        moved = torch.empty_like(hidden).uniform_(1 - step, 1 + step, generator=generator)
        return (hidden * moved) @ w_v.reshape(-1, 1)

    return layer


def allowed(
    eager_error: float,
    largest: float,
    dtype: torch.dtype,
    factor: float = 2.0,
    of_products: float = 0.0,
) -> float:
    """The largest error that the rule allows.

    Args:
        eager_error: ``max|eager - exact|``.
        largest: ``max|exact|``, the size of the result.
        dtype: of the tested result.
        factor: multiple of eager's error that is allowed.
        of_products: what the exact result changes by if each product is rounded once.

    Returns:
        ``factor * eager_error + atol + sqrt(RUN / 2) * of_products``, always above 0. If eager
        overflowed, the largest finite number, so that any finite result passes.

    >>> allowed(0.25, 1.0, torch.float32) == 0.5 + 2**-23
    True
    """
    info = torch.finfo(dtype)
    # A rounding is half a step of eps; the second term is the step of subnormal numbers.
    atol = info.eps * largest + info.smallest_normal * info.eps
    limit = factor * eager_error + atol + math.sqrt(RUN / 2) * of_products
    return limit if math.isfinite(limit) else sys.float_info.max
