"""``python -m bahdanau_fast bench``: measures every table in one run, prints and writes it."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bahdanau_fast.seq2seq.plots import require_matplotlib

from .page import write
from .studies import dispatch_limits
from .studies.peak_memory import growth, measure
from .tables import (
    bound_lines,
    bounds_met,
    limit_table,
    missed_limits,
    peak_table,
    roofs_of,
    row_table,
)
from .timing.machine import machine, save, slug
from .timing.roofs import Reader, compute_roofs
from .timing.runner import Runner
from .workloads.shapes import MANY_QUERIES, TITLES, cases

PEAKS = (
    ("d2l eager", "projected"),
    ("compiled", "projected"),
    ("ours op", "projected"),
    ("ours module", "full"),
)
GROWING = ("d2l eager", "compiled", "ours op")
MEMORY, CHOICES, ROOFS = "peak-memory", "choices", "roofs"


@dataclass(frozen=True)
class Options:
    """What to measure, and where to write it.

    Attributes:
        quick: small shapes, short rounds, no peers.
        only: tables or shapes whose name contains this.
        strict: exit code 1 for a missed bound too.
        out: folder for the page and the plots.
        json: file for the figures, or folder for a file named after the machine; None: ``out``.
        note: kept and shown with the figures.
    """

    quick: bool = False
    only: str | None = None
    strict: bool = False
    out: Path = Path("bench-output")
    json: Path | None = None
    note: str = ""


def _wanted(options: Options, name: str) -> bool:
    return not options.only or options.only in name


def _measure_tables(options: Options) -> list[dict[str, Any]]:
    runner = Runner(seconds=0.05, min_rounds=3) if options.quick else Runner()
    wanted = cases(options.quick, options.only)
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=len(wanted), disable=not sys.stderr.isatty(), file=sys.stderr)
    with runner, bar:
        for table, group in itertools.groupby(wanted, key=lambda case: case.table):
            done: list[dict[str, Any]] = []
            for case in group:
                bar.set_description(f"{table} {case.shape.name} {case.task} {case.mode}")
                done.append(runner.row(case).packed())
                bar.update()
            bar.write(f"\n{TITLES[table]}; ms, median (p20-p80)\n", file=sys.stdout)
            bar.write("\n".join([*row_table(done), *bound_lines(done)]), file=sys.stdout)
            sys.stdout.flush()
            rows += done
    return rows


def _measure_memory(options: Options) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not _wanted(options, MEMORY):
        return {}, []
    shape = MANY_QUERIES[0]
    peaks: dict[str, Any] = {}
    for name, task in PEAKS:
        peak = measure(name, task, shape)
        peaks[f"{name}, {task}"] = {"error": peak} if isinstance(peak, str) else vars(peak)
    print(f"\nPeak memory of forward and backward at {shape}\n")
    print("\n".join(peak_table(peaks)), flush=True)
    return peaks, growth(GROWING, ("H",) if options.quick else ("Tk", "Tq", "H", "B"))


def _measure_limits(options: Options) -> list[dict[str, Any]]:
    if not _wanted(options, CHOICES):
        return []
    found = dispatch_limits.measure(0.02 if options.quick else 0.1)
    print("\nWhat auto chooses near its limits, every way timed\n")
    print("\n".join([*limit_table(found), *missed_limits(found)]), flush=True)
    return found


def _measure_roofs(options: Options) -> dict[str, Any]:
    if not _wanted(options, ROOFS):
        return {}
    return roofs_of(compute_roofs(), Reader().measure().bytes_per_second)


def _best(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each roof."""
    if not first:
        return {}
    rates = {name: max(rate, second["rates"][name]) for name, rate in first["rates"].items()}
    return roofs_of(rates, max(first["dram_read"], second["dram_read"]))


def run(options: Options) -> int:
    """Measure, print and write; returns the exit code.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``only`` names nothing, or ``out`` or ``json`` cannot be written to.
    """
    require_matplotlib()  # wrong arguments shall fail before minutes of measuring
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder, got {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"--json must be in a folder that exists, got {options.json}")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    start, where = time.perf_counter(), machine()
    if options.note:
        where["note"] = options.note
    for name, value in where.items():
        print(f"{name:<14} {value}")
    roofs = _measure_roofs(options)
    rows = _measure_tables(options)
    limits = _measure_limits(options)
    roofs = _best(roofs, _measure_roofs(options))
    peaks, growing = _measure_memory(options)
    if not (rows or peaks or limits or roofs):
        raise ValueError(f"--only must name a table or a shape, got {options.only!r}")
    data: dict[str, Any] = {
        "machine": where,
        "seconds": time.perf_counter() - start,
        "rows": rows,
        "peak_memory": peaks,
        "memory_growth": growing,
        "roofs": roofs,
        "choices": limits,
    }
    held, count = bounds_met(data)
    wrong = sum(not all(found["passed"] for found in row["parity"].values()) for row in rows)
    print(f"\n{held} of {count} bounds hold; {wrong} rows failed parity; {data['seconds']:.0f} s")
    file = options.json or options.out
    if options.json is None or file.is_dir():
        file /= f"{slug(where)}.json"
    save(file, data)
    print("wrote " + ", ".join(map(str, (file, *write(data, options.out)))))
    return 1 if wrong or (held < count and options.strict) else 0
