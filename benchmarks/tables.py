"""Figures as text: Markdown tables of rows of ``bench``, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .workloads.shapes import MODES, SUBJECT

Packed = dict[str, Any]  # a row, as bench writes it in JSON


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


def row_name(row: Packed) -> str:
    """Shape, task and mode of a row in words."""
    what = f"{row['task']}, {MODES[row['mode']]}"
    return f"{row['shape']['name']} {shape_text(row['shape'])}, {what}"


def row_table(rows: list[Packed]) -> list[str]:
    """Milliseconds of each provider, then why a provider was not run."""
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


def bound_lines(rows: list[Packed]) -> list[str]:
    """PASS or FAIL for each bound, and FAIL for each wrong result."""
    lines = []
    for row in rows:
        for name, verdict in row["parity"].items():
            if not verdict["passed"]:
                error = f"{verdict['where']}: {verdict['worst']:.3g} of the allowed error"
                lines.append(f"FAIL  parity: {row_name(row)}: {name}, {error}")
        for bound in row["bounds"]:
            word = "PASS" if bound["holds"] else "FAIL"
            lines.append(f"{word}  {row_name(row)}: {found_text(row, bound)}")
    return lines


def found_text(row: Packed, bound: dict[str, Any]) -> str:
    """What was found for a bound of a row, and what is needed."""
    subject, need, found = SUBJECT[row["task"]], bound["at_least"], bound["found"]
    if found is None:
        return str(bound["rival"])
    median, p20, p80 = (found[key] for key in ("median", "p20", "p80"))
    if bound["against"] == "DRAM":
        roof = row["dram_read"]["bytes_per_second"] / 1e9
        return (
            f"{subject} reads {median * roof:.1f} GB/s, {median:.0%} ({p20:.0%}-{p80:.0%})"
            f" of {roof:.1f} GB/s by {row['dram_read']['reader']}; needs {need:.0%}"
        )
    return (
        f"{subject} is {median:.3g}x ({p20:.3g}-{p80:.3g}) as fast as {bound['rival']}; "
        f"needs {need:g}x"
    )
