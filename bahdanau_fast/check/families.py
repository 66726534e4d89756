"""The families of kernels on a GPU, and what each is tried on.

A family is one of :data:`switches.SWITCHES`: what is wrong has a name by which it is switched off.
It is tried in a process where the others of its backend are off, so that none is taken for another.
Sizes reach it on GPUs of any number of multiprocessors (tests/package/test_check.py).
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from bahdanau_fast import backends, switches
from bahdanau_fast.check.children import Row
from bahdanau_fast.check.problems import (
    Case,
    Cell,
    CheckProblem,
    Prepared,
    Way,
    Worst,
    attention,
    decoder,
    in_words,
    once,
    worst,
    worst_token,
)
from bahdanau_fast.modules.attention_rnn import AttentionGRU, AttentionLSTM

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL, HALF = (FP32, BF16, FP16), (BF16, FP16)
_ROUNDS = 4  # of calls on two streams


# ---- ways to run what differs in its numbers alone ----


def _again(problems: Sequence[Prepared], run: Any) -> list[tuple[int, Any]]:
    """The plan that the second call saved launches the third, on other numbers."""
    return [(i, run(problems[i])) for i in (0, 0, 1)]


def _on_two_streams(problems: Sequence[Prepared], run: Any) -> list[tuple[int, Any]]:
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: dict[int, Any] = {}
    for _, (i, stream) in product(range(_ROUNDS), enumerate(streams)):
        with torch.cuda.stream(stream):
            results[i] = run(problems[i])
    torch.cuda.synchronize()
    return [*results.items()]


def _replayed(problems: Sequence[Prepared], run: Any) -> list[tuple[int, Any]]:
    """A CUDA graph of the first, on the numbers of the second."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # what is loaded and tried out at first calls
        for _ in range(2):
            run(problems[0])
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(problems[0])
    captured, others = ([*problem.leaves, *problem.others] for problem in problems[:2])
    with torch.no_grad():
        for old, new in zip(captured, others, strict=True):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    return [(1, results)]


WAYS: dict[str, Way] = {"": once, "again": _again}
WAYS |= {"two streams": _on_two_streams, "replayed": _replayed}


# ---- families ----


class Experiment(NamedTuple):
    """What is tried, in words, and in which dtype."""

    name: str
    dtype: torch.dtype
    judge: Callable[[str, str], Worst]  # of a backend on a device
    # How the backend would compute it, where that is not what is to be tried; else None.
    absent: Callable[[str, str], str | None] = lambda *_: None


class Family(NamedTuple):
    """A backend, and the experiments with a family of its kernels."""

    backend: str
    experiments: tuple[Experiment, ...]


def _experiment(
    problem: CheckProblem, dtype: torch.dtype, way: str = "", by: str = ""
) -> Experiment:
    return Experiment(
        f"{problem.name}, {way}" if way else problem.name,
        dtype,
        lambda backend, device: worst(problem, backend, dtype, device, WAYS[way]),
        partial(_absent, problem, dtype, by),
    )


def _absent(
    problem: CheckProblem, dtype: torch.dtype, by: str, backend: str, device: str
) -> str | None:
    if not by:
        return None
    with backends.use(backend):
        explained = problem.prepare(0, dtype, dtype, device).explain()
    return None if by in explained else explained


def _family(backend: str, *experiments: Experiment) -> Family:
    return Family(backend, experiments)


def _calls(
    cases: Sequence[Case], dtypes: Sequence[torch.dtype], ways: Sequence[str] = ("",)
) -> tuple[Experiment, ...]:
    every = product(map(attention, cases), dtypes, ways)
    return tuple(_experiment(problem, dtype, way) for problem, dtype, way in every)


def _greedy(cls: Cell, dtype: torch.dtype) -> Experiment:
    return Experiment(
        f"{cls.__name__} writes tokens",
        dtype,
        lambda backend, device: worst_token(cls, backend, dtype, device),
        partial(_absent, decoder(cls), dtype, _ONE),  # type: ignore[arg-type]  # of a cache
    )


