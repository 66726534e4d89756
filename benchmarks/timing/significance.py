"""Is the new code slower? Statistics of two versions timed in turn.

A pair of processes, one per version, is timed round by round; then both are started anew, several
times. Within a pair, what disturbs a round disturbs both sides, so the logarithm of the ratio is
taken round by round and its median kept. But a process also has luck of its own (where its pages
and its threads lie), which no number of rounds averages out: the unit of the statistics is
therefore the pair. The mean of the pairs' logarithms has Student's t distribution about the true
one; its interval, at a confidence shared out among the rows, is the noise bound.

A difference is called when the whole interval lies further out than ``FLOOR``: below that, code is
moved by changes that have nothing to do with it (alignment, allocation order).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .measure import Timings

__all__ = ["CONFIDENCE", "FLOOR", "Verdict", "judge"]

FLOOR = 0.03
SLOWDOWN = 1.15  # what must not be missed
CONFIDENCE = 0.99  # that no row of a comparison is called by chance


@dataclass(frozen=True)
class Verdict:
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


def judge(pairs: list[Timings], new: str, old: str, rows: int = 1) -> Verdict:
    """The verdict of one row.

    Args:
        pairs: the timings of each pair of processes; at least two.
        new: name of the new version in them.
        old: of the old one.
        rows: how many verdicts are given together.

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
    return Verdict(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
