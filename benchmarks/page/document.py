"""docs/performance.md, its pictures, and README's table and plot, from the figures of runs.

``python -m benchmarks.performance`` (``make performance``) reads ``benchmarks/results`` and writes
them all; no figure in them is typed. ``--check`` writes nothing and tells what is behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..studies.dispatch_limits import SLACK
from ..timing.worker import ROOT
from ..workloads.cases import MODES, TITLES
from ..workloads.shapes import SWEEPS
from .figures import about, milliseconds, peer_rows, shape_text
from .plots import FIGURES, draw_all
from .readme_table import lines as summary_lines
from .scaling import LARGEST, exponent, memory_points, time_points, working_per_unit
from .tables import choice_cells, markdown
from .texts import CONDITIONS, MEMORY, NOT_MEASURED, PEERS, ROOFS, differences

__all__ = ["main", "page", "readme_block", "write"]

RESULTS = ROOT / "benchmarks" / "results"
SHOWN = "cpu-amd-epyc-2cores.json"  # the machine whose figures the docs show; others may lie beside
DECODERS = "training-amd-epyc-2cores.json"  # of the same machine
BEFORE_AFTER = "before-after-amd-epyc-2cores.json"
OVERHEAD = "overhead-amd-epyc-2cores.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NOTHING = "Not measured in this run."


def _picture(data: dict[str, Any], name: str, text: str, folder: str) -> list[str]:
    if FIGURES[name](data) is None:
        return []
    return [f"![{text}]({folder}bench-{name}.png)", ""]


def _times(data: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Milliseconds of rows by provider, then why some were not run."""
    rows = {
        (str(row["shape"]), row["task"], row["mode"]): row for row in data["rows"] if wanted(row)
    }
    if not rows:
        return [NOTHING, ""]
    names = list(dict.fromkeys(name for row in rows.values() for name in row["seconds"]))
    names = [name for name in names if name != "DRAM read"]
    cells, gaps = [], []
    for row in rows.values():
        what = f"{row['shape']['name']} {shape_text(row['shape'])}"
        spreads = [row["seconds"].get(name) for name in names]
        cells.append([what, f"{row['task']}, {MODES[row['mode']]}", *map(_milliseconds, spreads)])
        gaps += [
            f"- {what}, {row['task']}: {name} was not run: {reason}"
            for name, reason in row["skipped"].items()
        ]
    return [*markdown(["shape (B, Tq, Tk, H)", "what", *names], cells), "", *_list(gaps)]


def _list(items: list[str]) -> list[str]:
    return [*dict.fromkeys(items), ""] if items else []


def _milliseconds(spread: dict[str, float] | None) -> str:
    if spread is None:
        return ""
    median, low, high = (milliseconds(spread[key]) for key in ("median", "p20", "p80"))
    return f"{median} ({low}-{high})"


def _growth(data: dict[str, Any]) -> list[str]:
    kinds = {
        "time, forward": lambda axis: _medians(time_points(data, axis, "forward")),
        "time, forward + backward": lambda axis: _medians(time_points(data, axis, "train")),
        "peak memory": lambda axis: memory_points(data, axis),
    }
    cells = []
    for kind, points_of in kinds.items():
        points = {axis: points_of(axis) for axis in SWEEPS}
        for name in dict.fromkeys(name for of_axis in points.values() for name in of_axis):
            values = (points[axis].get(name, []) for axis in SWEEPS)
            found = [f"{exponent(pairs):.2f}" if len(pairs) > 1 else "" for pairs in values]
            cells.append([kind, name, *found])
    if not cells:
        return [NOTHING, ""]
    return [
        f"Exponents: cost grows as size to this power, over the {LARGEST} largest sizes of each "
        "sweep. Below 1, fixed cost still shows, or a part that does not depend on that size.",
        "",
        *markdown(["what", "provider", *SWEEPS], cells),
        "",
    ]


def _medians(points: dict[str, list[tuple[int, Any]]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(x, spread["median"]) for x, spread in of] for name, of in points.items()}


