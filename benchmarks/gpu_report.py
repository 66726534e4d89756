"""``make gpu-report``: checks and figures from the GPU at hand, in less than ten minutes.

make has built the kernels. Each stage runs in processes of its own, and each result is a line of
``<gpu>-<date>.jsonl`` as soon as it is there: what fails later costs nothing that was found before.
The stages come in the order of what is learnt from them. No GPU is touched here: one whose driver
hangs hangs a process that is killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .gpu import EACH, MACHINE, START_SECONDS, Experiment, run
from .gpu.rows import COPY, TIMES, block, of_report, right
from .tables import RESULTS

SOURCE = f"{__package__}.gpu.stages"

# Seconds that a stage may take, and processes that share its rows: one where time is taken.
STAGES = {"user": (150, 1), "smoke": (60, 5), "time": (80, 1), "build": (40, 8), "rivals": (60, 1)}
# What make gives the build; looking at the machine; all of it.
BUILD_SECONDS, MACHINE_SECONDS, TOTAL_SECONDS = 150.0, 40.0, 580.0
# Of these stages every row is ours, and has to be right.
OURS = ("smoke", "time")


def deadlines(names: Sequence[str], begin: float, seconds: float = TOTAL_SECONDS) -> list[float]:
    """When each stage has to end: what one leaves goes to the next, and the last gets all of it.

    Args:
        names: of the stages, in their order.
        begin: when the build began.
        seconds: of all of it.
    """
    ends, end = [], begin + BUILD_SECONDS + MACHINE_SECONDS
    for name in names:
        end += STAGES[name][0]
        ends.append(min(end, begin + seconds))
    return [*ends[:-1], begin + seconds]


def text(result: dict[str, Any]) -> str:
    """A result in one line."""
    said = f"PROBLEM: {result['problem']}" if "problem" in result else ""
    said = said or ("" if right(result) else "WRONG ")
    if "worst" in result:
        said += f" error {result['worst']:.2f} of what is allowed"
    for state in TIMES:
        if state in result:
            said += f" {state} {1e6 * result[state]['median']:.4g} us"
    if "host us" in result:
        said += f" host {result['host us']:.4g} us"
    if "of roof" in result:
        said += f", {result['of roof']:.0%} of a copy's bandwidth"
    for name, (launches, us) in result.get("kernels", {}).items():
        said += f"\n    {us:8.1f} us x {launches:g}  {name[:100]}"
    return f"{result['stage']}: {result['row']}: {said.strip() or json.dumps(result)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 2 where there is no GPU, 1 where a row of ours failed.

    Args:
        arguments: instead of those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stage", nargs="*", choices=list(STAGES), default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="build included")
    parser.add_argument(
        "--started", type=float, help="when the build began, in seconds of the epoch"
    )
    given = parser.parse_args(arguments)
    begin = time.monotonic() - BUILD_SECONDS
    if given.started is not None:
        begin = time.monotonic() - (time.time() - given.started)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return _report(given, begin)


def _report(given: argparse.Namespace, begin: float) -> int:
    found: list[dict[str, Any]] = []
    # From a cold disk this can take longer than planned; then the stages have less.
    look = Experiment("machine", 2 * START_SECONDS, MACHINE, (given.device,))
    run([look], look.seconds, found.append)
    where = next((row for row in found if row["stage"] == "machine"), found[-1])
    if "gpu" not in where:
        problem = where.get("problem") or ": ".join([where["ended"], *where["said"][-1:]])
        print(f"gpu-report: {problem}; nothing is measured", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", where["gpu"].split(",")[0].lower()).strip("-")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{name}-{datetime.date.today().isoformat()}.jsonl"
    rows: list[dict[str, Any]] = []
    stages, copied = given.stage or [*STAGES], list[float]()
    with path.open("a", encoding="utf-8") as file:

        def record(stage: str, result: dict[str, Any]) -> None:
            if result["stage"] == "hour":  # of a process, not of a row
                why = result.get("skipped") or result.get("ended")
                if not why or result.get("rows"):
                    return
                said = result.get("said", [])
                result = {"row": "start", "problem": ": ".join((why, *said[-1:])), "said": said}
            result = {**result, "stage": stage}
            if COPY in result:
                copied.append(result[COPY])
            if copied and "bytes" in result:
                best = result.get("cold", result["called"])["median"]
                result["of roof"] = result["bytes"] / copied[-1] / best
            print(json.dumps(result), file=file, flush=True)
            print(text(result), flush=True)
            rows.append(result)

        record("machine", where)
        for stage, end in zip(stages, deadlines(stages, begin, given.seconds), strict=True):
            left, parts = end - time.monotonic(), STAGES[stage][1]
            of_stage = (stage, f"{SOURCE}:{stage}", given.device)
            processes = [
                Experiment(stage, left, EACH, (*of_stage, part, parts), beside=True)
                for part in range(parts)
            ]
            run(processes, left, partial(record, stage), parts)
    for of_file in filter(None, of_report(rows).values()):
        print("\n".join(["", *block([*of_file.values()]), ""]))
    wrong = [row for row in rows if row["stage"] in OURS and not right(row)]
    wrong += [row for row in rows if row["stage"] == "user" and not row.get("passed", True)]
    print(f"{len(rows)} results, {len(wrong)} of ours not right; wrote {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended too
    sys.exit(main())
