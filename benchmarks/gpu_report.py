"""``make gpu-report``: checks and figures from the GPU at hand, in less than ten minutes.

make has built the kernels. Each stage runs in processes of its own, and each result is a line of
``<gpu>-<date>.jsonl`` as soon as it is there: what fails later costs nothing that was found before.
Without ``--stage`` the stages come in the order of what is learnt from them. Nothing here imports
torch: a GPU whose driver hangs hangs a process that is killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .gpu import isolation

RESULTS = Path(__file__).resolve().parent / "results"
ROWS = f"{isolation.__package__}.stages"


class Stage(NamedTuple):
    """Seconds that a stage may take, and processes that share its rows: one where time is taken."""

    seconds: float
    workers: int = 1


STAGES = {
    "smoke": Stage(130, workers=5),
    "time": Stage(110),
    "plans": Stage(70),
    "compiled": Stage(80),
    "parity": Stage(200, workers=8),
    "sanitize": Stage(200, workers=4),
}
FIRST = ("smoke", "time", "plans", "compiled")
# What make gives the build; looking at the machine; all of it.
BUILD_SECONDS, MACHINE_SECONDS, TOTAL_SECONDS = 150.0, 40.0, 580.0
# Of these stages every row is ours, and has to be right.
OURS = ("smoke", "time", "plans", "parity", "sanitize")
# Of these the calls are compared with each other.
COMPARED = ("time", "compiled")


def deadlines(names: Sequence[str], begin: float) -> list[float]:
    """When each stage has to end: what one leaves goes to the next, and the last gets all of it.

    Args:
        names: of the stages, in their order.
        begin: when the build began.
    """
    ends, end = [], begin + BUILD_SECONDS + MACHINE_SECONDS
    for name in names:
        end += STAGES[name].seconds
        ends.append(min(end, begin + TOTAL_SECONDS))
    return [*ends[:-1], begin + TOTAL_SECONDS]


def right(result: dict[str, Any]) -> bool:
    """Whether a row has a result that no check calls wrong."""
    checks = (result.get("passed", True), result.get("graph gives the same bits", True))
    return "problem" not in result and all(checks)


def _us(result: dict[str, Any]) -> str:
    """Microseconds: called / from a graph / from a graph with a cold L2."""
    spreads = (result.get(state) for state in ("called", "graph", "cold"))
    return " / ".join(f"{1e6 * spread['median']:.1f}" if spread else "-" for spread in spreads)


def text(result: dict[str, Any]) -> str:
    """A result in one line."""
    said = f"PROBLEM: {result['problem']}" if "problem" in result else ""
    said = said or ("" if right(result) else "WRONG ")
    if "worst" in result:
        said += f" error {result['worst']:.2f} of what is allowed"
    if "called" in result:
        said += f" {_us(result)} us"
    for name, figures in result.get("plans", {}).items():
        said += f"\n    {name}: {figures.get('problem') or _us(figures) + ' us'}"
    for name, (launches, us) in result.get("kernels", {}).items():
        said += f"\n    {us:8.1f} us x {launches:g}  {name[:100]}"
    return f"{result['stage']}: {result['row']}: {said.strip() or json.dumps(result)}"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Microseconds by call and by who computes it, ours and the others."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["stage"] in COMPARED and "called" in row:
            who, _, call = row["row"].partition(": ")
            cells.setdefault(call, {})[who] = _us(row) if right(row) else f"{_us(row)}, wrong"
    names = sorted({who for of_call in cells.values() for who in of_call})
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for call, of_call in cells.items():
        lines.append(f"| {call} | {' | '.join(of_call.get(name, '') for name in names)} |")
    return lines


def reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in a folder, each with its machine and the latest of each row."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        latest = {(line["stage"], line["row"]): line for line in lines}
        found.append({"machine": latest.pop(("machine", "machine")), "rows": [*latest.values()]})
    return found


def _machine(device: str) -> dict[str, Any]:
    """The machine, or with a ``problem`` why nothing can be measured."""
    found: list[dict[str, Any]] = []
    # From a cold disk this can take longer than planned; then the stages have less.
    deadline = time.monotonic() + 2 * isolation.START_SECONDS
    isolation.Stage(f"{ROWS}:machine", deadline, found.append, device).run()
    where = found[0]
    if "problem" in where:
        where["problem"] += "".join(f": {line}" for line in where.get("said", [])[-1:])
    return where


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 2 where there is no GPU, 1 where a row of ours failed.

    Args:
        arguments: instead of those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stage", nargs="*", choices=list(STAGES), default=[])
    parser.add_argument("--only", action="append", default=[], help="rows whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--started", type=float, help="when the build began, in seconds of the epoch"
    )
    given = parser.parse_args(arguments)
    begin = time.monotonic() - BUILD_SECONDS
    if given.started is not None:
        begin = time.monotonic() - (time.time() - given.started)
    where = _machine(given.device)
    if "problem" in where:
        print(f"gpu-report: {where['problem']}; nothing is measured", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", where["gpu"].split(",")[0].lower()).strip("-")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{name}-{datetime.date.today().isoformat()}.jsonl"
    rows: list[dict[str, Any]] = []
    stages = given.stage or FIRST
    with path.open("a", encoding="utf-8") as file:

        def record(stage: str, result: dict[str, Any]) -> None:
            result = {"stage": stage, **result}
            print(json.dumps(result), file=file, flush=True)
            print(text(result), flush=True)
            rows.append(result)

        record("machine", where)
        for stage, end in zip(stages, deadlines(stages, begin), strict=True):
            tell = partial(record, stage)
            rows_of = isolation.Stage(f"{ROWS}:{stage}", end, tell, given.device, given.only)
            rows_of.run(STAGES[stage].workers)
    print("\n".join(table(rows)))
    wrong = [row for row in rows if row["stage"] in OURS and not right(row)]
    print(f"{len(rows)} results, {len(wrong)} of ours not right; wrote {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended too
    sys.exit(main())
