"""Reads the figures of a run of ``bench``: names, ratios, bounds, growth. Measures nothing.

A run is the dictionary that ``bench`` writes as JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..workloads.cases import LIMIT_SLACK, MEMORY_BOUND
from ..workloads.shapes import AXES, LARGEST

__all__ = ["SPEEDUPS", "Kernel", "Speedup", "about", "bounds_met", "exponent"]
__all__ += [
    "kernels",
    "memory_points",
    "name_of",
    "peak_factor",
    "peer_rows",
    "roofs_of",
    "shape_rows",
]
__all__ += ["speedups", "time_points", "working_per_unit"]

Run = dict[str, Any]
Points = dict[str, list[tuple[int, float]]]

# Rows of the summary: (table, task, mode) -> description.
SPEEDUPS = {
    ("step", "step", "forward"): "one decoder step, keys projected",
    ("loop", "loop", "forward"): "unchanged d2l loop of 50 steps",
    ("loop", "loop", "train"): "unchanged d2l loop of 50 steps, forward and backward",
    ("many-queries", "projected", "forward"): "many queries, after the projections",
    ("many-queries", "projected", "train"): "many queries, after the projections, forward and "
    "backward",
    ("many-queries", "full", "forward"): "many queries, projections included",
    ("many-queries", "full", "train"): "many queries, projections included, forward and backward",
    ("overhead", "full", "forward"): "toy call",
    ("overhead", "full", "train"): "toy call, forward and backward",
}
_OURS = ("ours module", "ours memory", "ours op")
_NOT_PEERS = ("rewrite eager", "d2l compiled", "compiled max-autotune")

# Arithmetic of our CPU forward per element of (B,Tq,Tk,H), where four elements share a division.
_OPERATIONS = {
    "multiply_add": (4.25, "4.25 multiply-adds per element"),
    "divide": (0.25, "a quarter of a division per element"),
}


@dataclass(frozen=True)
class Speedup:
    """Our time in one row, and the times of the other providers.

    Attributes:
        what: description of the row.
        shape: its sizes.
        seconds: our median.
        others: median of each other provider, by name.
    """

    what: str
    shape: dict[str, Any]
    seconds: float
    others: dict[str, float]

    @property
    def against(self) -> dict[str, float]:
        """Each other provider's time over ours."""
        return {name: time / self.seconds for name, time in self.others.items()}

    @property
    def fastest(self) -> str:
        """The fastest of the others."""
        return min(self.others, key=self.others.__getitem__)


@dataclass(frozen=True)
class Kernel:
    """A point of the roofline plot.

    Attributes:
        provider: whose kernel it is.
        shape: name of the row.
        intensity: elements of (B,Tq,Tk,H) per byte of keys and values.
        rate: elements per second.
    """

    provider: str
    shape: str
    intensity: float
    rate: float


def name_of(run: Run) -> str:
    """The machine's processor and cores, as headings have it."""
    where = run["machine"]
    model = re.sub(r"\((R|TM)\)| Processor\b", "", where["cpu"])
    return f"{model}, {where['cores'].split()[0]} cores"


def about(run: Run) -> str:
    """Machine, versions and commit in one line."""
    where = run["machine"]
    threads = where["cores"].partition("(")[2].rstrip(")")
    parts = [name_of(run), threads, where.get("cpu kernels", "").rpartition(", ")[2], "fp32"]
    parts += [f"torch {where['torch']}", f"commit {where['commit']}", where.get("note", "")]
    return ", ".join(filter(None, parts))


def bounds_met(run: Run) -> tuple[int, int]:
    """How many bounds of the run hold, and how many there are."""
    held = [bound["holds"] for row in run["rows"] for bound in row["bounds"]]
    held += [limit["behind"]["median"] <= LIMIT_SLACK for limit in run.get("choices", [])]
    peak = run["peak_memory"].get("ours op, projected")
    if peak is not None:
        held.append("error" not in peak and peak_factor(peak) <= MEMORY_BOUND)
    return sum(held), len(held)


def peak_factor(peak: dict[str, Any]) -> float:
    """Peak memory over inputs, outputs and gradients."""
    return float(max(peak["resident"], peak["allocated"]) / peak["tensors"])


