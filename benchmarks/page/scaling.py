"""How time and memory grow with each size: exponents, from the figures of a run.

Over the largest sizes of a sweep, where a call's fixed cost is behind it, the logarithm of time is
a straight line of the logarithm of the size; its slope is the exponent.
"""

from __future__ import annotations

import math
from typing import Any

from ..workloads.shapes import AXES

__all__ = ["LARGEST", "exponent", "memory_points", "time_points", "working_per_unit"]

LARGEST = 3
Points = dict[str, list[tuple[int, float]]]


def exponent(points: list[tuple[int, float]]) -> float:
    """The slope of log y over log x by least squares, of the ``LARGEST`` points with the largest x.

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


def time_points(data: dict[str, Any], axis: str, mode: str) -> dict[str, list[tuple[int, Any]]]:
    """(size, spread of seconds) of every provider along an axis."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for row in data["rows"]:
        if row["table"] == f"sweep-{axis}" and row["mode"] == mode:
            for name, spread in row["seconds"].items():
                found.setdefault(name, []).append((row["shape"][AXES[axis]], spread))
    return found


def memory_points(data: dict[str, Any], axis: str, working: bool = False) -> Points:
    """(size, bytes at the peak) of every provider along an axis.

    Args:
        data: the figures of a run.
        axis: Tk, Tq, H or B.
        working: only what goes beyond inputs, outputs and gradients.
    """
    found: Points = {}
    for peak in data.get("memory_growth", []):
        if peak["axis"] == axis and "error" not in peak:
            size = max(peak["resident"], peak["allocated"]) - (peak["tensors"] if working else 0)
            found.setdefault(peak["provider"], []).append((peak["size"], size))
    return found


def working_per_unit(data: dict[str, Any], axis: str) -> dict[str, float]:
    """Bytes of working memory that one more unit of a size costs, by least squares."""
    points = memory_points(data, axis, working=True)
    return {name: _slope([(x, y) for x, y in of_name]) for name, of_name in points.items()}
