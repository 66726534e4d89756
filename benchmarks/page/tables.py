"""Prints rows as Markdown tables, and packs them for JSON."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import bahdanau_fast as bf

from ..studies.dispatch_limits import SLACK
from ..studies.peak_memory import Peak
from ..timing.measure import Spread
from ..timing.runner import Check, Row, check
from ..workloads.cases import MEMORY_BOUND, MODES, SUBJECT
from .figures import milliseconds

__all__ = [
    "as_json",
    "choice_cells",
    "choice_lines",
    "machine",
    "markdown",
    "memory_lines",
    "slug",
    "table_lines",
]


def machine() -> dict[str, str]:
    """Where and with what the figures were made."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{os.cpu_count()} ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bahdanau_fast": bf.__version__,
        "commit": _commit(),
        "backend": bf.backends.explain("cpu").splitlines()[0],
        "cpu kernels": next(
            line.split(maxsplit=1)[-1]
            for line in bf.backends.explain("cpu").splitlines()
            if line.split()[0] == "cpu"
        ),
    }


def _cpu_model() -> str:
    """Its name; an AMD EPYC of a cloud says no more than that, so its family and model too."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))
    told = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in told:
        return platform.processor() or platform.machine()
    numbers = f"family {told.get('cpu family', '?')}, model {told.get('model', '?')}"
    return f"{told['model name']} ({numbers})"


def slug(where: dict[str, str]) -> str:
    """What the file of a machine's figures is called: its processor and cores."""
    model = where["cpu"].partition("(")[0].partition("@")[0]
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"cpu-{words}-{where['cores'].split()[0]}cores"


def _commit() -> str:
    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changes = " with changes" if git("status", "--porcelain") else ""
    return (commit or "none") + changes


def _ms(spread: Spread) -> str:
    parts = [milliseconds(seconds) for seconds in (spread.median, spread.p20, spread.p80)]
    return f"{parts[0]} ({parts[1]}-{parts[2]})"


def table_lines(rows: list[Row]) -> list[str]:
    """A table of milliseconds, median (p20-p80), then a line for each bound and each gap."""
    names = list(dict.fromkeys(name for row in rows for name in (*row.groups, *row.skipped)))
    lines = markdown(["B,Tq,Tk,H", "what", *names], (_cells(row, names) for row in rows))
    for row in rows:
        what = f"{row.case.shape}, {row.case.task}, {MODES[row.case.mode]}"
        for name, verdict in row.failed.items():
            lines.append(
                f"FAIL  parity: {what}: {name}, {verdict.where}: {verdict.worst:.3g} of the allowed"
            )
        for name, reason in row.skipped.items():
            lines.append(f"      {what}: {name} not run: {reason}")
        lines += [_check_line(row, what, check(row, bound)) for bound in row.case.bounds]
    return lines


def _cells(row: Row, names: list[str]) -> list[str]:
    cells = [str(row.case.shape), f"{row.case.task}, {MODES[row.case.mode]}"]
    for name in names:
        if row.timings is not None and name in row.timings.samples:
            cells.append(_ms(row.timings.time(name)))
        elif name in row.skipped:
            cells.append("not run")
        else:
            cells.append("parity FAIL" if name in row.failed else "")
    return cells


def _check_line(row: Row, what: str, found: Check) -> str:
    verdict = "PASS" if found.holds else "FAIL"
    subject, need = SUBJECT[row.case.task], found.bound.at_least
    if found.found is None:
        return f"{verdict}  {what}: {found.rival}"
    median, p20, p80 = found.found.median, found.found.p20, found.found.p80
    if found.bound.against == "DRAM" and row.roof is not None:
        roof = row.roof.bytes_per_second / 1e9
        return (
            f"{verdict}  {what}: {subject} reads {median * roof:.1f} GB/s, {median:.0%} "
            f"({p20:.0%}-{p80:.0%}) of {roof:.1f} GB/s by {row.roof.reader}; needs {need:.0%}"
        )
    return (
        f"{verdict}  {what}: {subject} is {median:.3g}x ({p20:.3g}-{p80:.3g}) as fast as "
        f"{found.rival}; needs {need:g}x"
    )


def memory_lines(peaks: dict[str, Peak | str]) -> list[str]:
    """The table of peaks and its bound, which is stated for the op."""
    cells, lines = [], []
    for name, peak in peaks.items():
        if isinstance(peak, str):
            lines.append(f"      {name} not measured: {peak}")
            continue
        sizes = (peak.tensors, peak.resident, peak.allocated)
        megabytes = [f"{size / 1e6:.2f} MB" for size in sizes]
        cells.append([name, *megabytes, f"{peak.factor:.3g}x"])
        if name == "ours op, projected":
            verdict = "PASS" if peak.factor <= MEMORY_BOUND else "FAIL"
            lines.append(
                f"{verdict}  {name}: peak is {peak.factor:.3g}x inputs, outputs and gradients; "
                f"needs at most {MEMORY_BOUND}x"
            )
    heads = ["provider", "inputs + outputs + gradients", "peak, resident", "peak, torch", "factor"]
    return markdown(heads, cells) + lines


def choice_cells(found: list[dict[str, Any]]) -> list[list[str]]:
    """A row of cells for each choice: what, sizes, taken, over the best, every way's time."""
    cells = []
    for choice in found:
        times = {name: Spread(**spread) for name, spread in sorted(choice["seconds"].items())}
        ways = "; ".join(f"{name} {_ms(time)}" for name, time in times.items())
        behind = f"{choice['behind']['median']:.2f}"
        cells.append([choice["what"], _sizes(choice), choice["takes"], behind, ways])
    return cells


def _sizes(choice: dict[str, Any]) -> str:
    return ",".join(str(choice["shape"][key]) for key in ("batch", "queries", "keys", "hidden"))


def choice_lines(found: list[dict[str, Any]]) -> list[str]:
    """The table of choices, and a line for each that is more than the slack behind."""
    heads = ["choice", "B,Tq,Tk,H", "auto takes", "over the best", "ms, median (p20-p80)"]
    missed = [
        f"FAIL  {choice['what']} at {_sizes(choice)}: {choice['takes']} takes "
        f"{choice['behind']['median']:.2f}x as long as {choice['best']}; may take {SLACK:.2f}x"
        for choice in found
        if choice["behind"]["median"] > SLACK
    ]
    return markdown(heads, choice_cells(found)) + missed


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


def as_json(row: Row) -> dict[str, Any]:
    """A row with all it was made from."""
    case = row.case
    packed: dict[str, Any] = {
        "table": case.table,
        "shape": vars(case.shape),
        "task": case.task,
        "mode": case.mode,
        "spent": row.spent,
        "skipped": row.skipped,
        "parity": {name: vars(verdict) for name, verdict in row.verdicts.items()},
        "seconds": {},
        "ratio_to_ours": {},
    }
    subject = SUBJECT[case.task]
    if row.timings is not None:
        packed["rounds"] = row.timings.rounds
        for name in row.timings.samples:
            packed["seconds"][name] = vars(row.timings.time(name))
            if subject in row.timings.samples:
                packed["ratio_to_ours"][name] = vars(row.timings.ratio(name, subject))
    if row.roof is not None:
        packed["dram_read"] = vars(row.roof)
    packed["bounds"] = [
        {
            "against": bound.against,
            "at_least": bound.at_least,
            "rival": found.rival,
            "found": None if found.found is None else vars(found.found),
            "holds": found.holds,
        }
        for bound in case.bounds
        for found in (check(row, bound),)
    ]
    return packed
