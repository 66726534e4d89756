"""Work in a process of its own, with limits: a hang or a crash there is a line here."""

from __future__ import annotations

import json
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

__all__ = ["OVER", "Row", "Work", "lines", "together"]

#: What a child says, as JSON.
Row = dict[str, Any]
Work = Callable[[], Iterable[Row]]

#: What is said of work that was not done in time, and did not hang.
OVER = "the time was over"
# In front of each row, so that nothing else that is printed is taken for one.
_MARK = b"\x1e"
# Lines of what else a child printed that a row has: the end of a traceback.
_OUTPUT = 20
# Seconds for a killed process to be gone; one that a driver holds may never be.
_GONE = 3.0


def lines(work: Work, silence: float, until: float) -> Iterator[Row]:
    """The rows that work makes in a forked child.

    Where it does not come to its end, the last row says why, as "ended", with the last lines that
    it printed, as "output". This process must not have used a GPU: CUDA does not work in a fork of
    one that has.

    Args:
        work: makes the rows.
        silence: seconds without a row after which the child is ended.
        until: the time (of ``time.monotonic``) at which it is.
    """
    reader, writer = os.pipe()
    child = _start(work, writer)
    os.close(writer)
    ended, finished, rest, output = None, False, b"", []
    heard = time.monotonic()
    try:
        while ended is None:
            left = min(heard + silence, until) - time.monotonic()
            if not select.select([reader], [], [], max(left, 0.0))[0]:
                ended = OVER if time.monotonic() >= until else f"no answer within {silence:g} s"
                break
            data = os.read(reader, 1 << 16)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                if line.startswith(_MARK):
                    heard = time.monotonic()
                    yield json.loads(line[1:])
                elif line.strip():
                    output.append(line.decode(errors="replace"))
        finished = ended is None
    finally:
        os.close(reader)
        code = _code(child, kill=not finished)
    if finished and code != 0:
        ended = _in_words(code)
    if ended is not None:
        yield {"ended": ended, "output": output[-_OUTPUT:]}


def together(works: Sequence[Work], until: float) -> None:
    """Do all at once, each in a child, and ask nobody for a row; at the time all are ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    left = [_start(work, nowhere) for work in works]
    os.close(nowhere)
    try:
        while left and time.monotonic() < until:
            left = [child for child in left if not os.waitpid(child, os.WNOHANG)[0]]
            time.sleep(0.02)
    finally:
        for child in left:
            _code(child, kill=True)


def _start(work: Work, writer: int) -> int:
    """A child that does the work."""
    sys.stdout.flush()  # else it would hold the same lines
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()  # compilers that it starts end with it
        for number in (1, 2):
            os.dup2(writer, number)
        sys.stdout = sys.stderr = os.fdopen(writer, "w", buffering=1)
        torch.set_num_threads(1)  # those of the parent are not in a fork
        for row in work():
            os.write(1, b"\n" + _MARK + json.dumps(row).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _code(child: int, kill: bool) -> int | None:
    """The exit code, negative of a signal; None of a process that does not end."""
    for end in (os.killpg, os.kill) if kill else ():  # it may have no group yet
        with suppress(ProcessLookupError):
            end(child, signal.SIGKILL)
            break
    until = time.monotonic() + _GONE
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def _in_words(code: int | None) -> str:
    if code is None:
        return "its process does not end"
    return f"its process died of {signal.Signals(-code).name}" if code < 0 else "its process raised"
