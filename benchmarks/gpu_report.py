"""``make gpu-report``: checks and figures from the GPU at hand, in less than ten minutes.

make has built the kernels. Each stage runs in processes of its own, and each result is a line of
``<gpu>-<date>.jsonl`` as soon as it is there: what fails later costs nothing that was found before.
The stages come in the order of what is learnt from them. Nothing imports torch here before all rows
are there: a GPU whose driver hangs hangs a process that is killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .gpu.rows import COPY, RESULTS, TIMES, of_report, right
from .worker import Worker, WorkerError

SOURCE, MACHINE = f"{__package__}.gpu.stages", f"{__package__}.gpu.machine:machine"


# Seconds that a stage may take, and processes that share its rows: one where time is taken.
STAGES = {"user": (150, 1), "smoke": (60, 5), "time": (80, 1), "build": (40, 8), "rivals": (60, 1)}
# What make gives the build; looking at the machine; all of it.
BUILD_SECONDS, MACHINE_SECONDS, TOTAL_SECONDS = 150.0, 40.0, 580.0
START_SECONDS = 90.0  # imports of torch from a cold disk
TIME_IS_UP = "the time of the stage was up"
# Of these stages every row is ours, and has to be right.
OURS = ("smoke", "time")

Record = Callable[[dict[str, Any]], None]


class Rows:
    """The rows of a stage, handed out to threads that ask a process of their own for each.

    Where a process dies, or a row takes longer than it may, the whole process group is killed, the
    row is recorded with what happened, and a fresh process goes on with the next row.

    Args:
        source: ``module:function``; the function takes a device and returns the list of rows.
        deadline: of ``time.monotonic()``; rows that are left then are recorded as not run.
        record: takes ``row``, its name, and the result, a ``problem``, or why it was ``not run``.
        device: name of the device.
        cache: folder of what is compiled. A process after one that was killed, whose compilation
            may be there by half, gets a folder of its own in it.
    """

    def __init__(
        self, source: str, deadline: float, record: Record, device: str, cache: Path
    ) -> None:
        self._cache = cache
        self._module, _, self._function = source.partition(":")
        self._deadline, self._record, self._device = deadline, record, device
        self._lock = threading.Lock()
        self._left: deque[tuple[str, float]] | None = None
        self._active: set[Worker] = set()
        self._stopped = False

    def run(self, workers: int = 1) -> None:
        """Compute each row at most once, in so many processes."""
        threads = [threading.Thread(target=self._work) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            why = TIME_IS_UP if self._seconds_left() <= 0 else "no process starts"
            for name, _ in self._left or ():
                self._tell(row=name, **{"not run": why})
        finally:  # an exception or a signal ends the report: no process may stay on the GPU
            self._stopped = True
            for worker in list(self._active):
                worker.kill()

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _tell(self, **result: Any) -> None:
        with self._lock:
            if not self._stopped:
                self._record(result)

    def _work(self) -> None:
        """Rows in one process, and where it is lost, in a fresh one."""
        starts, cache = True, self._cache
        while starts and (self._left is None or self._left) and self._seconds_left() > 0:
            with Worker({"TORCHINDUCTOR_CACHE_DIR": str(cache)}) as worker:
                self._active.add(worker)
                starts = not self._stopped and self._starts(worker)
                while starts and self._row(worker):
                    pass
                self._active.discard(worker)
            cache = Path(tempfile.mkdtemp(dir=self._cache))

    def _starts(self, worker: Worker) -> bool:
        """Ask a fresh process for its rows; False if it has none to give."""
        request = {"do": "rows", "source": self._module, "function": self._function}
        within = min(START_SECONDS, self._seconds_left())
        try:
            rows = worker.ask(within, **request, device=self._device)["rows"]
        except WorkerError as error:
            self._tell(row="start", problem=error.problem, said=error.said)
            return False
        with self._lock:
            if self._left is None:
                self._left = deque((name, seconds) for name, seconds in rows)
        return True

    def _row(self, worker: Worker) -> bool:
        """Compute the next row; False where there is none, or its process is lost."""
        try:
            name, seconds = self._left.popleft()  # type: ignore[union-attr]
        except IndexError:
            return False
        try:
            answer = worker.ask(min(seconds, self._seconds_left()), do="compute", name=name)
        except WorkerError as error:
            problem = error.problem if self._seconds_left() > 0 else f"stopped: {TIME_IS_UP}"
            self._tell(row=name, problem=problem, said=error.said)
            return False
        self._tell(row=name, **answer["result"])
        return not answer["dead"] and self._seconds_left() > 0


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


def _machine(device: str, cache: Path) -> dict[str, Any]:
    """The machine, or with a ``problem`` why nothing can be measured."""
    found: list[dict[str, Any]] = []
    # From a cold disk this can take longer than planned; then the stages have less.
    deadline = time.monotonic() + 2 * START_SECONDS
    Rows(MACHINE, deadline, found.append, device, cache).run()
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
        return _report(given, begin, Path(cache))


def _report(given: argparse.Namespace, begin: float, cache: Path) -> int:
    where = _machine(given.device, cache)
    if "problem" in where:
        print(f"gpu-report: {where['problem']}; nothing is measured", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", where["gpu"].split(",")[0].lower()).strip("-")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{name}-{datetime.date.today().isoformat()}.jsonl"
    rows: list[dict[str, Any]] = []
    stages, copied = given.stage or [*STAGES], list[float]()
    with path.open("a", encoding="utf-8") as file:

        def record(stage: str, result: dict[str, Any]) -> None:
            result = {"stage": stage, **result}
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
            tell = partial(record, stage)
            of_stage = Rows(f"{SOURCE}:{stage}", end, tell, given.device, cache)
            of_stage.run(STAGES[stage][1])
    from .gpu import summary  # imports torch

    for found in filter(None, of_report(rows).values()):
        print("\n".join(["", *summary.block([*found.values()]), ""]))
    wrong = [row for row in rows if row["stage"] in OURS and not right(row)]
    wrong += [row for row in rows if row["stage"] == "user" and not row.get("passed", True)]
    print(f"{len(rows)} results, {len(wrong)} of ours not right; wrote {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended too
    sys.exit(main())
