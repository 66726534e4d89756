"""The parity rule: how far a backend may be from the exact result.

For context, weights and every gradient::

    max|ours - exact| <= 2 * max|eager - exact| + atol

``exact`` is the reference in float64 on the same inputs, ``eager`` is the reference in the tested
dtype, and ``atol`` is two roundings of the result's largest element in that dtype.
``python -m bahdanau_fast check``, the benchmarks and the tests share this rule.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

__all__ = ["allowed", "error"]


def error(result: Tensor, exact: Tensor) -> float:
    """``max|result - exact|`` in float64; 0 for empty tensors, inf if the difference is NaN.

    >>> error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    0.5
    """
    if exact.numel() == 0:
        return 0.0
    largest = float((result.double() - exact.double()).abs().max())
    return math.inf if math.isnan(largest) else largest


def allowed(eager_error: float, largest: float, dtype: torch.dtype, factor: float = 2.0) -> float:
    """``factor * eager_error + atol``, always above 0; ``largest`` is ``max|exact|``.

    >>> allowed(0.25, 1.0, torch.float32) == 0.5 + 2**-23
    True
    """
    info = torch.finfo(dtype)
    # A rounding is half a step of eps; the second term is the step of subnormal numbers.
    atol = info.eps * largest + info.smallest_normal * info.eps
    limit = factor * eager_error + atol
    # If eager overflowed, any finite result passes.
    return limit if math.isfinite(limit) else sys.float_info.max
