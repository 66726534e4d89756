"""What the model of GPUs gives for our calls and those of others, in words and tables.

It reads ``benchmarks/results/gpu-model.csv``, which ``tests/ptx/gpu_model`` writes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import product
from statistics import median

from ..tables import markdown
from ..timing.worker import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu-model.csv"
BEGIN, END = "<!-- modelled: begin -->", "<!-- modelled: end -->"
USUAL, EXPERT = ("eager", "compiled"), ("expert",)
COLUMNS = ("CUDA C++", "Triton", *USUAL, *EXPERT, "copy", "host")
# A step is what CUDA C++ serves; of other calls it has no figure.
GROUPS = {
    f"{what}, {way}": (who, way, step)
    for what, who, step in (
        ("A decoder step in CUDA C++", "CUDA C++", True),
        ("A decoder step in Triton", "Triton", True),
        ("Many queries, Triton", "Triton", False),
    )
    for way in ("forward", "backward")
}
# The others of the list are in the file.
SHOWN = ("step-64", "step-1", "gnmt-train", "pooling", "parallel-128", "parallel-16")

Row = dict[str, str]


def rows() -> list[Row]:
    """Microseconds by who computes a call on a GPU, with its inputs in memory or in the L2."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def figures(gpu: str, shape: str, dtype: str, who: str, train: bool) -> dict[str, float]:
    """Microseconds by where the inputs are; nothing for what is not in the file.

    Args:
        gpu: a name that one of the file's is part of.
        shape: name and sizes.
        dtype: torch's name.
        who: a column.
        train: forward and backward.
    """
    wanted, found = (shape, {"bfloat16": "bf16", "float32": "fp32"}.get(dtype)), dict[str, float]()
    ways = ("forward", "backward") if train else ("forward",)
    for row in rows():
        same = row["pass"] in ways and (row["B,Tq,Tk,H"], row["dtype"]) == wanted
        if same and row["GPU"] in gpu and row.get(who):
            where = row["inputs in"]
            found[where] = found.get(where, 0.0) + float(row[who])
    return found


def ratios(found: Iterable[Row], who: str, others: tuple[str, ...]) -> list[tuple[float, str]]:
    """How many times as fast as the fastest of the others ours is, and the shape's name; sorted."""
    return sorted(
        (min(float(row[o]) for o in others) / float(row[who]), row["B,Tq,Tk,H"].split()[0])
        for row in found
    )


def verdict(found: Iterable[Row], who: str, others: tuple[str, ...]) -> str:
    """In how many calls ours is ahead, by how much, and how far it is behind at worst."""
    every = ratios(found, who, others)
    middle, (least, shape) = median(ratio for ratio, _ in every), every[0]
    return f"{_ahead(every)}; {middle:.2f}, at worst {least:.2f} ({shape})"


def _ahead(every: list[tuple[float, str]]) -> str:
    return f"{sum(ratio >= 1 for ratio, _ in every)} of {len(every)}"


def summary(found: list[Row]) -> list[str]:
    """The verdict in words, then by kind of call: CUDA C++ where it serves a call, Triton alone."""
    routed = [row | {"ours": row["CUDA C++"] or row["Triton"]} for row in found]
    usual, expert = (_ahead(ratios(routed, "ours", others)) for others in (USUAL, EXPERT))
    lines = [
        f"Ours is ahead of eager and compiled code in {usual} calls, of the expert's in {expert}."
    ]
    cells = []
    for (title, (who, way, step)), dtype in product(GROUPS.items(), ("bf16", "fp32")):
        of = [row for row in found if (row["pass"], row["dtype"]) == (way, dtype)]
        of = [row for row in of if bool(row["CUDA C++"]) == step]
        cells.append([title, dtype, *(verdict(of, who, others) for others in (USUAL, EXPERT))])
    heads = ["ahead in calls; times as fast, median", "dtype", "eager and compiled", "expert"]
    return [*lines, "", *markdown(heads, cells)]


def table(found: list[Row], gpu: str) -> list[str]:
    """A GPU's calls from memory, forward / backward."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        if (row["GPU"], row["inputs in"]) == (gpu, "memory"):
            cells.setdefault((row["B,Tq,Tk,H"], row["dtype"]), []).append(row)
    lines = []
    for (shape, dtype), ways in sorted(cells.items(), key=lambda x: x[0][1]):
        if shape.split()[0] in SHOWN:
            of = (" / ".join(_number(row[who]) for row in ways) for who in COLUMNS)
            lines.append([shape, dtype, *(each.strip(" /") for each in of)])
    return markdown(["call (B,Tq,Tk,H)", "dtype", *COLUMNS], lines)


def _number(text: str) -> str:
    return f"{float(text):.0f}" if "e" in text else text


def block() -> str:
    """What docs/gpu.md has between its marks."""
    found = rows()
    lines = summary(found)
    for gpu in dict.fromkeys(row["GPU"] for row in found):
        lines += ["", f"### {gpu}, modelled", "", *table(found, gpu)]
    return "\n".join([BEGIN, *lines, END])
