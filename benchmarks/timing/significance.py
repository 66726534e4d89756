"""Statistics of two versions timed in turn: is the new one slower?

Two processes, one for each version, are timed round by round; then both are started anew, several
times. A disturbance of a round affects both processes, so each pair of processes gives the median
of the ratios of its rounds. The placement of pages and threads, however, differs from process to
process and stays for all rounds. The pair is therefore the unit of the statistics: the mean of the
pairs' log ratios follows Student's t distribution, and its confidence interval, at a confidence
shared out among the rows, is the noise bound.

Two versions differ if the whole interval lies beyond ``FLOOR``. Smaller differences also come from
unrelated changes (alignment, order of allocations).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .measure import Timings

__all__ = ["CONFIDENCE", "FLOOR", "Difference", "judge"]

FLOOR = 0.03
SLOWDOWN = 1.15  # the smallest slowdown that must be seen
CONFIDENCE = 0.99  # that no row of a comparison differs by chance alone


@dataclass(frozen=True)
class Difference:
    """The new version's time over the old one's, with its bounds.

    Attributes:
        ratio: above 1 the new one is slower.
        low, high: the ratio lies between them, at the confidence asked for.
    """

    ratio: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """``slower``, ``faster``, ``no difference``, or ``too noisy`` to see ``SLOWDOWN``."""
        if self.low > 1 + FLOOR:
            return "slower"
        if self.high < 1 / (1 + FLOOR):
            return "faster"
        seen = (SLOWDOWN / (1 + FLOOR)) ** 2  # its interval, as wide as this one, ends at the floor
        return "no difference" if self.high / self.low < seen else "too noisy"


def judge(pairs: list[Timings], new: str, old: str, rows: int = 1) -> Difference:
    """The difference in one row.

    Args:
        pairs: timings of each pair of processes; at least two.
        new: name of the new version in them.
        old: name of the old version.
        rows: how many rows are compared together.

    Raises:
        ValueError: fewer than two pairs.
    """
    if len(pairs) < 2:
        raise ValueError(f"pairs must be at least 2, got {len(pairs)}")
    from scipy.stats import t

    logs = [math.log(pair.ratio(new, old).median) for pair in pairs]
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = error * float(t.ppf(1 - (1 - CONFIDENCE) / rows / 2, len(logs) - 1))
    return Difference(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
