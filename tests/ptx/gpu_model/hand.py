"""Times that a reviewer worked out by hand for an H200, before there was a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from .counted import Problem, launches, works
from .gpus import GPUS
from .times import modelled

__all__ = ["HAND", "rows"]


@dataclass(frozen=True)
class Hand:
    """A kernel of a call, and the microseconds worked out for it, from and to.

    Attributes:
        trips: to memory of a block that the calculation has, where the machine counts more.
    """

    kernel: str
    call: Problem
    least: float
    most: float
    trips: int | None = None


HAND = (
    Hand("decode_forward 1", Problem(64, 1, 400, 512, 512), 35, 35),
    Hand("decode_forward 1", Problem(256, 1, 400, 512, 512), 65, 75),
    Hand("tile_scores", Problem(16, 512, 512, 512, 512), 290, 290, 32),
    Hand("decode_forward 1", Problem(64, 1, 50, 512, 512, query_size=512), 7, 12, 22),
    Hand("tile_scores", Problem(32, 33, 34, 1024, 1024), 65, 100, 64),
    Hand("tile_scores", Problem(4, 128, 128, 512, 512), 50, 50, 32),
)


def rows() -> Iterator[list[str]]:
    """A row for each: by hand, modelled, how far apart, and modelled with the trips by hand."""
    gpu = GPUS["H200"]
    for hand in HAND:
        p = hand.call
        work = next(w for w in works(launches(p, gpu), gpu) if w.name == hand.kernel)
        time = modelled(gpu, work)
        got = time.seconds * 1e6
        nearest = min(max(got, hand.least), hand.most)
        by_hand = f"{hand.least:g}" + (f" to {hand.most:g}" if hand.most > hand.least else "")
        projected = ", W_q inside" if p.query_size else ""
        alike = dataclasses.replace(work, trips=hand.trips or work.trips, last_trips=0)
        fewer = f"{hand.trips}, {modelled(gpu, alike).seconds * 1e6:.3g}" if hand.trips else "-"
        yield [
            f"`{hand.kernel}` ({p.batch},{p.queries},{p.keys},{p.hidden}){projected}",
            by_hand, f"{got:.3g}", f"{100 * (got / nearest - 1):+.0f} %", time.bound,
            f"{work.trips:.0f}", fewer,
        ]  # fmt: skip
