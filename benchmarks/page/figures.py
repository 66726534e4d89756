"""What the page and the pictures say of a run's figures; nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["OPERATIONS", "SPEEDUPS", "Kernel", "Speedup", "about", "fastest_in_shapes", "kernels"]
__all__ += ["milliseconds", "ours_of", "peer_rows", "roofs_of", "shape_text", "speedups"]

# Rows of the summary: (table, task, mode) -> what it is called.
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
OURS = ("ours module", "ours memory", "ours op")

# What our CPU forward does for an element of (B,Tq,Tk,H), where four share a division.
OPERATIONS = {"multiply_add": 4.25, "divide": 0.25}
_WORDS = {
    "multiply_add": "4.25 multiply-adds per element",
    "divide": "a quarter of a division per element",
}


@dataclass(frozen=True)
class Speedup:
    """A row: what, the sizes, ours, and how many times as long each other provider takes."""

    what: str
    shape: dict[str, Any]
    provider: str
    seconds: float
    others: dict[str, float]

    @property
    def against(self) -> dict[str, float]:
        return {name: time / self.seconds for name, time in self.others.items()}

    @property
    def label(self) -> str:
        return f"{self.what}\n{shape_text(self.shape)}"


@dataclass(frozen=True)
class Kernel:
    """A point of the roofline: elements per byte that has to be read, elements per second."""

    provider: str
    shape: str
    intensity: float
    rate: float


def about(data: dict[str, Any]) -> str:
    """Machine, versions and commit in one line."""
    where = data["machine"]
    kernels_of = where.get("cpu kernels", "").rpartition(", ")[2]
    parts = [where["cpu"], where["cores"].replace(" (", " cores (")]
    parts += [kernels_of, "fp32", f"torch {where['torch']}", f"commit {where['commit']}"]
    return ", ".join(filter(None, [*parts, where.get("note", "")]))


def milliseconds(seconds: float) -> str:
    """Three digits, or whole milliseconds where there are more."""
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def fastest_in_shapes(data: dict[str, Any]) -> str:
    """In how many rows of the list of shapes nobody was faster, in a sentence."""
    bounds = [
        bound["holds"]
        for row in data["rows"]
        if row["table"] == "shapes"
        for bound in row["bounds"]
    ]
    if not bounds:
        return ""
    return f"On the list of shapes no baseline was faster in {sum(bounds)} of {len(bounds)} rows."


def shape_text(shape: dict[str, Any]) -> str:
    """(B, Tq, Tk, H)."""
    return "({batch}, {queries}, {keys}, {hidden})".format(**shape)


def ours_of(seconds: dict[str, Any]) -> str | None:
    """Which of ours answers for a row."""
    return next((name for name in OURS if name in seconds), None)


def _speedup(row: dict[str, Any], what: str) -> Speedup | None:
    ours = ours_of(row["seconds"])
    if ours is None:
        return None
    times = {name: spread["median"] for name, spread in row["seconds"].items()}
    others = {name: time for name, time in times.items() if not name.startswith("ours")}
    return Speedup(what, row["shape"], ours, times[ours], others)


def speedups(data: dict[str, Any], wanted: dict[tuple[str, str, str], str]) -> list[Speedup]:
    """The rows of those tables, tasks and modes, each shape once."""
    found: dict[Any, Speedup] = {}
    for row in data["rows"]:
        key = (row["table"], row["task"], row["mode"])
        speedup = _speedup(row, wanted[key]) if key in wanted else None
        if speedup is not None:
            found.setdefault((*key, row["shape"]["name"]), speedup)
    return list(found.values())


def peer_rows(data: dict[str, Any]) -> list[Speedup]:
    """The rows with other libraries in them."""
    tasks = {"step": "one decoder step, keys projected", "projected": "after the projections"}
    wanted = {("peers", task, "forward"): what for task, what in tasks.items()}
    baselines = {"rewrite eager", "d2l compiled", "compiled max-autotune"}
    return [
        Speedup(
            row.what,
            row.shape,
            row.provider,
            row.seconds,
            {name: time for name, time in row.others.items() if name not in baselines},
        )
        for row in speedups(data, wanted)
    ]


def roofs_of(rates: dict[str, float], dram_read: float) -> dict[str, Any]:
    """The roofs as the roofline has them: bytes, and elements of (B,Tq,Tk,H), per second."""
    ours = {
        _WORDS[name]: rates[name] / count for name, count in OPERATIONS.items() if name in rates
    }
    return {"dram_read": dram_read, "tanh": rates["tanh"], "ours": ours, "rates": rates}


def kernels(data: dict[str, Any]) -> list[Kernel]:
    """The forward rows on projected queries and keys, of d2l eager, compiled and ours."""
    shown = ("d2l eager", "compiled", "ours op")
    found: dict[tuple[str, str], Kernel] = {}
    for row in data["rows"]:
        if row["mode"] != "forward" or row["task"] not in ("projected", "scan"):
            continue
        if row["table"] == "peers" or row["table"].startswith("sweep"):
            continue
        shape = row["shape"]
        elements = shape["batch"] * shape["queries"] * shape["keys"] * shape["hidden"]
        read = 4 * shape["batch"] * shape["keys"] * (shape["hidden"] + shape["value_size"])
        name = shape["name"] + (", table kept" if row["task"] == "scan" else "")
        for provider in shown:
            if provider in row["seconds"]:
                seconds = row["seconds"][provider]["median"]
                found[provider, name] = Kernel(provider, name, elements / read, elements / seconds)
    return list(found.values())
