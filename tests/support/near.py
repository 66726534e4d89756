"""Cases on either side of a magnitude at which kernels change path, or hold a number back.

Drawn normal numbers never put four neighbours there at once: here all projections of a batch row
have nearly one size.
"""

from dataclasses import dataclass

import parity
import torch
from parity import Case

# Twice and half a magnitude are wrong magnitudes too: on all of these, one of the two would show.
FACTORS = (0.55, 0.9, 1.1, 1.8)


@dataclass
class Near(Case):
    """Projections of nearly one size; those of every second batch row are negated."""

    of_query: float = 0.0  # the least of a query
    of_key: float = 0.0  # of a key; of opposite signs, both leave a sum that is small beside them
    spread: float = 0.08  # what is added at random, as a share
    fourth: float = 1.0  # times every fourth hidden unit: a neighbour of another size

    def draw(self, dtype):
        """As for any case, but queries, keys and what projects them."""
        drawn = super().draw(dtype)
        generator = torch.Generator().manual_seed(self.seed)
        for name, size in (("queries", self.of_query), ("keys", self.of_key)):
            near = 1 + self.spread * torch.rand(drawn[name].shape, generator=generator).double()
            near[1::2] *= -1
            near[..., ::4] *= self.fourth
            drawn[name] = (size * near).to(dtype).double()
        drawn["w_q"] = drawn["w_k"] = torch.eye(self.H, dtype=torch.float64)
        return drawn


def near(sizes, hidden, **more):
    """A case of Near whose queries and keys need no projection."""
    widths = {"H": hidden, "Dq": hidden, "Dk": hidden, "bias": False}
    return Near(**{**sizes, **widths, **more})


def of_saturated(case, dtype):
    """What eager's error is at least, by result, where units are saturated.

    Eager's tanh of such a unit is one, without a rounding, and its scores are as exact as their
    sum: its error counts as a rounding of every term of a score at least.
    """
    of_score = torch.finfo(dtype).eps / 2 * float(case.draw(dtype)["w_v"].abs().sum())
    return dict.fromkeys(("context", "weights", "d values"), of_score)


def check(case, dtype, function=parity.fused):
    """Assert the parity rule, in fp64 as :func:`of_saturated` says."""
    parity.check(case, dtype, function, of_saturated(case, dtype) if dtype == torch.float64 else {})
