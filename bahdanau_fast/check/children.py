"""Work in a process of its own, with limits: a hang or a crash there is a line here."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

#: What a child says, as JSON.
Row = dict[str, Any]
Work = Callable[[], Iterable[Row]]

#: What is said of work that was not done in time, and did not hang.
OVER = "the time was over"
# In front of each row, so that nothing else that is printed is taken for one.
_MARK = b"\x1e"
# Lines of what else a child printed that are kept: the end of a traceback.
_OUTPUT = 20
# Seconds for a killed process to be gone; one that a driver holds may never be.
_GONE = 3.0
# Seconds that one waits for a row before one looks whether the process lives.
_MOMENT = 0.02
_writer = -1  # in a child: where its rows go


def say(row: Row) -> None:
    """In a child: a row, beside those that its work makes."""
    os.write(_writer, b"\n" + _MARK + json.dumps(row).encode() + b"\n")


class Child:
    """A forked process that does work, and what it says.

    CUDA does not work in a fork of a process that has used a GPU.

    Attributes:
        silence: seconds without a row after which it is ended; may be changed at any time.
        over: whether it has ended, and all of its rows were taken.
    """

    def __init__(self, work: Work, silence: float, until: float) -> None:
        self.silence, self.over, self._until = silence, False, until
        self._gone = False
        self._reader, writer = os.pipe()
        self._pid = _start(work, writer)
        os.close(writer)
        os.set_blocking(self._reader, False)
        self._heard, self._rest, self._output = time.monotonic(), b"", list[str]()

    def rows(self) -> list[Row]:
        """What it says within a moment.

        Where it does not come to its end, the last row says why, as "ended", with the last lines
        that it printed, as "output".
        """
        child, status = os.waitpid(self._pid, os.WNOHANG)
        self._gone = child != 0
        select.select([self._reader], [], [], 0.0 if self._gone else _MOMENT)
        said = self._read()
        now, ended = time.monotonic(), None
        if said:
            self._heard = now
        if self._gone:
            code = os.waitstatus_to_exitcode(status)
            name = f"died of {signal.Signals(-code).name}" if code < 0 else "raised"
            ended = f"its process {name}" if code else ""
        elif now >= self._until:
            ended = OVER
        elif now >= self._heard + self.silence:
            ended = f"no answer within {self.silence:g} s"
        if ended is not None:
            self.end()
        return [*said, {"ended": ended, "output": self._output[-_OUTPUT:]}] if ended else said

    def _read(self) -> list[Row]:
        with suppress(BlockingIOError):
            while data := os.read(self._reader, 1 << 16):
                self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        told = [line for line in whole if line.strip() and not line.startswith(_MARK)]
        self._output += [line.decode(errors="replace") for line in told]
        return [json.loads(line[1:]) for line in whole if line.startswith(_MARK)]

    def end(self) -> None:
        """End it, and all that it started; one that a driver holds is left alone."""
        if self.over:
            return
        self.over = True
        os.close(self._reader)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._gone:
            return
        os.kill(self._pid, signal.SIGKILL)  # it may not have its group yet
        until = time.monotonic() + _GONE
        while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < until:
            time.sleep(_MOMENT)


def lines(works: Sequence[Work], until: float, silence: float = math.inf) -> Iterator[Row]:
    """The rows that works make, all at once, in a :class:`Child` for each.

    Args:
        works: make the rows.
        until: the time (of ``time.monotonic``) at which all are ended.
        silence: seconds without a row after which a child is ended.
    """
    left = [Child(work, silence, until) for work in works]
    try:
        while left:
            for child in left:
                yield from child.rows()
            left = [child for child in left if not child.over]
    finally:
        for child in left:
            child.end()


def _start(work: Work, writer: int) -> int:
    sys.stdout.flush()  # else it would hold the same lines
    child = os.fork()
    if child:
        return child
    global _writer
    _writer, code = writer, 1
    try:
        os.setsid()  # compilers that it starts end with it
        for number in (1, 2):
            os.dup2(writer, number)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)  # those of the parent are not in a fork
        for row in work():
            say(row)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
