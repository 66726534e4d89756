"""Reads the figures of a run of ``bench``, and puts them into tables. Measures nothing.

A run is the dictionary that ``bench`` writes as JSON. The tables are in Markdown, for the terminal
and for docs/performance.md alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

from ..workloads.shapes import AXES, LARGEST, LIMIT_SLACK, MEMORY_BOUND, MODES, SUBJECT

Run = dict[str, Any]
Rows = list[Run]
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
    return linear_regression(*([math.log(z) for z in of] for of in zip(*chosen, strict=True))).slope


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
    return {
        name: linear_regression(*zip(*of_name, strict=True)).slope
        for name, of_name in points.items()
    }


def markdown(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table whose columns line up."""
    table = [heads, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def milliseconds(seconds: float) -> str:
    """Three digits, or whole milliseconds where there are more."""
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def spread_text(spread: dict[str, float] | None) -> str:
    """Milliseconds, median (p20-p80); nothing for None."""
    if spread is None:
        return ""
    return "{median} ({p20}-{p80})".format(**{key: milliseconds(x) for key, x in spread.items()})


def shape_text(shape: dict[str, Any]) -> str:
    """(B, Tq, Tk, H)."""
    return "({batch}, {queries}, {keys}, {hidden})".format(**shape)


def size_text(size: float | None) -> str:
    """Bytes in a readable unit; nothing for None."""
    if size is None:
        return ""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def row_name(row: dict[str, Any]) -> str:
    """Shape, task and mode of a row in words."""
    what = f"{row['task']}, {MODES[row['mode']]}"
    return f"{row['shape']['name']} {shape_text(row['shape'])}, {what}"


def row_table(rows: Rows) -> list[str]:
    """Milliseconds of each provider, then why a provider was not run."""
    if not rows:
        return ["Not measured in this run.", ""]
    names = dict.fromkeys(name for row in rows for name in row["seconds"] if name != "DRAM read")
    cells, gaps = [], []
    for row in rows:
        what = f"{row['shape']['name']} {shape_text(row['shape'])}"
        spreads = [row["seconds"].get(name) for name in names]
        cells.append([what, f"{row['task']}, {MODES[row['mode']]}", *map(spread_text, spreads)])
        gap = f"- {what}, {row['task']}: {{}} was not run: {{}}"
        gaps += [gap.format(*skipped) for skipped in row["skipped"].items()]
    table = markdown(["shape (B, Tq, Tk, H)", "what", *names], cells)
    return [*table, "", *([*dict.fromkeys(gaps), ""] if gaps else [])]


def bound_lines(rows: Rows) -> list[str]:
    """PASS or FAIL for each bound, and FAIL for each wrong result."""
    lines = []
    for row in rows:
        for name, verdict in row["parity"].items():
            if not verdict["passed"]:
                error = f"{verdict['where']}: {verdict['worst']:.3g} of the allowed error"
                lines.append(f"FAIL  parity: {row_name(row)}: {name}, {error}")
        lines += [_bound_line(row, bound) for bound in row["bounds"]]
    return lines


def _bound_line(row: dict[str, Any], bound: dict[str, Any]) -> str:
    start = f"{'PASS' if bound['holds'] else 'FAIL'}  {row_name(row)}"
    subject, need, found = SUBJECT[row["task"]], bound["at_least"], bound["found"]
    if found is None:
        return f"{start}: {bound['rival']}"
    median, p20, p80 = (found[key] for key in ("median", "p20", "p80"))
    if bound["against"] == "DRAM":
        roof = row["dram_read"]["bytes_per_second"] / 1e9
        return (
            f"{start}: {subject} reads {median * roof:.1f} GB/s, {median:.0%} ({p20:.0%}-{p80:.0%})"
            f" of {roof:.1f} GB/s by {row['dram_read']['reader']}; needs {need:.0%}"
        )
    return (
        f"{start}: {subject} is {median:.3g}x ({p20:.3g}-{p80:.3g}) as fast as {bound['rival']}; "
        f"needs {need:g}x"
    )


def peak_table(peaks: dict[str, dict[str, Any]]) -> list[str]:
    """Peak memory of forward and backward by provider."""
    heads = ["provider, task", "inputs + outputs + gradients", "peak", "peak over these tensors"]
    cells = []
    for name, peak in peaks.items():
        if "error" in peak:
            cells.append([name, "", f"not measured: {peak['error']}", ""])
            continue
        highest = max(peak["resident"], peak["allocated"])
        sizes = [size_text(peak["tensors"]), size_text(highest)]
        cells.append([name, *sizes, f"{peak_factor(peak):.3g}x"])
    return [*markdown(heads, cells), "", f"Ours op may take {MEMORY_BOUND}x.", ""]


def limit_table(limits: Rows) -> list[str]:
    """What auto takes near each limit, beside every way it could have taken."""
    heads = ["choice", "B,Tq,Tk,H", "auto takes", "over the best", "ms, median (p20-p80)"]
    cells = []
    for limit in limits:
        times = sorted(limit["seconds"].items())
        ways = "; ".join(f"{name} {spread_text(time)}" for name, time in times)
        behind = f"{limit['behind']['median']:.2f}"
        cells.append([limit["what"], _sizes(limit), limit["takes"], behind, ways])
    return markdown(heads, cells)


def missed_limits(limits: Rows) -> list[str]:
    """FAIL where auto takes a way that is too slow, with the limits that decide it."""
    return [
        f"FAIL  {limit['what']} at {_sizes(limit)}: {limit['takes']} takes "
        f"{limit['behind']['median']:.2f}x as long as {limit['best']}; may take {LIMIT_SLACK:.2f}x"
        f" ({', '.join(limit['limits']) or 'no limit'})"
        for limit in limits
        if limit["behind"]["median"] > LIMIT_SLACK
    ]


def _sizes(limit: dict[str, Any]) -> str:
    return ",".join(str(limit["shape"][key]) for key in ("batch", "queries", "keys", "hidden"))
