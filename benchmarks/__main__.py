"""``python -m benchmarks``: every table, one interleaved run, parity checked first."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .cases import MEMORY_BOUND, TITLES, cases
from .peak_memory import Peak, measure
from .report import as_json, machine, memory_lines, table_lines
from .run import Row, Runner, check
from .shapes import MANY_QUERIES

PEAKS = (
    ("d2l eager", "projected"),
    ("compiled", "projected"),
    ("ours op", "projected"),
    ("ours module", "full"),
)
MEMORY = "peak-memory"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, short rounds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--only", metavar="NAME", help="tables or shapes whose name contains this")
    parser.add_argument("--strict", action="store_true", help="a missed bound is exit code 1 too")
    return parser.parse_args()


def _measure_tables(arguments: argparse.Namespace) -> list[Row]:
    runner = Runner(seconds=0.05, min_rounds=3) if arguments.quick else Runner()
    wanted = cases(arguments.quick, arguments.only)
    rows: list[Row] = []
    bar = tqdm(total=len(wanted), disable=not sys.stderr.isatty(), file=sys.stderr)
    with runner, bar:
        for table, group in itertools.groupby(wanted, key=lambda case: case.table):
            done: list[Row] = []
            for case in group:
                bar.set_description(f"{table} {case.shape.name} {case.task} {case.mode}")
                done.append(runner.row(case))
                bar.update()
            bar.write(f"\n{TITLES[table]}; ms, median (p20-p80)\n", file=sys.stdout)
            bar.write("\n".join(table_lines(done)), file=sys.stdout)
            sys.stdout.flush()
            rows += done
    return rows


def _measure_memory(only: str | None) -> dict[str, Peak | str]:
    if only and only not in MEMORY:
        return {}
    shape = MANY_QUERIES[0]
    peaks = {f"{name}, {task}": measure(name, task, shape) for name, task in PEAKS}
    print(f"\nPeak memory of forward and backward at {shape}\n")
    print("\n".join(memory_lines(peaks)))
    return peaks


def _summary(rows: list[Row], peaks: dict[str, Peak | str], seconds: float) -> tuple[int, int]:
    """Print the count of bounds; how many rows failed parity, how many bounds are missed."""
    checks = [check(row, bound) for row in rows for bound in row.case.bounds]
    held = [found.holds for found in checks]
    for name, peak in peaks.items():
        if name == "ours op, projected":
            held.append(isinstance(peak, Peak) and peak.factor <= MEMORY_BOUND)
    wrong = sum(bool(row.failed) for row in rows)
    print(f"\n{sum(held)} of {len(held)} bounds hold; {wrong} rows failed parity; {seconds:.0f} s")
    return wrong, len(held) - sum(held)


def main() -> int:
    """Measure, print, write; the exit code."""
    arguments = _arguments()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    start, where = time.perf_counter(), machine()
    for name, value in where.items():
        print(f"{name:<14} {value}")
    rows = _measure_tables(arguments)
    peaks = _measure_memory(arguments.only)
    if not rows and not peaks:
        print(f"nothing is called {arguments.only!r}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    wrong, missed = _summary(rows, peaks, seconds)
    if arguments.json is not None:
        packed: dict[str, Any] = {
            "machine": where,
            "seconds": seconds,
            "rows": [as_json(row) for row in rows],
            "peak_memory": {
                name: {"error": peak} if isinstance(peak, str) else vars(peak)
                for name, peak in peaks.items()
            },
        }
        arguments.json.write_text(json.dumps(packed, indent=1) + "\n")
    return 1 if wrong or (missed and arguments.strict) else 0


if __name__ == "__main__":
    sys.exit(main())
