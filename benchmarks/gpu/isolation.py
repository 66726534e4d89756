"""Rows in processes that may crash, hang or run out of memory: that costs the row, not the report.

Each thread here asks a process of its own (:mod:`..timing.worker`) for one row after the other.
Where the process dies, or a row takes longer than it may, its whole process group is killed, the
row is recorded with what happened, and a fresh process goes on with the next row. Nothing here
imports torch.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..timing.worker import Worker, WorkerError

START_SECONDS = 90.0  # imports of torch from a cold disk
TIME_IS_UP = "the time of the stage was up"

Record = Callable[[dict[str, Any]], None]


class Stage:
    """The rows of a stage, handed out to the threads that ask for them.

    Args:
        source: ``module:function``; the function takes a device and returns the list of rows.
        deadline: of ``time.monotonic()``; rows that are left then are recorded as not run.
        record: takes ``row``, its name, and the result, a ``problem``, or why it was ``not run``.
        device: name of the device.
        only: words that a row's name has to contain.
    """

    def __init__(
        self, source: str, deadline: float, record: Record, device: str, only: Sequence[str] = ()
    ) -> None:
        self._module, _, self._function = source.partition(":")
        self._deadline, self._record = deadline, record
        self._device, self._only = device, only
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
        starts = True
        while starts and (self._left is None or self._left) and self._seconds_left() > 0:
            # A compilation that is killed half way leaves its cache unfit for the next process.
            with (
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
                Worker({"TORCHINDUCTOR_CACHE_DIR": cache}) as worker,
            ):
                self._active.add(worker)
                starts = not self._stopped and self._starts(worker)
                while starts and self._row(worker):
                    pass
                self._active.discard(worker)

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
                named = ((name, seconds) for name, seconds in rows)
                self._left = deque(r for r in named if all(words in r[0] for words in self._only))
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