_SIZES = 64, 64, 48  # Dq, Dk, Dv
_STEP = Case("step", 2, 1, 10, 64, _SIZES, "per row")
_SPLIT = Case("step, keys split", 1, 1, 300, 64, _SIZES)
_FEW = Case("few queries", 2, 3, 40, 64, _SIZES, "mask")
_ODD = Case("odd sizes", 2, 5, 35, 11, (5, 7, 3), "per query")
_LARGE = Case("many units", 1, 1, 30, 1536, (32, 32, 32))
_WIDE = Case("wide values", 1, 1, 20, 32, (16, 16, 600))
_TOGETHER = (
    Case("step in a cluster", 1, 1, 64, 64, _SIZES),
    Case("few queries in a cluster", 1, 3, 64, 64, _SIZES, "mask"),
    Case("projection in a cluster", 2, 1, 10, 128, (128, 64, 48)),
)
_MANY = Case("many queries", 2, 17, 34, 64, _SIZES, "per row")
_RELU = Case("many queries, ReLU", 2, 17, 34, 64, _SIZES, "per row", "relu")
_LONG = Case("long queries", 1, 128, 128, 16, _SIZES)
_GRAPHED = ("two streams", "replayed")
_LOOP, _ONE = "a loop of launches", "one launch"
_CELLS = AttentionGRU, AttentionLSTM

#: By the names of :data:`switches.SWITCHES`, in their order.
FAMILIES = {
    "cuda": _family(
        "cuda",
        *_calls((_STEP, _SPLIT, _FEW, _ODD, _LARGE, _WIDE), ALL),
        *_calls((_STEP, _SPLIT), (BF16,), _GRAPHED),
        *(_experiment(decoder(cls), BF16, by=_LOOP) for cls in _CELLS),
    ),
    "clusters": _family("cuda", *_calls(_TOGETHER, ALL), *_calls(_TOGETHER[:1], (BF16,), _GRAPHED)),
    "one-launch": _family(
        "cuda",
        *(_experiment(decoder(cls), d, by=_ONE) for cls in _CELLS for d in HALF),
        *(_experiment(decoder(AttentionGRU), BF16, way, _ONE) for way in _GRAPHED),
        *(_greedy(cls, dtype) for cls in _CELLS for dtype in HALF),
    ),
    "triton": _family(
        "triton",
        *_calls((_SPLIT, _MANY), ALL),
        *_calls((_STEP, _FEW, _RELU), (BF16,)),
        *_calls((_STEP, _MANY), (BF16,), _GRAPHED),
        _experiment(decoder(AttentionGRU), BF16, by=_LOOP),
    ),
    "terms": _family("triton", *_calls((_MANY,), HALF), *_calls((_MANY,), (BF16,), _GRAPHED)),
    "waves": _family("triton", *_calls((_LONG,), HALF), *_calls((_LONG,), (BF16,), _GRAPHED)),
    "kept-launches": _family(
        "triton", *_calls((_SPLIT, _MANY), ALL, ("again",)), *_calls((_SPLIT,), (BF16,), _GRAPHED)
    ),
}


def beside(name: str) -> frozenset[str]:
    """The other families of a backend, which are off while one is tried."""
    backend = FAMILIES[name].backend
    of_backend = (other for other, family in FAMILIES.items() if family.backend == backend)
    return frozenset(of_backend) - {name, backend}


def compiled(name: str, dtype: torch.dtype, device: str = "cuda") -> Iterator[Row]:
    """No row: has Triton compile what a family takes in a dtype, and launches nothing of it.

    For a process of its own: kernels go into Triton's cache, for the processes that launch them.
    """

    def compile_alone(_: Any, kernel: Any, *grid: int, **args: Any) -> None:
        getattr(kernel.warmup(grid=grid, **args), "run", None)  # older Tritons compile that, too

    importlib.import_module("bahdanau_fast.backends.triton.launch").Steps.launch = compile_alone
    switches.OFF |= beside(name) | {"kept-launches"}
    WAYS.update(dict.fromkeys(WAYS, once))
    for experiment in FAMILIES[name].experiments:
        if experiment.dtype is dtype:
            # Of numbers that were not computed; or it will be raised again.
            with suppress(Exception):
                experiment.judge("triton", device)
    yield from ()


def rows(name: str, device: str = "cuda") -> Iterator[Row]:
    """What the experiments with a family give, each announced by a row that has "begun".

    Has "ours" and "eager", as shares of what is allowed, and the result that they are of, "worst";
    or what it "raised"; or that it is "absent". Switches others off for the whole process.
    """
    switches.OFF |= beside(name)
    backend = FAMILIES[name].backend
    for experiment in FAMILIES[name].experiments:
        row = {"case": experiment.name, "dtype": in_words(experiment.dtype)}
        yield {**row, "begun": True}
        try:
            absent = experiment.absent(backend, device)
            if absent is not None:
                yield {**row, "absent": absent}
                continue
            ours, eager, label = experiment.judge(backend, device)
        except Exception as error:
            line = (str(error).strip() or "no words").splitlines()[0]
            output = traceback.format_exc(limit=-4).splitlines()
            yield {**row, "raised": f"{type(error).__name__}: {line}", "output": output}
        else:
            yield {**row, "ours": ours, "eager": eager, "worst": label}
