"""Writes docs/performance.md and the tables of README and docs/gpu.md from the figures of runs.

``python -m benchmarks.page`` reads every file in ``benchmarks/results``; no figure is typed by
hand.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gpu_report, training
from .contestants.peers import DIFFERENCES
from .gpu import modelled
from .tables import markdown, milliseconds, shape_text
from .timing.worker import ROOT
from .workloads.shapes import MODES, SUBJECT

Run = dict[str, Any]

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

# The rows that matter: (table, task, mode) -> description.
SUMMARY = {
    ("step", "step", "forward"): "one decoder step",
    ("loop", "loop", "forward"): "d2l's loop of 50 steps",
    ("loop", "loop", "train"): "the same with backward",
    ("many-queries", "projected", "forward"): "many queries, projected",
    ("many-queries", "projected", "train"): "the same with backward",
    ("many-queries", "full", "forward"): "many queries, whole call",
    ("many-queries", "full", "train"): "the same with backward",
    ("overhead", "full", "forward"): "toy call",
    ("overhead", "full", "train"): "the same with backward",
}
PEERS = {
    ("peers", "projected", "forward"): "projected",
    ("peers", "step", "forward"): "one decoder step",
}
_OURS = ("ours module", "ours memory", "ours op")

INTRODUCTION = """\
# Performance

Written by `make bench` from the figures in `benchmarks/results/`, to which it adds those of the
machine at hand.

## How a row is timed

A call is checked, then timed. The check is against the reference in fp64: ours has to keep the
parity rule of the contract, others may differ by a thousandth of the largest value. All providers
of a row are timed in turns, in a new order each round, and ratios are taken within a round, so a
disturbance of the machine affects all of them. Figures are medians, in brackets with their 20th and
80th percentile, in fp32.

*d2l* is the course's module in our own words. The fastest baseline of a row is named: *d2l eager*;
*rewrite eager*, which is `(tanh(q + k) * w).sum(-1)`; or *compiled*, the rewrite under
`torch.compile`, compiled for each shape alone. *Ours* is `AdditiveAttention`, a decoder step
on its `memory()`, whose keys are projected already for all, or the operator behind both.
`benchmarks/workloads/shapes.py` lists all rows, and the files have every provider of each."""

GOALS = """\
## Why goals are missed

Goals are ratios that stand beside the rows and are the same for every processor. Most misses have
one of these reasons:

- A step of ours reads its memory nearly as fast as the machine can, while eager code is held up by
  its arithmetic: where memory is slow, the ratio is small. The memory of the step of (16, 1, 400,
  512) fits the last-level cache of a cloud processor only while other tenants leave it room.
- Eager code with many queries makes tensors of (B,Tq,Tk,H) in each call, which takes longer in a
  process that has just started, and not as long on every machine.
- AVX2 has half as many numbers in a vector as AVX-512."""

OTHERS = """\
## Other libraries

How many times as long as ours they take, each in a process of its own on the same tensors.
`pip install -e '.[peers]'` and `pip install --no-deps 'joeynmt>=2.3'` install them. They differ:
"""

TRAINING = """\
## Training a decoder

A training step includes encoder, output layer, loss, clipping and Adam. *Course* is the course's
loop, *no attention* its decoder without attention; both have the course's loss, which keeps the
vocabulary in the middle. All decoders with attention have the same losses. Measured by
`python -m benchmarks.training`:"""

NOT_MEASURED = """\
## What was not measured

