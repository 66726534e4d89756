"""The tables of ``bench``: their rows, and the bounds that each row has to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .shapes import (
    LARGEST,
    LIST,
    LOOP,
    MANY_QUERIES,
    QUICK,
    SCAN,
    STEPS_ON_MEMORY,
    SWEEPS,
    TOY,
    Shape,
)

__all__ = [
    "LIMIT_SLACK",
    "MEMORY_BOUND",
    "MODES",
    "SUBJECT",
    "TITLES",
    "Bound",
    "Case",
    "Mode",
    "cases",
]

Mode = Literal["forward", "graph", "train"]
MODES = {"forward": "forward", "graph": "forward, graph kept", "train": "forward + backward"}

# Peak memory of our op over inputs, outputs and gradients, at most.
MEMORY_BOUND = 1.2
# Share of the DRAM bandwidth that a step on a large memory reads with, at least.
BANDWIDTH_BOUND = 0.8
# Time of what auto takes near a limit, over that of the best way, at most.
LIMIT_SLACK = 1.10

# Above this, the projections take nearly all of a full call's time. They are the same BLAS calls in
# all providers, so these shapes are compared on projected queries and keys.
PROJECTION_FLOPS = 10**10
# Compiling takes about ten seconds a row, so training is compared on a few shapes.
TRAINED = ("d2l-toy", "d2l-nmt", "tacotron2", "tsp")
AUTOTUNE = ("compiled max-autotune",)

# Our provider that is compared with the baselines in each task.
SUBJECT = {
    "full": "ours module",
    "again": "ours module",
    "step": "ours memory",
    "projected": "ours op",
    "scan": "ours op",
    "loop": "ours module",
}

TITLES = {
    "step": "One decoder step on a memory, keys projected beforehand",
    "loop": "Unchanged d2l loop of 50 dependent steps on the same keys, their projection included",
    "many-queries": "Many queries at once",
    "bandwidth": "One step on a projected query, against the DRAM read bandwidth",
    "shapes": "Every shape of the list",
    **{f"sweep-{axis}": f"After the projections, by {axis}" for axis in SWEEPS},
    "peers": "Other libraries, each in a process of its own",
    "overhead": "What one call costs at the toy shape: nearly all of it is Python",
}


@dataclass(frozen=True)
class Bound:
    """Ours must be at least so many times as fast as the fastest of the named providers.

    ``against`` is a provider, a group of them, ``baseline`` for all that are not ours, or
    ``DRAM`` for the share of the bandwidth.
    """

    against: str
    at_least: float


@dataclass(frozen=True)
class Case:
    """One row: a task on a shape, as forward without gradients, forward with graph, or training."""

    table: str
    shape: Shape
    task: str
    mode: Mode = "forward"
    bounds: tuple[Bound, ...] = ()
    extra: tuple[str, ...] = ()  # providers, or groups of them, that run in this row alone
    share: float = 1.0  # of the time that a row usually gets

    @property
    def key(self) -> tuple[Shape, str, Mode, tuple[str, ...]]:
        """Rows with the same key are measured once."""
        return self.shape, self.task, self.mode, self.extra


def _named(*needed: float) -> tuple[Bound, ...]:
    return tuple(map(Bound, ("compiled", "eager"), needed))


def _step_cases() -> Iterator[Case]:
    for shape, needed in zip(STEPS_ON_MEMORY, (5, 8, 6, 2), strict=True):
        extra = AUTOTUNE if shape is STEPS_ON_MEMORY[0] else ()  # tuning takes long
        yield Case("step", shape, "step", bounds=_named(needed), extra=extra)


def _loop_cases() -> Iterator[Case]:
    yield Case("loop", LOOP, "loop", "forward", (Bound("d2l eager", 25),))
    yield Case("loop", LOOP, "loop", "train", (Bound("d2l eager", 15),))


def _many_queries_cases() -> Iterator[Case]:
    bounded = MANY_QUERIES[0]
    yield Case("many-queries", bounded, "projected", "forward", _named(15, 100))
    yield Case("many-queries", bounded, "projected", "train", _named(20, 50))
    yield Case("many-queries", bounded, "full", "forward", _named(5, 28))
    yield Case("many-queries", bounded, "full", "train", _named(7, 16))


def _shape_cases(quick: bool) -> Iterator[Case]:
    for shape in LIST:
        if quick and shape.name not in QUICK:
            continue
        not_slower = (Bound("baseline", 1.0),)
        task = "full" if shape.projection_flops <= PROJECTION_FLOPS else "projected"
        yield Case("shapes", shape, task, "forward", not_slower)
        if shape.name in TRAINED:
            yield Case("shapes", shape, task, "train", not_slower)


def _overhead_cases() -> Iterator[Case]:
    modes: tuple[Mode, ...] = ("forward", "graph", "train")
    for mode in modes:
        yield Case("overhead", TOY, "full", mode)
    yield Case("overhead", TOY, "again")
    yield Case("overhead", TOY, "step")
    yield Case("overhead", replace(TOY, lens="none"), "full")


def _peer_cases() -> Iterator[Case]:
    by_name = {shape.name: shape for shape in (*LIST, *STEPS_ON_MEMORY)}
    for task, name in (
        ("projected", "d2l-nmt"),
        ("projected", "parallel-4"),
        ("step", "step-64"),
    ):
        yield Case("peers", by_name[name], task, extra=("peer",))


def _sweep_cases(quick: bool) -> Iterator[Case]:
    for axis, shapes in SWEEPS.items():
        # Compiling a training step takes long: only the sizes that its exponent is fitted to.
        modes: dict[Mode, tuple[Shape, ...]] = {"forward": shapes, "train": shapes[-LARGEST:]}
        if quick:
            modes = {"forward": shapes[:3]}
        for mode, chosen in modes.items():
            for shape in chosen:
                yield Case(f"sweep-{axis}", shape, "projected", mode, share=0.5)


def cases(quick: bool = False, only: str | None = None) -> list[Case]:
    """The rows in the order of the tables.

    Args:
        quick: leave out the large shapes, the compilations that take long, and the peers.
        only: keep the rows whose table or shape contains this.
    """
    scan = Case("bandwidth", SCAN, "scan", bounds=(Bound("DRAM", BANDWIDTH_BOUND),))
    found = [*_step_cases(), *_loop_cases(), *_many_queries_cases(), scan]
    found += [*_shape_cases(quick), *_overhead_cases(), *_sweep_cases(quick)]
    found = [replace(case, extra=()) for case in found] if quick else [*found, *_peer_cases()]
    if only:
        found = [case for case in found if only in case.table or only in case.shape.name]
    return found
