"""A provider in a process of its own, timed in turn with those of other processes.

This compares libraries that cannot share a process (Keras on two back ends) and two versions of
this package. Each process builds its call and checks its parity. While one process is timed, the
others wait on a pipe. Each process reads its own clock, so no message is part of a time.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bahdanau_fast

from ..contestants import parity
from ..contestants.parity import Verdict
from ..gpu.isolation import take_stdout
from ..workloads.shapes import Shape
from .measure import seconds_per_call

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """The problem that a process reported instead of a result, in one line."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables with which a process finds this package from any folder."""
    variables = {**os.environ, **(extra or {})}
    if (
        __package__.partition(".")[0] == "benchmarks"
    ):  # a checkout: installed, it is found as part of bahdanau_fast
        paths = (str(ROOT), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


class Worker:
    """A process that builds and times one call after the other.

    Args:
        extra: variables set in its environment.
        folder: its working folder, the first place that its imports look in.
    """

    def __init__(self, extra: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"{__package__}.worker"],
            env=environment(extra),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build(
        self, source: str, provider: str, task: str, shape: Shape, mode: str = "forward"
    ) -> Verdict:
        """Build the provider's call that will be timed, and check its parity.

        Args:
            source: name of the module whose ``PROVIDERS`` holds the provider.
            provider: its name.
            task: one of the tasks it serves.
            shape: of the inputs, which each process draws alike.
            mode: ``forward``, ``graph`` or ``train``.

        Raises:
            WorkerError: the provider cannot be built, or is not installed.
        """
        given = (source, provider, task, asdict(shape), mode)
        return Verdict(**self.make(parity.__name__, parity.checked_call.__name__, *given))

    def make(self, source: str, function: str, *arguments: Any) -> dict[str, Any]:
        """Let a function of a module build the call that will be timed; returns its second result.

        Raises:
            WorkerError: the function raised.
        """
        return self.ask(do="make", source=source, function=function, arguments=arguments)

    def seconds(self, repeats: int) -> float:
        """Seconds per call of one sample."""
        return float(self.ask(do="time", repeats=repeats)["seconds"])

    def __call__(self) -> None:
        """One call, to warm it up."""
        self.seconds(1)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            WorkerError: the answer is a problem, or the process has ended.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            said = errors.strip().splitlines() or [f"exit code {self._process.returncode}"]
            raise WorkerError(said[-1])
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise WorkerError(answer["problem"])
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            with suppress(BrokenPipeError):
                self._process.communicate()  # closing its input ends it

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server:
    """The other end of the pipe: holds one call."""

    def __init__(self) -> None:
        self._call: Any = None

    def make(self, source: str, function: str, arguments: list[Any]) -> dict[str, Any]:
        self._call = None  # frees the call before, which can be large
        self._call, said = getattr(importlib.import_module(source), function)(*arguments)
        gc.collect()
        gc.disable()
        return dict(said)

    def where(self) -> dict[str, Any]:
        return {"folder": str(Path(bahdanau_fast.__file__).absolute().parent.parent)}

    def time(self, repeats: int) -> dict[str, Any]:
        return {"seconds": seconds_per_call(self._call, repeats)}


def _serve() -> None:
    answers = take_stdout()
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # a library may raise anything; it becomes the answer
            said = str(error).strip().splitlines() or [""]
            answer = {"problem": f"{type(error).__name__}: {said[0]}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
