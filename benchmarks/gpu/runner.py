"""Experiments, each in a process with a limit of its own, and a line of JSON for all they find.

They are forked from a process that has imported torch, which takes long, and has not touched a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

LAST_LINES, LEAST_SECONDS = 12, 10.0
Record = Callable[[dict[str, Any]], None]


class Experiment(NamedTuple):
    """What runs in a process of its own, and for how long at most.

    Attributes:
        function: ``module:function``, which takes a lab and the arguments; what it returns is the
            exit code.
        beside: whether others may run at the same time, since nothing is timed.
        mode: of the lab.
        variables: of the environment.
    """

    name: str
    seconds: float
    function: str
    arguments: tuple[Any, ...] = ()
    beside: bool = False
    mode: str = "timed"
    variables: tuple[tuple[str, str], ...] = ()


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row tells of what did not go well; a way that no GPU has room for is just a row."""
    if row["stage"] == "hour":
        return "skipped" in row or row.get("rc", 0) != 0
    if row.get("tests", {}).get("no time left"):
        return True
    return not row.get("passed", True) or ("problem" in row and "constant" not in row)


class _Child:
    """The process of an experiment: what it says comes through a pipe, the rest goes to a file."""

    def __init__(self, experiment: Experiment, seconds: float) -> None:
        self._experiment, self._begun = experiment, time.monotonic()
        self._deadline = self._begun + seconds
        self._said, self._text, self._rows = tempfile.TemporaryFile(), b"", 0  # noqa: SIM115
        self._pipe, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._run(theirs)
        os.close(theirs)
        os.set_blocking(self._pipe, False)

    def _run(self, pipe: int) -> None:
        os.environ.update(self._experiment.variables)
        os.setsid()  # a group of its own, killed as a whole
        for descriptor in (1, 2):
            os.dup2(self._said.fileno(), descriptor)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # lines are there if it hangs
        code = 1
        try:
            module, _, function = self._experiment.function.partition(":")
            kind = "dry" if self._experiment.mode == "dry" else "lab"
            lab = import_module(f"{__package__}.{kind}").Lab(
                lambda **row: os.write(pipe, (json.dumps(row) + "\n").encode()),
                self._experiment.mode,
            )
            code = int(
                getattr(import_module(module), function)(lab, *self._experiment.arguments) or 0
            )
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)  # what libraries do at exit could hang

    def ended(self, record: Record) -> bool:
        """Record what the process has said since; whether it is over."""
        over, status = os.waitpid(self._pid, os.WNOHANG)
        how = None
        if over:
            code = os.waitstatus_to_exitcode(status)
            how = {"rc": code} | ({"died": signal.Signals(-code).name} if code < 0 else {})
        elif time.monotonic() > self._deadline:
            self.kill()
            how = {"rc": None, "killed after": round(self._deadline - self._begun, 1)}
        with suppress(BlockingIOError):
            while piece := os.read(self._pipe, 1 << 16):
                self._text += piece
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            record(json.loads(line) | {"experiment": self._experiment.name})
        self._rows += len(lines)
        if how is not None:
            took = round(time.monotonic() - self._begun, 1)
            told = {"stage": "hour", "row": self._experiment.name, "took": took, "rows": self._rows}
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            record(told | how | ({"said": said} if how["rc"] != 0 else {}))
            os.close(self._pipe)
            self._said.close()
        return how is not None

    def kill(self) -> None:
        """End the process and all that it started; one that hangs in a driver is left alone."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        end = time.monotonic() + 5
        with suppress(ChildProcessError):
            while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < end:
                time.sleep(0.02)


def run(experiments: Sequence[Experiment], seconds: float, record: Record, width: int) -> None:
    """Run experiments in order, those that go ``beside`` others so many at a time.

    One that hangs is killed, and the next begins; one for which no time is left is recorded so.
    """
    end, children = time.monotonic() + seconds, list[_Child]()
    try:
        for beside, group in itertools.groupby(experiments, key=lambda e: e.beside):
            waiting, most = deque(group), width if beside else 1
            while waiting or children:
                while waiting and len(children) < most:
                    experiment, left = waiting.popleft(), end - time.monotonic()
                    told = {"stage": "hour", "row": experiment.name}
                    if left < LEAST_SECONDS:
                        record(told | {"skipped": "no time left"})
                        continue
                    limit = min(experiment.seconds, left)
                    record(told | {"begins": round(seconds - left, 1), "limit": round(limit, 1)})
                    children.append(_Child(experiment, limit))
                children = [child for child in children if not child.ended(record)]
                time.sleep(0.02)
    finally:  # a signal ends the hour: no process may stay on the GPU
        for child in children:
            child.kill()