def shape_rows(run: Run) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of the list of shapes, each with its bound: no baseline may be faster than ours."""
    for row in run["rows"]:
        if row["table"] == "shapes":
            yield from ((row, bound) for bound in row["bounds"])


def speedups(run: Run, wanted: dict[tuple[str, str, str], str] = SPEEDUPS) -> list[Speedup]:
    """Our speed in the rows of some tables, each shape once.

    Args:
        run: the figures.
        wanted: (table, task, mode) of the rows, and how to describe them.
    """
    found: dict[Any, Speedup] = {}
    for row in run["rows"]:
        key = (row["table"], row["task"], row["mode"])
        times = {name: spread["median"] for name, spread in row["seconds"].items()}
        ours = next((times[name] for name in _OURS if name in times), None)
        others = {name: time for name, time in times.items() if not name.startswith("ours")}
        if key in wanted and ours is not None:
            speedup = Speedup(wanted[key], row["shape"], ours, others)
            found.setdefault((*key, row["shape"]["name"]), speedup)
    return list(found.values())


def peer_rows(run: Run) -> list[Speedup]:
    """The rows with other libraries in them; of the baselines, eager and compiled code stay."""
    tasks = {"step": "one decoder step, keys projected", "projected": "after the projections"}
    found = speedups(run, {("peers", task, "forward"): what for task, what in tasks.items()})
    for row in found:
        for name in _NOT_PEERS:
            row.others.pop(name, None)
    return found


def roofs_of(rates: dict[str, float], dram_read: float) -> dict[str, Any]:
    """The roofs of the roofline plot, in bytes and in elements of (B,Tq,Tk,H) per second.

    Args:
        rates: operations per second, from ``compute_roofs``.
        dram_read: bytes per second.
    """
    ours = {
        words: rates[name] / count for name, (count, words) in _OPERATIONS.items() if name in rates
    }
    return {"dram_read": dram_read, "tanh": rates["tanh"], "ours": ours, "rates": rates}


def kernels(run: Run) -> list[Kernel]:
    """The forward rows on projected queries and keys: d2l's eager code, compiled, and ours."""
    found: dict[tuple[str, str], Kernel] = {}
    for row in run["rows"]:
        if row["mode"] != "forward" or row["task"] not in ("projected", "scan"):
            continue
        if row["table"] == "peers" or row["table"].startswith("sweep"):
            continue
        shape = row["shape"]
        elements = shape["batch"] * shape["queries"] * shape["keys"] * shape["hidden"]
        read = 4 * shape["batch"] * shape["keys"] * (shape["hidden"] + shape["value_size"])
        name = shape["name"] + (", table kept" if row["task"] == "scan" else "")
        for provider in ("d2l eager", "compiled", "ours op"):
            if provider in row["seconds"]:
                seconds = row["seconds"][provider]["median"]
                found[provider, name] = Kernel(provider, name, elements / read, elements / seconds)
    return list(found.values())


def exponent(points: list[tuple[int, float]]) -> float:
    """The power that cost grows with: the slope of log y over log x by least squares.

    Only the ``LARGEST`` points with the largest x count: there, fixed cost no longer shows.

    Args:
        points: (x, y), both above zero.

    Raises:
        ValueError: fewer than two points.
    """
    chosen = sorted(points)[-LARGEST:]
    if len(chosen) < 2:
        raise ValueError(f"points must be at least 2, got {len(chosen)}")
    return _slope([(math.log(x), math.log(y)) for x, y in chosen])


def _slope(points: list[tuple[float, float]]) -> float:
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    across = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return across / sum((x - middle_x) ** 2 for x, _ in points)


def time_points(run: Run, axis: str, mode: str) -> dict[str, list[tuple[int, Any]]]:
    """(size, spread of seconds) of every provider along an axis."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for row in run["rows"]:
        if row["table"] == f"sweep-{axis}" and row["mode"] == mode:
            for name, spread in row["seconds"].items():
                found.setdefault(name, []).append((row["shape"][AXES[axis]], spread))
    return found


def memory_points(run: Run, axis: str, working: bool = False) -> Points:
    """(size, bytes at the peak) of every provider along an axis.

    Args:
        run: the figures.
        axis: Tk, Tq, H or B.
        working: only what goes beyond inputs, outputs and gradients.
    """
    found: Points = {}
    for peak in run.get("memory_growth", []):
        if peak["axis"] == axis and "error" not in peak:
            size = max(peak["resident"], peak["allocated"]) - (peak["tensors"] if working else 0)
            found.setdefault(peak["provider"], []).append((peak["size"], size))
    return found


def working_per_unit(run: Run, axis: str) -> dict[str, float]:
    """Bytes of working memory that one more unit of a size costs, by least squares."""
    points = memory_points(run, axis, working=True)
    return {name: _slope([(x, y) for x, y in of_name]) for name, of_name in points.items()}
