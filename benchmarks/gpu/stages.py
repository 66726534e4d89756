"""The rows of each stage of the GPU report, the most telling first."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES

from ..contestants.providers import Provider
from ..timing.worker import ROOT, Row
from ..workloads.shapes import LIST, MANY_QUERIES, STEPS_ON_MEMORY, Shape
from . import figures
from .figures import GpuCase
from .rivals import FUSED, IN_FRONT, MASKED_CALL, RIVALS

DTYPES = ("bfloat16", "float32", "float16")
ROW_SECONDS, TUNED_SECONDS, TOOL_SECONDS = 60.0, 90.0, 400.0
CLEAN = r"SUMMARY: 0 (errors|hazards)"  # what a sanitizer says at its end

# Odd sizes, which need every mask, and every way of cutting a call: many queries; few, whose
# gradient takes two kernels; long rows in splits; both projections in the launch.
SMALL = (
    (Shape("small-many", 3, 17, 53, 71, value_size=29, lens="drawn"), "projected", True),
    (Shape("small-few", 2, 6, 150, 40, value_size=33, lens="drawn"), "projected", True),
    (Shape("small-split", 2, 1, 997, 40, value_size=33, lens="drawn"), "projected", True),
    (Shape("small-raw", 2, 3, 150, 40, value_size=33, lens="drawn"), "full", False),
    (Shape("small-step", 2, 1, 150, 40, query_size=36, value_size=33), "step", False),
)
WIDE = Shape("step-256", 256, 1, 400, 512)
_BY_NAME = {shape.name: shape for shape in (*LIST, *STEPS_ON_MEMORY)}
STEP, PARALLEL = _BY_NAME["step-64"], (_BY_NAME["parallel-16"], *reversed(MANY_QUERIES))
ONE, LONG = _BY_NAME["step-1"], _BY_NAME["pooling"]
LARGE, LENS = _BY_NAME["gnmt-infer"], replace(STEP, name="step-64-lens", lens="drawn")
BEAMS = tuple(replace(STEP, name=f"beam-{n}", queries=n) for n in (4, 10))
# What ours and the others are timed on.
CALLS = (
    *(GpuCase("", shape, "step") for shape in (STEP, WIDE)),
    *(GpuCase("", shape, "projected", train=train) for shape in (WIDE, *PARALLEL)
      for train in (False, True)),
    *(GpuCase("", shape, "projected", "float32", True) for shape in (WIDE, PARALLEL[-1])),
    GpuCase("", STEP, "step", "float32"),
)  # fmt: skip
ACCEPTANCE = (
    *((STEP, task, False) for task in ("step", "full")),
    *((WIDE, task, train) for task, train in (("step", False), ("full", False))),
    *((shape, "projected", True) for shape in (WIDE, *PARALLEL)),
)


def _backends(device: torch.device) -> tuple[str, ...]:
    """Those whose kernels run on the device, and that can be loaded."""
    names = ("cuda", "triton") if device.type == "cuda" else ("triton", "cpu")
    return tuple(name for name in names if backends.why_not(name) is None)


def _rows(kind: Any, device: torch.device, *cases: GpuCase) -> list[Row]:
    return [Row(str(case), ROW_SECONDS, partial(kind, case, device)) for case in cases]


_SMALL = [*product(SMALL, DTYPES)]


def _cases(ways: Any, where: torch.device) -> Iterator[GpuCase]:
    for ((shape, task, train), dtype), backend in product(ways, _backends(where)):
        if _serves(backend, shape):
            yield GpuCase(backend, shape, task, dtype, train)


def _serves(backend: str, shape: Shape) -> bool:
    return backend != "cuda" or shape.queries <= GPU_STEP_QUERIES


def smoke(device: str) -> list[Row]:
    """Every kernel of every backend in each dtype, small calls first."""
    where = torch.device(device)
    ways = [*_SMALL, *product(ACCEPTANCE, DTYPES)]
    return _rows(figures.smoke, where, *_cases(ways, where))


def small(device: str) -> list[Row]:
    """The small calls, for a sanitizer: unwritten memory is left for it to find."""
    where = torch.device(device)
    return _rows(figures.alone, where, *_cases(_SMALL, where))


def _timed(where: torch.device, cases: Iterable[GpuCase]) -> list[Row]:
    served = (case for case in cases if _serves(case.backend, case.shape))
    return [
        Row(str(c), ROW_SECONDS, partial(figures.times, c, figures.subject(c), where))
        for c in served
    ]


def model(device: str) -> list[Row]:
    """What settles the model of docs/gpu.md: five measurements; those of calls have its figures."""
    where = torch.device(device)
    first = _backends(where)[:1]
    rows = [Row("floor", ROW_SECONDS, partial(figures.floor, where))]
    if backends.why_not("triton") is None:
        from . import settle

        rows += [
            Row("loads one after the other", ROW_SECONDS, partial(settle.chase, where)),
            Row("kernels of a graph", ROW_SECONDS, partial(settle.gap, where)),
        ]
    rows += _timed(where, (GpuCase(name, STEP, "projected") for name in first))
    rows += _timed(where, (GpuCase(name, LARGE, "projected", train=True) for name in first))
    for name in first:
        case = GpuCase(name, STEP, "step")
        rows += _timed(where, [case])
        outside = partial(figures.times, case, IN_FRONT, where)
        rows.append(Row(f"{name}, W_q in front: {case.call}", ROW_SECONDS, outside))
    return rows


def time(device: str) -> list[Row]:
    """Ours: every shape, in time and kernel by kernel; beams, masks, fused modules; peak memory."""
    where = torch.device(device)
    wanted = [*CALLS, GpuCase("", WIDE, "full")]
    wanted += [
        *(GpuCase("", shape, "step") for shape in BEAMS),
        GpuCase("", replace(STEP, name="step-64-long", keys=400), "step"),
        GpuCase("", ONE, "step"),
        GpuCase("", ONE, "step", "float32"),
        GpuCase("", LONG, "step"),
    ]
    rows = _timed(where, (replace(c, backend=name) for c in wanted for name in _backends(where)))
    for provider, train in product((MASKED_CALL, FUSED), (False, True)):
        case = GpuCase("auto", LENS, "full", train=train)
        call = partial(figures.times, case, provider, where)
        rows.append(Row(f"{provider.name}: {case.call}", ROW_SECONDS, call))
    peaks = (
        Row(f"peak memory of {name}", ROW_SECONDS, partial(figures.peak, name, where))
        for name in ("d2l eager", "ours op")
    )
    return [*rows, *peaks]


def _contests(kind: Callable[..., Any], device: str, among: Iterable[Provider]) -> list[Row]:
    """Every rival in every call that it serves."""
    where, rows = torch.device(device), []
    for rival, case in product(among, (*CALLS, GpuCase("", WIDE, "full"))):
        if case.task in rival.builders:
            call = partial(kind, replace(case, backend="auto"), rival, where)
            rows.append(Row(f"{rival.name}: {case.call}", TUNED_SECONDS, call))
    return rows


def build(device: str) -> list[Row]:
    """What the rivals compile, in several processes, for the next stage."""
    slow = [rival for rival in RIVALS if "compiled" in rival.name]
    return _contests(figures.built, device, slow)


def rivals(device: str) -> list[Row]:
    """What ours is compared with, rival by rival; the one that tunes itself last."""
    return _contests(figures.times, device, RIVALS)


# --- the checks, each in a call of its own -------------------------------------------------------


def _command(words: list[str], passes: str = "", **variables: str) -> dict[str, Any]:
    """Run a command; it passed if it exits with 0 and, if given, a line matches ``passes``."""
    process = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, **variables}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        print(lines[-1], file=sys.stderr)  # kept if the row is killed
    right = process.wait() == 0 and (not passes or re.search(passes, "\n".join(lines)))
    return {"passed": bool(right), "exit": process.returncode, "said": lines[-150:]}


def _support(name: str) -> Any:
    """A module that the tests share."""
    folder = str(ROOT / "tests" / "support")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _contract(device: str, backend: str, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """A row of the contract table by the parity rule, without pytest: the worst error."""
    parity, contract = map(_support, ("parity", "contract"))
    parity.DEVICE = device
    case = parity.Case(**{**contract.LARGE, **contract.CONTRACT[name]})
    if backend == "cuda":
        case = case.of_at_most(GPU_STEP_QUERIES)
    with figures.unwritten_is_nan():
        shares = parity.check(case, dtype, partial(parity.fused, backend=backend))
    where = max(shares, key=shares.get)
    return {"passed": True, "worst": shares[where], "where": where}


def parity(device: str) -> list[Row]:
    """The contract table of each backend, row by row; then its tests, where pytest is."""
    table = _support("contract").CONTRACT
    there = _backends(torch.device(device))
    rows = [
        Row(
            f"{backend}: {name}, {dtype}",
            ROW_SECONDS,
            partial(_contract, device, backend, name, getattr(torch, dtype)),
        )
        for name, dtype, backend in product(table, DTYPES, there)
    ]
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    words = [sys.executable, "-m", "pytest", "-q", "--maxfail=25", "--tb=short", "-o", "addopts="]
    words += ["-p", "no:cacheprovider", *(("-n", "8") if importlib.util.find_spec("xdist") else ())]
    for backend, folder in (("cuda", "tests/cuda/gpu"), ("triton", "tests/triton/kernels")):
        if backend in there:
            call = partial(_command, [*words, folder])
            if missing:
                call = partial(dict, {"skipped": f"{' and '.join(missing)} not installed"})
            rows.append(Row(f"{backend}: pytest {folder}", TOOL_SECONDS, call))
    return rows


def sanitize(device: str) -> list[Row]:
    """compute-sanitizer over the small calls of smoke, a process for each tool and dtype.

    No reference runs there: what is said is said of our calls.
    Two tools do not understand how Triton orders accesses. Every tensor gets memory of its own;
    otherwise an overrun could end in another tensor of the same allocator and go unnoticed.
    """
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    tool = shutil.which("compute-sanitizer") or shutil.which(usual)
    if tool is None:
        problem = {"problem": "compute-sanitizer is not installed"}
        return [Row("sanitizer", ROW_SECONDS, lambda: problem)]
    there = _backends(torch.device(device))
    checks = [(check, "cuda") for check in ("memcheck", "racecheck", "initcheck", "synccheck")]
    checks.insert(1, ("memcheck", "triton"))
    words = [sys.executable, "-W", "ignore", "-m", __name__]
    rows = []
    for dtype, (check, backend) in product(DTYPES, checks):
        if backend not in there:
            continue
        # Races are checked in our kernels alone; reads need to know what torch's kernels wrote.
        ours = ["--kernel-regex", "kns=bahdanau_fast"] if check == "racecheck" else []
        command = [tool, "--tool", check, *ours, "--error-exitcode", "7", *words, backend, dtype]
        call = partial(_command, command, CLEAN, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        rows.append(Row(f"{backend}: {check}, {dtype}", TOOL_SECONDS, call))
    return rows


def main(backend: str, dtype: str, device: str = "cuda") -> None:
    """What a sanitizer runs: the small calls of a backend in a dtype, in this process."""
    for row in small(device):
        if row.name.startswith(f"{backend}:") and dtype in row.name:
            row.compute()
            print(row.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