def _memory(data: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    slopes = {axis: working_per_unit(data, axis) for axis in SWEEPS}
    names = list(dict.fromkeys(name for of_axis in slopes.values() for name in of_axis))
    if names:
        cells = [[name, *(_bytes(slopes[axis].get(name)) for axis in SWEEPS)] for name in names]
        lines += [MEMORY, "", *markdown(["provider", *(f"one more of {a}" for a in SWEEPS)], cells)]
        lines += [""]
    peaks = [[name, *_peak(peak)] for name, peak in data["peak_memory"].items()]
    if peaks:
        heads = [
            "provider, task",
            "inputs + outputs + gradients",
            "peak",
            "over what has to be there",
        ]
        lines += ["Peak of forward and backward at (4, 128, 128, 512):", ""]
        lines += [*markdown(heads, peaks), ""]
    return lines or [NOTHING, ""]


def _bytes(size: float | None) -> str:
    if size is None:
        return ""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def _peak(peak: dict[str, Any]) -> list[str]:
    if "error" in peak:
        return ["", f"not measured: {peak['error']}", ""]
    highest = max(peak["resident"], peak["allocated"])
    return [_bytes(peak["tensors"]), _bytes(highest), f"{highest / peak['tensors']:.3g}x"]


def _roofs(data: dict[str, Any]) -> list[str]:
    roofs = data.get("roofs")
    lines = [ROOFS, ""]
    if roofs:
        rates = [["DRAM, read", f"{roofs['dram_read'] / 1e9:.1f} GB/s"]]
        rates += [[name, f"{rate / 1e9:.3g} G elements/s"] for name, rate in roofs["ours"].items()]
        rates += [["one torch.tanh per element", f"{roofs['tanh'] / 1e9:.3g} G elements/s"]]
        lines += [*markdown(["roof", "this machine"], rates), ""]
    for row in data["rows"]:
        if "dram_read" in row:
            ours = row["bounds"][0]["found"]
            rate = row["dram_read"]["bytes_per_second"] / 1e9
            lines += [
                f"A step on a table that is ready, {row['shape']['name']} "
                f"{shape_text(row['shape'])}, far larger than the caches: {ours['median']:.0%} "
                f"({ours['p20']:.0%}-{ours['p80']:.0%}) of the {rate:.1f} GB/s that "
                f"{row['dram_read']['reader']} reads between its rounds.",
                "",
            ]
    return lines


def _choices(data: dict[str, Any]) -> list[str]:
    found = data.get("choices")
    if not found:
        return [NOTHING, ""]
    heads = ["choice", "B,Tq,Tk,H", "auto takes", "over the best", "ms, median (p20-p80)"]
    behind = [choice for choice in found if choice["behind"]["median"] > SLACK]
    said = (
        f"{len(found) - len(behind)} of {len(found)} choices are within {SLACK - 1:.0%} of the best"
    )
    return [
        "Both ways at sizes on either side of each limit, whatever auto would have taken; the last "
        f"column but one is the time of what it takes over that of the best. {said}.",
        "",
        *markdown(heads, choice_cells(found)),
        "",
    ]


def _peers(data: dict[str, Any]) -> list[str]:
    lines = [PEERS, "", *differences()]
    found = peer_rows(data)
    if found:
        names = list(dict.fromkeys(name for row in found for name in row.against))
        cells = [
            [row.what, shape_text(row.shape), *(_ratio(row.against.get(name)) for name in names)]
            for row in found
        ]
        heads = ["what", "(B, Tq, Tk, H)", *names]
        lines += ["Times as long as ours:", "", *markdown(heads, cells), ""]
    return [*lines, *_times(data, lambda row: row["table"] == "peers")]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def _gpu(results: Path) -> list[str]:
    """The tables of GPU reports, where there are some."""
    from ..gpu_report import table

    lines: list[str] = []
    for path in sorted(results.glob("*.json")):
        report = json.loads(path.read_text())
        if "gpu" in report.get("machine", {}):
            where = report["machine"]
            lines += [
                f"## {where['gpu']}",
                "",
                f"torch {where['torch']}, commit {where['commit']}.",
            ]
            lines += ["Microseconds: called / from a graph / from a graph with a cold L2.", ""]
            lines += [*table(report["rows"]), ""]
    return lines


def _in(*tables: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["table"] in tables


def _run(path: Path) -> Any:
    """The figures of a command of its own, None where none are committed."""
    return json.loads(path.read_text()) if path.exists() else None


def _decoders(results: Path) -> list[str]:
    """What attention adds to a decoder, from a run of ``benchmarks.training``."""
    from ..training import lines

    run = _run(results / DECODERS)
    if run is None:
        return [NOTHING, ""]
    where = run["machine"]
    return [
        f"torch {where['torch']}, commit {where['commit']}; `python -m benchmarks.training`.",
        "Encoder, output layer, loss, clipping and Adam are part of a training step; *course* is",
        "the course's loop, *no attention* its decoder without, both with the course's loss, which",
        "keeps the vocabulary in the middle. The losses of all with attention agree.",
        "",
        *lines(run["settings"]),
        "",
    ]


def _before_after(results: Path) -> list[str]:
    """Training steps before and after decoders became one operator."""
    from ..before_after import lines

    run = _run(results / BEFORE_AFTER)
    if run is None:
        return [NOTHING, ""]
    where, base = run["machine"], run["old"].split()[0]
    return [
        f"torch {where['torch']}, commit {where['commit']} against {run['old']}, where every step",
        "had a node of its own in the graph and Python took the steps; the same seed, batches and",
        f"losses. `python -m benchmarks.before_after {base}`.",
        "",
        *lines(run),
        "",
    ]


def _overhead(results: Path) -> list[str]:
    """What a call costs beside its arithmetic."""
    from ..overhead import SIZES, lines

    run = _run(results / OVERHEAD)
    if run is None:
        return [NOTHING, ""]
    return [
        f"Of a call at (B, Tq, Tk, H) = {SIZES}, where there is next to nothing to compute; commit",
        f"{run['machine']['commit']}; `python -m benchmarks.overhead`. *plain autograd.Function*",
        "calls our operator the way a tutorial on custom functions would.",
        "",
        *lines(run["microseconds"]),
        "",
    ]


def page(
    data: dict[str, Any],
    folder: str,
    more: list[str] | None = None,
    others: list[str] | None = None,
) -> str:
    """The page of a run in Markdown.

    Args:
        data: the figures, as ``bench`` writes them.
        folder: of the pictures, as links have it: empty, or ending in a slash.
        more: lines of other machines.
        others: lines on what is measured by commands of its own.
    """
    gpu = more or []
    lines = ["# Performance", "", f"{about(data)}; a run of {data['seconds']:.0f} s.", ""]
    lines += [CONDITIONS, "", "## In short", "", *summary_lines(data), ""]
    lines += _picture(data, "speedups", "times as fast as d2l's module and torch.compile", folder)
    lines += ["## As the work grows", ""]
    lines += [*_picture(data, "sweeps", "time against Tk, Tq, H and B", folder), *_growth(data)]
    lines += ["## Memory", ""]
    lines += [*_picture(data, "memory", "peak memory against Tk and H", folder), *_memory(data)]
    lines += ["## Roofs", ""]
    lines += [*_picture(data, "roofline", "elements per second under the roofs", folder)]
    lines += [*_roofs(data), "## What auto chooses", "", *_choices(data)]
    lines += ["## Other libraries", ""]
    lines += [*_picture(data, "peers", "times as fast as other libraries", folder), *_peers(data)]
    lines += others or []
    lines += ["## Every row", ""]
    for table in ("step", "loop", "many-queries", "shapes", "overhead"):
        lines += [f"### {TITLES[table]}", "", *_times(data, _in(table))]
    lines += [*gpu, "## What was not measured", "", NOT_MEASURED]
    lines += [] if gpu else ["- A GPU: no result of one is committed. `make gpu-report` makes one."]
    return "\n".join(lines).rstrip() + "\n"


def readme_block(data: dict[str, Any]) -> str:
    """Machine, table, plot and command, as README has them between its marks."""
    lines = [BEGIN, f"{about(data)}", "", *summary_lines(data), ""]
    found = _picture(data, "sweeps", "time against Tk, Tq, H and B", "docs/images/")
    lines += found or _picture(data, "speedups", "times as fast as others", "docs/images/")
    return "\n".join([*lines, END])


def write(data: dict[str, Any], out: Path) -> list[Path]:
    """The page and the pictures of one run, in a folder."""
    written = draw_all(data, out)
    target = out / "performance.md"
    target.write_text(page(data, ""), encoding="utf-8")
    return [target, *written]


def _shown(results: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((results / SHOWN).read_text())
    return data


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What docs/performance.md and README.md have to say, by the figures that are committed."""
    results = root / "benchmarks" / "results"
    data, readme = _shown(results), (root / "README.md").read_text(encoding="utf-8")
    before, mark, rest = readme.partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not mark or not closing:
        raise ValueError(f"README.md must have {BEGIN} and {END}, got one of them or none")
    others = [
        "## Training a decoder",
        "",
        *_decoders(results),
        "### Whole training steps, before and after",
        "",
        *_before_after(results),
        "## What a call costs",
        "",
        *_overhead(results),
    ]
    return {
        root / "docs" / "performance.md": page(data, "images/", _gpu(results), others),
        root / "README.md": before + readme_block(data) + after,
    }


def main() -> int:
    """Write, or with ``--check`` say what is behind its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if behind")
    options = parser.parse_args()
    wanted = generated()
    behind = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    if options.check:
        for path in behind:
            print(f"{path.relative_to(ROOT)} is behind benchmarks/results: make performance")
        return 1 if behind else 0
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    for path in (*wanted, *draw_all(_shown(RESULTS), ROOT / "docs" / "images")):
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