- Half precision and fp64 on the CPU: the contract covers them, these tables are fp32.
- Other libraries in training: only their forward passes are compared.
- More cores than these machines have, more than one socket, and other processors.
- Energy, and several processes at a time.
- Memory is not in these tables: `tests/cpu/test_memory_use.py` holds the peak of forward and
  backward to 1.2 times inputs, outputs, gradients and projections."""


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
    model = re.sub(r"\((R|TM)\)| Processor\b", "", where["cpu"])
    return f"{model}, {where['cores'].split()[0]} cores"


def about(run: Run) -> str:
    """Kernels, versions, commit and note of a run, in one line."""
    where = run["machine"]
    parts = [where.get("cpu kernels", "").rpartition(", ")[2], f"torch {where['torch']}"]
    parts += [f"commit {where['commit']}", where.get("note", "")]
    return ", ".join(filter(None, parts))


def of_machine(run: Run) -> list[str]:
    """The summary of one run, and the goals that it missed."""
    cells = [
        [
            each.what,
            f"{milliseconds(each.others['d2l eager'])} ms",
            f"{milliseconds(each.others[each.fastest])} ms ({each.fastest})",
            f"{milliseconds(each.ours)} ms",
            f"{each.times('d2l eager'):.1f}x",
            f"{each.times(each.fastest):.1f}x",
        ]
        for each in chosen(run, SUMMARY)
    ]
    heads = ["what (B, Tq, Tk, H)", "d2l", "fastest baseline", "ours", "d2l / ours"]
    lines = [f"## {name_of(run)}", "", f"{about(run)}.", ""]
    lines += [*markdown([*heads, "fastest / ours"], cells), ""]
    shapes = [row for row in run["rows"] if row["table"] == "shapes"]
    slower = sum(not all(bound["holds"] for bound in row["bounds"]) for row in shapes)
    held = [bound["holds"] for row in run["rows"] for bound in row["bounds"]]
    said = f"In {len(shapes) - slower} of {len(shapes)} rows of the list of shapes no baseline was "
    lines += [f"{said}faster than ours. {sum(held)} of {len(held)} goals were reached.", ""]
    for row in run["rows"]:
        for bound in row["bounds"]:
            if bound["against"] == "DRAM" and bound["found"]:
                lines += [_bandwidth(row, bound["found"]), ""]
    missed = [
        [_row(row), bound["rival"], f"{bound['at_least']:g}x", _found(bound["found"])]
        for row in run["rows"]
        for bound in row["bounds"]
        if not bound["holds"]
    ]
    return [*lines, *(markdown(["missed", "against", "goal", "found"], missed)), ""]


def _bandwidth(row: dict[str, Any], found: dict[str, float]) -> str:
    """What a step on a large memory reads, and the share of the roof that it is."""
    subject, read = SUBJECT[row["task"]], row["dram_read"]
    roof = read["bytes_per_second"] / 1e9
    return (
        f"On a large memory {shape_text(row['shape'])} {subject} reads "
        f"{found['median'] * roof:.1f} GB/s, {found['median']:.0%} ({found['p20']:.0%}-"
        f"{found['p80']:.0%}) of {roof:.1f} GB/s by {read['reader']}."
    )


def _row(row: dict[str, Any]) -> str:
    return f"{shape_text(row['shape'])} {row['task']}, {MODES[row['mode']]}"


def _found(spread: dict[str, float] | None) -> str:
    return "{median:.3g}x ({p20:.3g}-{p80:.3g})".format(**spread) if spread else "not measured"


def _peers(runs: list[Run]) -> list[str]:
    """A row for each machine and library, a column for each shape."""
    found = [(name_of(run), each) for run in runs for each in chosen(run, PEERS)]
    shapes = list(dict.fromkeys(each.what for _, each in found))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for machine, each in found:
        for library in DIFFERENCES:
            if library in each.others:
                of_library = cells.setdefault((machine, library), {})
                of_library[each.what] = f"{each.times(library):.3g}x"
    rows = [[*key, *(of.get(shape, "") for shape in shapes)] for key, of in cells.items()]
    differ = [f"- {name}: {text}." for name, text in DIFFERENCES.items()]
    return [OTHERS, *differ, "", *markdown(["machine", "library", *shapes], rows), ""]


def page(measured: list[Run], trained: list[Run], gpus: list[Run]) -> str:
    """docs/performance.md in Markdown.

    Args:
        measured: a run of ``bench`` of each machine.
        trained: runs of ``benchmarks.training``.
        gpus: reports of GPUs.
    """
    lines = [INTRODUCTION, "", *(line for run in measured for line in of_machine(run))]
    lines += [GOALS, "", *_peers(measured), TRAINING, ""]
    for run in trained:
        lines += [f"{name_of(run)}, {about(run)}.", "", *training.times(run["settings"]), ""]
    for run in gpus:
        where = run["machine"]
        lines += [f"## {where['gpu']}", "", f"torch {where['torch']}, commit {where['commit']}."]
        lines += [
            "Microseconds: called / from a graph / from a graph with a cold L2, and the share"
        ]
        lines += ["of a copy's bandwidth that this is.", ""]
        lines += [*gpu_report.table(run["rows"]), ""]
    lines += [NOT_MEASURED]
    if not gpus:
        lines += ["- A GPU: no result of one is committed. `make gpu-report` makes one."]
    return "\n".join(lines) + "\n"


def readme_block(run: Run) -> str:
    """The summary of one machine, as README has it between its marks."""
    cells = []
    for each in chosen(run, SUMMARY):
        fastest = f"{each.times(each.fastest):.1f}x ({each.fastest})"
        ours = f"{milliseconds(each.ours)} ms"
        cells.append([each.what, ours, f"{each.times('d2l eager'):.1f}x", fastest])
    table = markdown(["what (B, Tq, Tk, H)", "ours", "d2l", "fastest baseline"], cells)
    return "\n".join([BEGIN, f"{name_of(run)}, {about(run)}:", "", *table, "", END])


def runs(results: Path = RESULTS, pattern: str = "cpu-*.json") -> list[Run]:
    """The figures of each machine, in the order of their files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(pattern))]


def _between(path: Path, begin: str, block: str, end: str) -> str:
    """A page with what stands between its marks, and they themselves, replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{path.name} must have {begin} and {end}, got one of them or none")
    return before + block + after


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What docs/performance.md, docs/gpu.md and README.md have to say by the committed figures.

    Raises:
        ValueError: a page lacks a mark that its tables stand between.
    """
    results, docs, readme = root / "benchmarks" / "results", root / "docs", root / "README.md"
    measured = runs(results)
    trained, gpus = runs(results, "training-*.json"), gpu_report.reports(results)
    of_gpus = modelled.BEGIN, modelled.block(), modelled.END
    return {
        docs / "performance.md": page(measured, trained, gpus),
        docs / "gpu.md": _between(docs / "gpu.md", *of_gpus),
        readme: _between(readme, BEGIN, readme_block(measured[0]), END),
    }


def main() -> None:
    """Write what is out of date."""
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
