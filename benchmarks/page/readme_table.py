"""The table of README.md and of docs/performance.md's first lines, from the figures of a run."""

from __future__ import annotations

from typing import Any

from .figures import SPEEDUPS, Speedup, fastest_in_shapes, milliseconds, shape_text, speedups
from .tables import markdown

__all__ = ["lines"]


def _cells(row: Speedup) -> list[str]:
    best = min(row.others, key=row.others.__getitem__)
    d2l = row.others["d2l eager"]
    return [
        f"{row.what} {shape_text(row.shape)}",
        f"{milliseconds(d2l)} ms",
        f"{milliseconds(row.others[best])} ms ({best})",
        f"{milliseconds(row.seconds)} ms",
        f"{d2l / row.seconds:.1f}x",
        f"{row.others[best] / row.seconds:.1f}x",
    ]


def lines(data: dict[str, Any]) -> list[str]:
    """The table in Markdown, of the rows the run has, and a sentence on all the others."""
    heads = ["what (B, Tq, Tk, H)", "d2l, eager", "fastest baseline", "ours", "against d2l"]
    rows = [row for row in speedups(data, SPEEDUPS) if "d2l eager" in row.others]
    return [*markdown([*heads, "against it"], map(_cells, rows)), "", fastest_in_shapes(data)]
