"""A process that builds and times what it is asked for, one request after the other.

For what cannot share a process: libraries (Keras on two back ends), two versions of this package.
Each process reads its own clock.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]


class WorkerError(Exception):
    """A process reported a problem, or it ended."""


class Worker:
    """A process that takes requests until it is closed.

    ``extra`` are variables of its environment; ``folder`` is where its imports look first.
    """

    def __init__(self, extra: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
        self._pipe, other = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_serve, args=(other,), daemon=True)
        path = [str(folder or ROOT), str(ROOT), *sys.path]
        with patch.dict(os.environ, extra or {}), patch.object(sys, "path", path):
            self._process.start()
        other.close()

    def make(self, function: Callable[..., tuple[Any, Any]], *arguments: Any) -> Any:
        """Let a function build the call that will be timed; returns its second result."""
        return self._ask((function, arguments))

    def seconds(self, repeats: int) -> float:
        return float(self._ask(repeats))

    def __call__(self) -> None:
        """One call, to warm it up."""
        self.seconds(1)

    def _ask(self, request: Any) -> Any:
        try:
            self._pipe.send(request)
            problem, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode or 0
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise WorkerError(f"the process {died}") from None
        if problem:
            raise WorkerError(problem)
        return answer

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process.is_alive() and self._process.pid:
            with suppress(ProcessLookupError):  # it may not have its group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(5)  # one that hangs in a driver cannot be killed

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


def where() -> tuple[None, Path]:
    """What a worker makes: nothing, and the folder that its package is from."""
    import bahdanau_fast

    return None, Path(bahdanau_fast.__file__).absolute().parent.parent


def in_one_line(error: BaseException) -> str:
    """Its kind and the first line of what it says."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:300]


def _serve(pipe: Connection) -> None:
    from .measure import seconds_per_call

    os.setsid()  # a group of its own, killed as a whole
    warnings.simplefilter("ignore")
    call: Any = None
    while True:
        try:
            request = pipe.recv()
            if isinstance(request, int):
                answer: Any = seconds_per_call(call, request)
            else:
                call = None  # frees the call before, which can be large
                function, arguments = request
                call, answer = function(*arguments)
                gc.collect()
                gc.disable()
            pipe.send((None, answer))
        except EOFError:
            os._exit(0)  # what libraries do at exit could hang
        except Exception as error:
            pipe.send((in_one_line(error), None))
