"""A process that builds and times what it is asked for, one request after the other.

For what cannot share a process: libraries (Keras on two back ends), two versions of this package.
Requests and answers are lines of JSON; each process reads its own clock.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class WorkerError(Exception):
    """A process reported a problem, or it ended: then with the last line of its standard error."""


class Worker:
    """A process that takes requests until it is closed.

    ``extra`` are variables of its environment; ``folder`` is where its imports look first.
    """

    def __init__(self, extra: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
        paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            env={**variables, **(extra or {})},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # a group of its own, killed as a whole
        )

    def make(self, source: str, function: str, *arguments: Any) -> dict[str, Any]:
        """Let a function build the call that will be timed; returns its second result."""
        return self.ask(do="make", source=source, function=function, arguments=arguments)

    def seconds(self, repeats: int) -> float:
        """Seconds per call of one sample."""
        return float(self.ask(do="time", repeats=repeats)["seconds"])

    def __call__(self) -> None:
        """One call, to warm it up."""
        self.seconds(1)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer, or WorkerError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise WorkerError(": ".join((self._how_it_ended(), *self.close())))
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise WorkerError(answer["problem"])
        return answer

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1)
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            return f"the process {died}"
        return "the process closed its output"

    def kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> list[str]:
        """End the process; the last line of its standard error, once."""
        if self._said.closed:
            return []
        self.kill()
        # One that hangs in a driver cannot be killed; nothing waits for it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        with self._said:
            self._said.seek(0)
            return self._said.read().decode(errors="replace").splitlines()[-1:]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server:
    """The other end of the pipe; its methods are the requests."""

    def __init__(self) -> None:
        self._call: Any = None

    def where(self) -> dict[str, Any]:
        import bahdanau_fast

        return {"folder": str(Path(bahdanau_fast.__file__).absolute().parent.parent)}

    def make(self, source: str, function: str, arguments: list[Any]) -> dict[str, Any]:
        self._call = None  # frees the call before, which can be large
        self._call, said = getattr(importlib.import_module(source), function)(*arguments)
        gc.collect()
        gc.disable()
        return dict(said)

    def time(self, repeats: int) -> dict[str, Any]:
        from .measure import seconds_per_call

        return {"seconds": seconds_per_call(self._call, repeats)}


def in_one_line(error: BaseException) -> str:
    """Its kind and the first line of what it says."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:300]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:
            answer = {"problem": in_one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # what libraries do at exit could hang


if __name__ == "__main__":
    _serve()
