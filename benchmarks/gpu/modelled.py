"""What the model of GPUs gives for our calls and those of others, in words and tables.

It reads ``benchmarks/results/gpu-model.csv``, which ``tests/ptx/gpu_model`` writes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from statistics import median

from ..tables import markdown
from ..timing.worker import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu-model.csv"
BEGIN, END = "<!-- modelled: begin -->", "<!-- modelled: end -->"
OTHERS = ("eager", "compiled", "expert")
COLUMNS = ("CUDA C++", "Triton", *OTHERS, "copy", "host")
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
SHOWN = ("step-64", "step-16", "step-1", "gnmt-train", "captioning", "pooling", "parallel-128",
         "parallel-4", "parallel-16")  # fmt: skip

Row = dict[str, str]


def rows() -> list[Row]:
    """Microseconds by who computes a call on a GPU, with its inputs in memory or in the L2."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def verdict(found: Iterable[Row], who: str) -> str:
    """How often, and by how much, ours is ahead of the fastest of the others, and where behind."""
    ratios, behind = [], dict[str, float]()
    for row in found:
        ratios.append(min(float(row[other]) for other in OTHERS) / float(row[who]))
        if ratios[-1] < 1:
            name = row["B,Tq,Tk,H"].split()[0]
            behind[name] = min(behind.get(name, 1.0), ratios[-1])
    ahead = sum(ratio >= 1 for ratio in ratios)
    said = f"ahead in {ahead} of {len(ratios)} calls, {median(ratios):.2f} times as fast in the"
    worst = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(behind.items(), key=_second))
    return f"{said} median" + (f"; behind, at worst: {worst}" if worst else "")


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def table(found: list[Row], gpu: str) -> list[str]:
    """A GPU's calls from memory, forward / backward."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        if (row["GPU"], row["inputs in"]) == (gpu, "memory"):
            cells.setdefault((row["B,Tq,Tk,H"], row["dtype"]), []).append(row)
    lines = []
    for (shape, dtype), ways in sorted(cells.items(), key=lambda x: x[0][1]):
        if shape.split()[0] in SHOWN:
            of = (" / ".join(row[who] for row in ways) if ways[0][who] else "" for who in COLUMNS)
            lines.append([shape, dtype, *of])
    return markdown(["call (B,Tq,Tk,H)", "dtype", *COLUMNS], lines)


def block() -> str:
    """What docs/gpu.md has between its marks."""
    found = rows()
    lines = []
    for title, (who, way, step) in GROUPS.items():
        of = [row for row in found if row["pass"] == way and bool(row["CUDA C++"]) == step]
        lines.append(f"- {title}: {verdict(of, who)}.")
    for gpu in dict.fromkeys(row["GPU"] for row in found):
        lines += ["", f"### {gpu}, modelled", "", *table(found, gpu)]
    return "\n".join([BEGIN, *lines, END])
