"""Figures of ``python -m benchmarks``, read and as text, for the terminal and the pages."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .cases import MODES, SUBJECT

RESULTS = Path(__file__).parent / "results"

# What is sold of a processor's family and model, which is all that a cloud machine may say.
_SOLD = {
    "AMD EPYC (family 25, model 1)": "AMD EPYC 7003 (Milan)",
    "AMD EPYC (family 25, model 17)": "AMD EPYC 9004 (Genoa)",
    "AMD EPYC (family 26, model 2)": "AMD EPYC 9005 (Turin)",
    "Intel Xeon (family 6, model 207)": "5th Gen Intel Xeon (Emerald Rapids)",
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


def processor(text: str) -> str:
    """A text that begins with a processor, by the name that it is sold under."""
    text = re.sub(r"\((R|TM)\)| Processor\b", "", text)
    numbers = text.partition(")")[0] + ")"
    return _SOLD.get(numbers, numbers) + text.removeprefix(numbers)


def spread_text(spread: dict[str, float] | None) -> str:
    """Milliseconds, median (p20-p80); nothing for None."""
    if spread is None:
        return ""
    return "{median} ({p20}-{p80})".format(**{key: milliseconds(x) for key, x in spread.items()})


def shape_text(shape: dict[str, Any]) -> str:
    """(B, Tq, Tk, H)."""
    return "({batch}, {queries}, {keys}, {hidden})".format(**shape)


def row_table(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of each provider; then who was not run and why, and whose results are wrong."""
    names = dict.fromkeys(name for row in rows for name in row["seconds"] if name != "DRAM read")
    cells, notes = [], []
    for row in rows:
        what = f"{row['shape']['name']} {shape_text(row['shape'])}"
        spreads = [row["seconds"].get(name) for name in names]
        cells.append([what, f"{row['task']}, {MODES[row['mode']]}", *map(spread_text, spreads)])
        for name, why in row["skipped"].items():
            notes.append(f"- {what}, {row['task']}: {name} was not run: {why}")
        for name, verdict in row["parity"].items():
            if not verdict["passed"]:
                error = f"{verdict['where']}: {verdict['worst']:.3g} of the allowed error"
                notes.append(f"- {what}, {row['task']}: {name} FAILS parity, {error}")
    table = markdown(["shape (B, Tq, Tk, H)", "what", *names], cells)
    return [*table, "", *([*dict.fromkeys(notes), ""] if notes else [])]


# ---- runs, as ``results/cpu-*.json`` has them

Run = dict[str, Any]


class Times(NamedTuple):
    """Our median in one row, and those of the others."""

    what: str
    ours: float
    others: dict[str, float]

    def times(self, name: str) -> float:
        """How many times as long as ours another takes."""
        return self.others[name] / self.ours

    @property
    def fastest(self) -> str:
        return min(self.others, key=self.others.__getitem__)


def chosen(run: Run, wanted: dict[tuple[str, str, str], str]) -> list[Times]:
    """The rows of some tables, tasks and modes, each shape once."""
    found: dict[Any, Times] = {}
    for row in run["rows"]:
        key = (row["table"], row["task"], row["mode"])
        times = {name: spread["median"] for name, spread in row["seconds"].items()}
        ours = times.get(SUBJECT[row["task"]])
        others = {name: time for name, time in times.items() if not name.startswith("ours")}
        if key in wanted and ours is not None and "d2l eager" in others:
            what = f"{wanted[key]} {shape_text(row['shape'])}"
            found.setdefault((key, row["shape"]["name"]), Times(what, ours, others))
    return list(found.values())


def name_of(run: Run) -> str:
    """The machine's processor and cores, as headings have it."""
    where = run["machine"]
    return f"{processor(where['cpu'])}, {where['cores'].split()[0]} cores"


def about(run: Run) -> str:
    """Kernels, versions and commit of a run, in one line."""
    where = run["machine"]
    kernels = where["cpu kernels"].rpartition(", ")[2]
    return f"{kernels}, torch {where['torch']}, commit {where['commit']}"


def runs(results: Path = RESULTS) -> list[Run]:
    """The figures of each machine, in the order of their files' names."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))
    ]
