"""What is measured on a GPU: experiments, each in a process and with a limit of its own.

Processes are forked from one that has imported torch, which takes long, and has not touched a GPU.
"""

import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bahdanau_fast.check.children import OVER, Child, say

from ..machine import with_gpu
from ..worker import in_one_line

LEAST_SECONDS = 10.0  # that are worth to begin an experiment
START_SECONDS = 90.0  # imports from a cold disk
Record = Callable[[dict[str, Any]], None]


class Row(NamedTuple):
    """One result to compute, which JSON can hold; it hangs if it takes longer than ``seconds``."""

    name: str
    seconds: float
    compute: Callable[[], dict[str, Any]]


class Experiment(NamedTuple):
    """What runs in a process of its own, and for how long at most."""

    name: str
    seconds: float
    function: str  # ``module:function``, which takes the arguments and tells rows by ``say``
    arguments: tuple[Any, ...] = ()
    beside: bool = False  # whether others may run at the same time, since nothing is timed
    variables: tuple[tuple[str, str], ...] = ()  # of the environment
    first: int = 0  # of `each`, the first row that is computed
    spare: float = 0.0  # seconds that are left to those after it


EACH, MACHINE = f"{__name__}:each", f"{__name__}:machine"


def machine(device: str, called: str = "") -> None:
    found = with_gpu(device) | ({"gpu": called} if called else {})
    say({"stage": "machine", "row": "machine", **found})


def each(
    stage: str, source: str, device: str, part: int = 0, parts: int = 1, first: int = 0
) -> None:
    """Compute the rows of a stage, or each so-many-th, and say how far it is.

    Where the process dies or a row hangs, :func:`run` records that row, and a fresh process goes on
    with the next, its ``first``. ``source`` is ``module:function`` or
    ``module:function:argument``; the function takes a device and the argument, and returns the
    rows, which so many ``parts`` share.
    """
    module, function, *more = source.split(":", 2)
    rows: list[Row] = getattr(import_module(module), function)(device, *more)[part::parts]
    say({"names": [row.name for row in rows]})
    for number, row in enumerate(rows[first:], first):
        say({"begins": number, "stage": stage, "within": row.seconds})
        begun, result = time.monotonic(), dict[str, Any]()
        try:
            result = row.compute()
            json.dumps(result)
        except Exception as error:  # a library may raise anything; it becomes the result
            said = traceback.format_exc().splitlines()[-8:]
            result = {"problem": in_one_line(error), "said": said}
        result["seconds"] = round(time.monotonic() - begun, 3)
        dead = _gpu_problem()
        result |= {} if dead is None else {"problem": dead}
        say({"stage": stage, "row": row.name, **result})
        if dead is not None:  # the GPU fails further rows of this process too
            raise RuntimeError(dead)


