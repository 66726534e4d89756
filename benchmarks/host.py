"""What the host of a GPU does in a call, without the GPU: our own Python, counted and timed.

A row of the table ``host`` has the course's module in eager code, ours on the CPU, and ours on the
route of an H100 with launches that do nothing (``tests/support/host_only.py``), by CUDA C++ and by
Triton. What those compute is what memory held: nothing is checked. A share of d2l's time is one of
minima, as nothing but a disturbance adds to the time of Python.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bahdanau_fast as bf
from bahdanau_fast import kernels

from .cases import Case, Shape, draw
from .contestants.baselines import CourseAttention
from .measure import interleave, seconds_per_call
from .tables import Packed
from .worker import ROOT, Worker

OWN, ON_CPU = "d2l eager", "ours module"
ROUTES = {"ours, CUDA C++": "cuda", "ours, Triton": "triton"}
FOLDERS = tuple(str(Path(of.__file__).parent) for of in (bf, kernels))  # one, where installed
TRITON = (3, 9)  # whose driver has all of its C in a file


class Walk(NamedTuple):
    """The way of a call through this package.

    Attributes:
        calls: of its Python functions.
        stays: in a file, one after the other.
        rooms: files.
        returns: stays in a file that was left before.
    """

    calls: int
    stays: int
    rooms: int
    returns: int


def walk(call: Callable[[], Any]) -> Walk:
    """The way of a call, the third after two that warm it up."""
    files: list[str] = [""]  # of the functions that run; what is not ours is where its caller is
    stays: list[str] = []
    calls = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            file = frame.f_code.co_filename
            own = file.startswith(FOLDERS)
            calls += own
            files.append(file if own else files[-1])
        elif event == "return" and len(files) > 1:
            files.pop()
        if files[-1] and stays[-1:] != files[-1:]:
            stays.append(files[-1])

    for _ in range(2):
        call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    rooms = len(set(stays))
    return Walk(calls, len(stays), rooms, len(stays) - rooms)


def call_of(module: Any, case: Case) -> Callable[[], Any]:
    """A call of a module, with its backward in training; a step on a memory where it makes one."""
    inputs = draw(case.shape)
    given = inputs.queries, inputs.keys, inputs.values, inputs.valid_lens
    if case.task == "step" and isinstance(module, bf.AdditiveAttention):
        return partial(module.attend, given[0], module.memory(*given[1:]))
    forward = partial(module, *given)
    if case.mode == "forward":
        return forward
    inputs.require_grad(True)
    leaves = inputs.leaves("full")[:-3] + tuple(module.parameters())
    return lambda: torch.autograd.grad(forward(), leaves, inputs.grad_context)


def why_not() -> str | None:
    """What keeps calls from the route of a GPU, or None."""
    if torch.cuda.is_available():
        return "there is a GPU, whose calls `make gpu-report` times"
    with suppress(PackageNotFoundError):
        triton = tuple(map(int, version("triton").split(".")[:2]))
        if triton >= TRITON and platform.machine() == "x86_64" and shutil.which("g++"):
            return None
    return f"it takes g++ for x86-64, and Triton {'.'.join(map(str, TRITON))} or newer"


def routed(backend: str) -> AbstractContextManager[None]:
    """Inside, calls are those of a GPU with this backend; "" leaves them on the CPU."""
    if not backend:
        return nullcontext()
    sys.path += {str(ROOT / "tests" / folder) for folder in ("support", "cuda")} - {*sys.path}
    import host_only

    return host_only.routed(backend)


class _Routed:
    """A call on a route; the way there and back is not timed."""

    def __init__(self, backend: str, call: Callable[[], Any]) -> None:
        self._backend, self._call = backend, call

    def __call__(self) -> Any:
        with routed(self._backend):
            return self._call()

    def seconds(self, repeats: int) -> float:
        with routed(self._backend):
            return seconds_per_call(self._call, repeats)


def row_in(worker: Worker, case: Case, seconds: float, min_rounds: int) -> Packed:
    """Let a process count and time a case: as it is written in JSON.

    Args:
        worker: loads what this process is better without, and has one thread.
        case: of the table ``host``.
        seconds: for each who computes it.
        min_rounds: as :func:`interleave` takes it.
    """
    return worker.make(__name__, measured.__name__, asdict(case), seconds, min_rounds)


def measured(of: dict[str, Any], seconds: float, min_rounds: int) -> tuple[None, Packed]:
    """What a worker makes of the fields of a case: nothing to time, and the row."""
    case = Case(**{**of, "shape": Shape(**of["shape"])})
    problem, sizes = why_not(), [case.shape.hidden] * 3
    calls, found = dict[str, Callable[[], Any]](), dict[str, Walk]()
    with torch.set_grad_enabled(case.mode != "forward"):
        for name, backend in {OWN: "", ON_CPU: "", **ROUTES}.items():
            if backend and problem:
                continue
            module = (CourseAttention if name == OWN else bf.AdditiveAttention)(*sizes)
            with routed(backend):
                call = call_of(module, case)
                found[name] = walk(call)
            calls[name] = _Routed(backend, call)
        timings = interleave(calls, case.share * seconds * len(calls), min_rounds)
    least = {name: min(samples) for name, samples in timings.samples.items()}
    return None, {
        "table": case.table,
        "shape": vars(case.shape),
        "task": case.task,
        "mode": case.mode,
        "skipped": dict.fromkeys(ROUTES, problem) if problem else {},
        "parity": {},
        "host": {
            name: {"share": least[name] / least[OWN], **found[name]._asdict()}
            for name in calls
            if name != OWN
        },
        "seconds": timings.packed(),
    }
