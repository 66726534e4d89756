"""The figures of runs of ``bench``, as the pages read them: ``benchmarks/results/cpu-*.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpu.rows import RESULTS
from .tables import processor, shape_text

Run = dict[str, Any]

_OURS = ("ours module", "ours memory", "ours op")


@dataclass(frozen=True)
class Times:
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
        ours = next((times[name] for name in _OURS if name in times), None)
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
    """Kernels, versions, commit and note of a run, in one line."""
    where = run["machine"]
    parts = [where.get("cpu kernels", "").rpartition(", ")[2], f"torch {where['torch']}"]
    parts += [f"commit {where['commit']}", where.get("note", "")]
    return ", ".join(filter(None, parts))


def runs(results: Path = RESULTS) -> list[Run]:
    """The figures of each machine, in the order of their files' names."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))
    ]
