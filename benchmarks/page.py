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

from .contestants.peers import DIFFERENCES
from .gpu import rows, summary
from .tables import markdown, milliseconds, shape_text
from .timing.worker import ROOT
from .workloads.shapes import SUBJECT, Shape

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
`benchmarks/workloads/shapes.py` lists all rows, and the files have every provider of each. Tables
have the time of ours, and how many times as long the others took."""

OTHERS = """\
## Other libraries

How many times as long as ours they take, each in a process of its own on the same tensors.
`pip install -e '.[peers]'` and `pip install --no-deps 'joeynmt>=2.3'` install them. They differ:
"""

USERS = """\
## What a user feels

Steps of models, once each beside the own module of their authors, whose results ours has to give:
the course's decoder of (sentences, steps, keys, hidden units), encoder, output layer, loss,
clipping and Adam included; a call of the module of (B, Tq, Tk, H); steps of Tacotron 2 and of a
captioner. By `python -m benchmarks.gpu_report --device cpu --stage user --seconds 3600`.
"""

NOT_MEASURED = """\
## What was not measured

- Half precision and fp64 on the CPU: the contract covers them, these tables are fp32.
- Other libraries in training: only their forward passes are compared.
- More cores than these machines have, more than one socket, and other processors.
- Energy, and several processes at a time. [GPUs](gpu.md) have a page of their own.
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


def table(run: Run) -> list[str]:
    """The rows that matter."""
    cells = []
    for each in chosen(run, SUMMARY):
        fastest = f"{each.times(each.fastest):.1f}x ({each.fastest})"
        ours = f"{milliseconds(each.ours)} ms"
        cells.append([each.what, ours, f"{each.times('d2l eager'):.1f}x", fastest])
    return markdown(["what (B, Tq, Tk, H)", "ours", "d2l", "fastest baseline"], cells)


def of_machine(run: Run) -> list[str]:
    """The summary of one run."""
    lines = [f"## {name_of(run)}", "", f"{about(run)}.", "", *table(run), ""]
    shapes = [row for row in run["rows"] if row["table"] == "shapes"]
    said = f"In {sum(map(leads, shapes))} of {len(shapes)} rows of the list of shapes no baseline"
    lines += [f"{said} was faster than ours.", ""]
    for row in run["rows"]:
        if "dram_read" in row and SUBJECT[row["task"]] in row["seconds"]:
            lines += [_bandwidth(row), ""]
    return lines


def leads(row: dict[str, Any]) -> bool:
    """Whether ours is there and no baseline is faster."""
    medians = {name: spread["median"] for name, spread in row["seconds"].items()}
    ours = medians.get(SUBJECT[row["task"]])
    others = (t for n, t in medians.items() if not n.startswith("ours") and n not in DIFFERENCES)
    return ours is not None and ours <= min(others, default=ours)


def _bandwidth(row: dict[str, Any]) -> str:
    """What a step on a large memory reads, and the share of the roof that it is."""
    subject, roof = SUBJECT[row["task"]], row["dram_read"]["bytes_per_second"]
    moved, seconds = Shape(**row["shape"]).memory_bytes, row["seconds"][subject]
    rate, low, high = (moved / seconds[name] for name in ("median", "p80", "p20"))
    return (
        f"On a large memory {shape_text(row['shape'])} {subject} reads {rate / 1e9:.1f} GB/s, "
        f"{rate / roof:.0%} ({low / roof:.0%}-{high / roof:.0%}) of {roof / 1e9:.1f} GB/s by "
        f"{row['dram_read']['reader']}."
    )


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


def page(measured: list[Run], felt: list[list[rows.Row]]) -> str:
    """docs/performance.md in Markdown.

    Args:
        measured: a run of ``bench`` of each machine.
        felt: rows of ``user`` of each machine.
    """
    lines = [INTRODUCTION, "", *(line for run in measured for line in of_machine(run))]
    lines += [*_peers(measured), USERS]
    for of_one in felt:
        lines += [f"{of_one[0]['where']}.", "", *summary.users(of_one), summary.hosts(of_one), ""]
    return "\n".join([*lines, NOT_MEASURED, ""])


def readme_block(run: Run, of_gpu: list[rows.Row]) -> str:
    """The summary of one machine and of one GPU, as README has it between its marks."""
    lines = [f"{name_of(run)}, {about(run)}:", "", *table(run), "", *summary.sentence(of_gpu)]
    return "\n".join([BEGIN, *lines, END])


def runs(results: Path = RESULTS) -> list[Run]:
    """The figures of each machine, in the order of their files' names."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))
    ]


def _between(path: Path, block: str) -> str:
    """A page with what stands between its marks, and they themselves, replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    before, mark, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not mark or not closing:
        raise ValueError(f"{path.name} must have {BEGIN} and {END}, got one of them or none")
    return before + block + after


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What docs/performance.md, docs/gpu.md and README.md have to say by the committed figures.

    Raises:
        ValueError: a page lacks a mark that its tables stand between.
    """
    results, docs, readme = root / "benchmarks" / "results", root / "docs", root / "README.md"
    measured, gpus = runs(results), rows.measured("gpu", results)
    of_gpus = [line for of_gpu in gpus for line in summary.block(of_gpu)]
    return {
        docs / "performance.md": page(measured, rows.measured("cpu", results)),
        docs / "gpu.md": _between(docs / "gpu.md", "\n".join([BEGIN, *of_gpus, END])),
        readme: _between(readme, readme_block(measured[0], gpus[0])),
    }


def main() -> None:
    """Write what is out of date."""
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