def _gpu_problem() -> str | None:
    """What the GPU says of the launches so far; None where no GPU is in use."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            return in_one_line(error)
    return None


class _Running:
    """The process of an experiment; ``rest`` is what another one has to go on with."""

    def __init__(self, experiment: Experiment, limit: float) -> None:
        self.experiment, self._begun = experiment, time.monotonic()
        self._end, self._count, self._why = self._begun + limit, 0, dict[str, Any]()
        self._names, self._next, self._open = list[str](), experiment.first, dict[str, Any]()
        silence = START_SECONDS if experiment.function == EACH else math.inf
        work = partial(_work, experiment, torch.get_num_threads())
        self.child, self.rest = Child(work, silence, self._end), dict[str, Any]()

    def listen(self, record: Record) -> None:
        """Record what it has said since, and in the end how it ended."""
        for row in self.child.rows():
            if "ended" in row:
                self._why = {"ended": row["ended"], "said": row["output"]}
            elif "names" in row:
                self._names = row["names"]
            elif "begins" in row:
                self._next = row["begins"] + 1
                self._open = {"stage": row["stage"], "row": self._names[row["begins"]]}
                self.child.silence = row["within"]
            else:
                self._tell(record, row)
        if self.child.over:
            self._over(record)

    def _tell(self, record: Record, row: dict[str, Any]) -> None:
        self._count, self._open = self._count + 1, {}
        record(row | {"experiment": self.experiment.name})

    def _over(self, record: Record) -> None:
        why, left = self._why.get("ended", "its process left"), self._end - time.monotonic()
        if self._open:
            self._tell(record, self._open | {"problem": why, "said": self._why.get("said", [])})
        if self._names[self._next :] and left >= LEAST_SECONDS:
            # What it was compiling may be there by half.
            cache = tempfile.mkdtemp(dir=os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
            variables = (*self.experiment.variables, ("TORCHINDUCTOR_CACHE_DIR", cache))
            self.rest = {"seconds": left, "first": self._next, "variables": variables}
        else:
            for name in self._names[self._next :]:
                row = {"stage": self.experiment.arguments[0], "row": name, "not run": OVER}
                self._tell(record, row)
        took = round(time.monotonic() - self._begun, 1)
        told = {"stage": "hour", "row": self.experiment.name, "took": took, "rows": self._count}
        record(told | self._why)


def _work(experiment: Experiment, threads: int) -> tuple[()]:
    torch.set_num_threads(threads)
    os.environ.update(experiment.variables)
    more = {"first": experiment.first} if experiment.function == EACH else {}
    module, _, function = experiment.function.partition(":")
    getattr(import_module(module), function)(*experiment.arguments, **more)
    return ()


def run(experiments: Sequence[Experiment], seconds: float, record: Record, width: int = 1) -> None:
    """Run experiments in order, those that go ``beside`` others so many at a time.

    One that hangs is killed, and the next begins; one for which no time is left is recorded so.
    """
    end, running = time.monotonic() + seconds, list[_Running]()
    try:
        for beside, group in itertools.groupby(experiments, key=lambda e: e.beside):
            waiting, most = deque(group), width if beside else 1
            while waiting or running:
                while waiting and len(running) < most:
                    experiment, left = waiting.popleft(), end - time.monotonic()
                    told = {"stage": "hour", "row": experiment.name}
                    limit = min(experiment.seconds, left - experiment.spare)
                    if left - experiment.spare < LEAST_SECONDS:
                        record(told | {"skipped": "no time left"})
                        continue
                    record(told | {"begins": round(seconds - left, 1), "limit": round(limit, 1)})
                    running.append(_Running(experiment, limit))
                for one in running:
                    one.listen(record)
                    if one.rest:
                        waiting.appendleft(one.experiment._replace(**one.rest))
                running = [one for one in running if not one.child.over]
    finally:  # a signal ends the hour: no process may stay on the GPU
        for one in running:
            one.child.end()


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row tells of what did not go well; a way that no GPU has room for is just a row."""
    if row["stage"] == "hour":
        return "skipped" in row or "ended" in row
    if row.get("tests", {}).get("no time left"):
        return True
    checks = row.get("passed", True), row.get("graph gives the same bits", True)
    return not all(checks) or ("problem" in row and "constant" not in row)


def measure(
    who: str, look: Experiment, path: Callable[[dict[str, Any]], Path],
    plan: Sequence[Experiment], seconds: float, width: int,
) -> list[dict[str, Any]] | None:  # fmt: skip
    """Look at the machine, then run a plan; every row goes to a file as it comes.

    Where there is no GPU, ``who`` says so, and None is returned. ``look`` tells the row of the
    machine, by which ``path`` names the file; ``seconds`` are for all, ``width`` is that of run.
    """
    begun, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        run([look], look.seconds, rows.append)
        where = next((row for row in rows if row["stage"] == "machine"), rows[-1])
        if "gpu" not in where:
            problem = where.get("problem") or ": ".join([where["ended"], *where["said"][-1:]])
            print(f"{who}: {problem}; nothing is measured", file=sys.stderr)
            return None
        path(where).parent.mkdir(parents=True, exist_ok=True)
        with path(where).open("a", encoding="utf-8") as file:

            def record(row: dict[str, Any]) -> None:
                print(json.dumps(row), file=file, flush=True)
                print(json.dumps({k: v for k, v in row.items() if k != "text"})[:500], flush=True)
                rows.append(row)

            looked, rows = rows, []
            for row in looked:
                record(row)
            run(plan, seconds - (time.monotonic() - begun), record, width)
    print(f"wrote {path(where)}")
    return rows


def command(main: Callable[[], int]) -> None:
    """Leave with the code of a command; a signal ends its children, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
