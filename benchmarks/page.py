"""Writes README's figures and chart, and the tables of docs/, from the figures of runs.

``python -m benchmarks.page`` reads every file in ``benchmarks/results``; no figure is typed by
hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import front
from .cases import SUBJECT, Shape
from .contestants.peers import PROVIDERS as LIBRARIES
from .gpu import rows, summary
from .measured import Run, about, chosen, name_of, runs
from .tables import markdown, milliseconds, processor, shape_text
from .worker import ROOT

RESULTS = rows.RESULTS
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
    lines = [f"### {name_of(run)}", "", f"{about(run)}.", "", *table(run), ""]
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
    others = (time for name, time in medians.items() if not name.startswith("ours"))
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
        for library in (each.name for each in LIBRARIES):
            if library in each.others:
                of_library = cells.setdefault((machine, library), {})
                of_library[each.what] = f"{each.times(library):.3g}x"
    rows = [[*key, *(of.get(shape, "") for shape in shapes)] for key, of in cells.items()]
    return markdown(["machine", "library", *shapes], rows)


def performance(measured: list[Run], felt: list[list[rows.Row]]) -> list[str]:
    """The tables of docs/performance.md.

    Args:
        measured: a run of ``bench`` of each machine.
        felt: rows of ``user`` of each machine.
    """
    lines = [line for run in measured for line in of_machine(run)]
    lines += ["### Other libraries, of the time of ours", "", *_peers(measured), ""]
    for of_one in felt:
        lines += [
            f"### {processor(of_one[0]['where'])}",
            "",
            *summary.users(of_one),
            "",
            *summary.hosts(of_one),
        ]
    return lines


def _between(path: Path, *blocks: list[str]) -> str:
    """A page with what stands between its marks replaced, a block for each pair of marks.

    Raises:
        ValueError: it has another number of marks.
    """
    parts = re.split(f"({BEGIN}|{END})", path.read_text(encoding="utf-8"))
    if parts[1::2] != [BEGIN, END] * len(blocks):
        need = f"have {BEGIN} and {END} {len(blocks)} times"
        raise ValueError(f"{path.name} must {need}, got {parts[1::2]}")
    for number, lines in enumerate(blocks):
        parts[4 * number + 2] = "\n".join(["", *lines, ""])
    return "".join(parts)


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What the pages, README and its chart have to say by the committed figures.

    Raises:
        ValueError: a page lacks a mark that its tables stand between.
    """
    results, docs, readme = root / "benchmarks" / "results", root / "docs", root / "README.md"
    measured, felt = runs(results), rows.measured("cpu", results)
    gpus = rows.measured("gpu", results)
    gpu_lines = [line for of_gpu in gpus for line in (*summary.block(of_gpu), "")][:-1]
    first = measured[0], gpus[0]
    return {
        docs / "performance.md": _between(docs / "performance.md", performance(measured, felt)),
        docs / "gpu.md": _between(docs / "gpu.md", gpu_lines),
        docs / "images" / "speed.svg": front.chart(*first),
        readme: _between(readme, front.claim(*first), front.models(felt[0], gpus[0])),
    }


def main() -> None:
    """Write what is out of date."""
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
