"""``python -m benchmarks`` measures every table, prints it, and keeps the figures as JSON.

A call is timed only after its result has been checked.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from .bench import Runner
from .cases import TITLES, cases
from .machine import machine, rows_text, slug
from .page import of_machine
from .tables import row_table


def measure(runner: Runner, only: str | None = None) -> list[dict[str, Any]]:
    """Every row as it is written in JSON; prints each table.

    Raises:
        ValueError: ``only`` names nothing.
    """
    wanted = cases(only)
    if not wanted:
        raise ValueError(f"--only must name a table or a shape, got {only!r}")
    rows: list[dict[str, Any]] = []
    with runner:
        for table, group in itertools.groupby(wanted, key=lambda case: case.table):
            done = [runner.row(case) for case in group]
            title = f"{TITLES[table]}; ms, median (p20-p80)"
            print("\n".join(["", title, "", *row_table(done)]), flush=True)
            rows += done
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 if a result is wrong, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="tables or shapes whose name contains NAME")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="for the figures")
    parser.add_argument("--note", default="", help="kept and shown with the figures")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    start, where = time.perf_counter(), machine()
    if options.note:
        where["note"] = options.note
    for name, value in where.items():
        print(f"{name:<14} {value}")
    try:
        rows = measure(Runner(), options.only)
    except ValueError as error:
        parser.error(str(error))
    run = {"machine": where, "seconds": time.perf_counter() - start, "rows": rows}
    print("\n".join(of_machine(run)))
    wrong = sum(not all(found["passed"] for found in row["parity"].values()) for row in rows)
    print(f"{wrong} rows failed parity; {run['seconds']:.0f} s")
    file = options.out / f"{slug(where)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(rows_text(run), encoding="utf-8")
    print(f"wrote {file}; python -m benchmarks.page writes the page")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
