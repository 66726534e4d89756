"""The tables of a run, in Markdown: for the terminal and for docs/performance.md alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..workloads.cases import LIMIT_SLACK, MEMORY_BOUND, MODES, SUBJECT
from .figures import peak_factor

__all__ = ["bound_lines", "limit_table", "markdown", "milliseconds", "missed_limits"]
__all__ += ["peak_table", "row_name", "row_table", "shape_text", "size_text", "spread_text"]

Rows = list[dict[str, Any]]


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
    median, low, high = (milliseconds(spread[key]) for key in ("median", "p20", "p80"))
    return f"{median} ({low}-{high})"


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
    names = dict.fromkeys(name for row in rows for name in row["seconds"] if name != "DRAM read")
    cells, gaps = [], []
    for row in rows:
        what = f"{row['shape']['name']} {shape_text(row['shape'])}"
        spreads = [row["seconds"].get(name) for name in names]
        cells.append([what, f"{row['task']}, {MODES[row['mode']]}", *map(spread_text, spreads)])
        gaps += [
            f"- {what}, {row['task']}: {name} was not run: {reason}"
            for name, reason in row["skipped"].items()
        ]
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
