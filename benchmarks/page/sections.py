"""The sections of docs/performance.md on one machine."""

from __future__ import annotations

from typing import Any

from ..workloads.cases import LIMIT_SLACK, TITLES
from ..workloads.shapes import LARGEST, SWEEPS
from .figures import (
    Run,
    about,
    exponent,
    memory_points,
    peer_rows,
    speedups,
    time_points,
    working_per_unit,
)
from .plots import file_name, is_drawn
from .tables import (
    limit_table,
    markdown,
    milliseconds,
    peak_table,
    row_table,
    shape_text,
    size_text,
)

__all__ = ["NOTHING", "of_machine", "picture"]

NOTHING = "Not measured in this run."


def picture(run: Run, name: str, text: str, folder: str) -> list[str]:
    """A plot as a Markdown image; nothing where the run has no figures for it."""
    if not is_drawn(run, name):
        return []
    return [f"![{text}]({folder}{file_name(run, name)})", ""]


def of_machine(run: Run, folder: str) -> list[str]:
    """All that one run of ``bench`` measured.

    Args:
        run: the figures.
        folder: of the plots, as links have it: empty, or ending in a slash.
    """
    grown = picture(run, "sweeps", "time against Tk, Tq, H and B", folder)
    kept = picture(run, "memory", "peak memory against Tk and H", folder)
    roofline = picture(run, "roofline", "elements per second under the roofs", folder)
    return [
        f"{about(run)}; a run of {run['seconds']:.0f} s.",
        "",
        *("### In short", "", *_summary(run)),
        *picture(run, "speedups", "times as fast as d2l's module and torch.compile", folder),
        *("### As the work grows", "", *grown, *_growth(run)),
        *("### Memory", "", *kept, *_memory(run)),
        *("### Roofs", "", *roofline, *_roofs(run)),
        *("### What auto chooses", "", *_limits(run)),
        *("### Other libraries", "", *_peers(run, folder)),
        *("### Every row", ""),
        *_rows(run),
    ]


def _summary(run: Run) -> list[str]:
    heads = ["what (B, Tq, Tk, H)", "d2l, eager", "fastest baseline", "ours"]
    cells = [
        [
            f"{row.what} {shape_text(row.shape)}",
            f"{milliseconds(row.others['d2l eager'])} ms",
            f"{milliseconds(row.others[row.fastest])} ms ({row.fastest})",
            f"{milliseconds(row.seconds)} ms",
            f"{row.against['d2l eager']:.1f}x",
            f"{row.against[row.fastest]:.1f}x",
        ]
        for row in speedups(run)
        if "d2l eager" in row.others
    ]
    if not cells:
        return [NOTHING, ""]
    return [*markdown([*heads, "d2l / ours", "fastest baseline / ours"], cells), ""]


def _growth(run: Run) -> list[str]:
    kinds = {
        "time, forward": lambda axis: _medians(time_points(run, axis, "forward")),
        "time, forward + backward": lambda axis: _medians(time_points(run, axis, "train")),
        "peak memory": lambda axis: memory_points(run, axis),
    }
    cells = []
    for kind, points_of in kinds.items():
        points = {axis: points_of(axis) for axis in SWEEPS}
        for name in dict.fromkeys(name for of_axis in points.values() for name in of_axis):
            values = (points[axis].get(name, []) for axis in SWEEPS)
            found = [f"{exponent(pairs):.2f}" if len(pairs) > 1 else "" for pairs in values]
            cells.append([kind, name, *found])
    if not cells:
        return [NOTHING, ""]
    return [
        f"Cost grows as the size to the power of these exponents, over the {LARGEST} largest sizes "
        "of each sweep. An exponent below 1 means that fixed cost, or a part that does not depend "
        "on this size, still shows.",
        "",
        *markdown(["what", "provider", *SWEEPS], cells),
        "",
    ]


def _medians(points: dict[str, list[tuple[int, Any]]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(x, spread["median"]) for x, spread in of] for name, of in points.items()}


def _memory(run: Run) -> list[str]:
    lines: list[str] = []
    slopes = {axis: working_per_unit(run, axis) for axis in SWEEPS}
    names = list(dict.fromkeys(name for of_axis in slopes.values() for name in of_axis))
    if names:
        heads = ["provider", *(f"one more of {axis}" for axis in SWEEPS)]
        cells = [[name, *(size_text(slopes[axis].get(name)) for axis in SWEEPS)] for name in names]
        lines += [*markdown(heads, cells), ""]
    if run["peak_memory"]:
        lines += ["Peak of forward and backward at (4, 128, 128, 512):", ""]
        lines += peak_table(run["peak_memory"])
    return lines or [NOTHING, ""]


def _roofs(run: Run) -> list[str]:
    roofs = run.get("roofs")
    if not roofs:
        return [NOTHING, ""]
    rates = [["DRAM, read", f"{roofs['dram_read'] / 1e9:.1f} GB/s"]]
    rates += [[name, f"{rate / 1e9:.3g} G elements/s"] for name, rate in roofs["ours"].items()]
    rates += [["one torch.tanh per element", f"{roofs['tanh'] / 1e9:.3g} G elements/s"]]
    lines = [*markdown(["roof", "this machine"], rates), ""]
    for row in run["rows"]:
        if "dram_read" in row:
            ours = row["bounds"][0]["found"]
            rate = row["dram_read"]["bytes_per_second"] / 1e9
            lines += [
                f"A step at {row['shape']['name']} {shape_text(row['shape'])}, its table ready and "
                f"far larger than the caches, reads at {ours['median']:.0%} "
                f"({ours['p20']:.0%}-{ours['p80']:.0%}) of the {rate:.1f} GB/s that "
                f"{row['dram_read']['reader']} reaches between its rounds.",
                "",
            ]
    return lines


def _limits(run: Run) -> list[str]:
    found = run.get("choices")
    if not found:
        return [NOTHING, ""]
    met = sum(limit["behind"]["median"] <= LIMIT_SLACK for limit in found)
    share = f"{LIMIT_SLACK - 1:.0%}"
    return [
        "Every way is timed at sizes on either side of each limit. *Over the best* is the time of "
        "the way that auto takes over the time of the best way. "
        f"{met} of {len(found)} choices are within {share} of the best.",
        "",
        *limit_table(found),
        "",
    ]


def _peers(run: Run, folder: str) -> list[str]:
    found = peer_rows(run)
    if not found:
        return [NOTHING, ""]
    names = list(dict.fromkeys(name for row in found for name in row.against))
    cells = [
        [row.what, shape_text(row.shape), *(_ratio(row.against.get(name)) for name in names)]
        for row in found
    ]
    return [
        *picture(run, "peers", "times as fast as other libraries", folder),
        *("Times as long as ours:", ""),
        *markdown(["what", "(B, Tq, Tk, H)", *names], cells),
        "",
        *row_table([row for row in run["rows"] if row["table"] == "peers"]),
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def _rows(run: Run) -> list[str]:
    lines: list[str] = []
    for table in ("step", "loop", "many-queries", "shapes", "overhead"):
        rows = {
            (str(row["shape"]), row["task"], row["mode"]): row
            for row in run["rows"]
            if row["table"] == table
        }
        lines += [f"#### {TITLES[table]}", ""]
        lines += row_table(list(rows.values())) if rows else [NOTHING, ""]
    return lines
