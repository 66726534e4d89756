"""What the parity rule grants to the order of a sum.

A gradient is a sum of many products, and eager's error is that of one order of adding them. A
library picks it by the shape: cut finely, a sum adds little to the roundings of its products, and a
right result in another order would not be within twice the error. Products of both signs add up to
about ``sqrt(k)`` of them after k additions, each of which rounds what is there: a run of
:data:`RUN` additions has the variance of ``RUN / 2`` roundings of each product, and adding up the
runs less than that. So here, where eager's sums are cut otherwise than those of the calls, the rule
has ``sqrt(RUN / 2)`` times what the exact result changes by if each product of a score and of its
gradient is rounded once, in no less than fp32, as sums are. A single run of 40 000 has 35 times as
much, and breaks the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: Additions one after the other that a right sum may have.
RUN = 32
#: Times what :func:`rounded_products` changes the exact result by.
GRANTED = math.sqrt(RUN / 2)


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
