"""Rows in processes that may crash, hang or run out of memory: that costs the row, not the report.

A worker process (:mod:`.worker`) computes row after row and says so in lines of JSON. Where it
dies, or a row takes longer than it may, its whole process group is killed, the row is recorded with
what happened, and a fresh process goes on with the next row. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0  # imports of torch from a cold disk
LOOK_SECONDS = 0.5
LAST_LINES = 12

Record = Callable[[dict[str, Any]], None]


class Worker:
    """One process at a time that works through its rows.

    Args:
        command: the process; ``--first N`` is added.
        deadline: of ``time.monotonic()``, for all its rows.
        record: takes the result of each row.
    """

    def __init__(self, command: Sequence[str], deadline: float, record: Record) -> None:
        self._command, self._deadline, self._record = command, deadline, record
        self._names: list[str] = []
        self._next = 0
        self.done = False
        self._start()

    def _start(self) -> None:
        self._row, self._rest, self._began, self._dead = "", b"", False, False
        self._seconds, self._limit = START_SECONDS, time.monotonic() + START_SECONDS
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by _stop()
        # A compilation that is killed half way leaves its cache unfit for the next process.
        self._cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [*self._command, "--first", str(self._next)],
            cwd=ROOT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": self._cache.name},
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # a group of its own, killed as a whole
        )

    def fileno(self) -> int:
        """Of the pipe that its lines come from."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def advance(self, readable: bool) -> None:
        """Take the lines that came; where the process died or the time is up, act on it."""
        dead_before, self._dead = self._dead, self._process.poll() is not None
        chunk = os.read(self.fileno(), 1 << 16) if readable else b""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        now = time.monotonic()
        if self.done:
            self._stop()
        elif now > self._deadline:
            self._lose("stopped: the time of the stage was up")
            self._leave("the time of the stage was up")
        elif now > self._limit:
            self._lose(f"not done in {self._seconds:g} s")
            self._go_on()
        elif not chunk and (readable or dead_before):  # the end of its output
            self._lose(self._how_it_ended())
            self._go_on()

    def _take(self, said: dict[str, Any]) -> None:
        self._seconds = said.get("seconds", START_SECONDS)
        self._limit = time.monotonic() + self._seconds
        if "rows" in said:
            self._names = said["rows"]
        elif "begin" in said:
            self._row, self._began, self._next = said["begin"], True, self._next + 1
        elif "result" in said:
            self._record({"row": self._row, **said["result"]})
            self._row = ""
        else:
            self.done = True

    def _lose(self, why: str) -> None:
        """End the process, and record what was lost: the row it was at, or all if none began."""
        said = self._stop()
        if self._row or not self._began:
            self._record({"row": self._row or "start", "problem": why, "said": said})

    def _go_on(self) -> None:
        if not self._began:
            self._leave("no process starts")
        elif self._next < len(self._names):
            self._start()
        else:
            self.done = True

    def _leave(self, why: str) -> None:
        for name in self._names[self._next :]:
            self._record({"row": name, "not run": why})
        self.done = True

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1)
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            return f"the process {died}"
        return "the process closed its output"

    def _stop(self) -> list[str]:
        """Kill the process and all that it started; the last lines of its standard error."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One that hangs in the driver cannot be killed; nothing waits for it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._cache.cleanup()
        with self._said:
            self._said.seek(0)
            return self._said.read().decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self) -> None:
        """Stop where an exception or a signal ended the report."""
        if not self.done:
            self._stop()


def run(
    rows: str,
    deadline: float,
    record: Record,
    workers: int = 1,
    options: Sequence[str] = (),
) -> None:
    """Compute rows, each at most once, and record one result for each.

    Args:
        rows: ``module:function``; the function returns the list of rows.
        deadline: of ``time.monotonic()``; rows that are left then are recorded as not run.
        record: takes a dictionary with ``row``, its name, and the result, or a ``problem``, or why
            it was ``not run``.
        workers: processes that share the rows.
        options: more words for each process.
    """
    module = f"{__package__}.worker"
    command = [sys.executable, "-W", "ignore", "-m", module, rows, *options]
    shares = ([*command, "--share", str(n), str(workers)] for n in range(workers))
    active = [Worker(share, deadline, record) for share in shares]
    try:
        while active:
            readable, _, _ = select.select(active, [], [], LOOK_SECONDS)
            for worker in active:
                worker.advance(worker in readable)
            active = [worker for worker in active if not worker.done]
    finally:
        for worker in active:
            worker.close()


def take_stdout() -> Any:
    """Standard output as a file of one's own; what libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own
