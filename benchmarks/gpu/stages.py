"""The rows of each stage of the GPU report, the most telling first; of ``user``, in user.py."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES

from ..contestants.provider import Provider
from ..contestants.registry import by_name
from ..timing.worker import ROOT, Row
from ..workloads.shapes import LIST, MANY_QUERIES, STEPS_ON_MEMORY, Shape
from . import figures
from .figures import GpuCase
from .user import user

__all__ = ["build", "parity", "rivals", "sanitize", "smoke", "time", "user"]

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
LENS = replace(STEP, name="step-64-lens", lens="drawn")
# What ours and the others are timed on.
CALLS = (
    *(GpuCase("", shape, "step") for shape in (STEP, WIDE)),
    *(GpuCase("", shape, "projected", train=train) for shape in (WIDE, *PARALLEL)
      for train in (False, True)),
    *(GpuCase("", shape, "projected", "float32", True) for shape in (WIDE, PARALLEL[-1])),
    GpuCase("", STEP, "step", "float32"),
    GpuCase("", WIDE, "full"),
)  # fmt: skip
# And ours alone: beams, more keys, a single row, a projected query, the largest.
OURS_ALONE = (
    *(GpuCase("", replace(STEP, name=f"beam-{n}", queries=n), "step") for n in (4, 10)),
    GpuCase("", replace(STEP, name="step-64-long", keys=400), "step"),
    GpuCase("", _BY_NAME["step-1"], "step"),
    GpuCase("", _BY_NAME["step-1"], "step", "float32"),
    GpuCase("", _BY_NAME["pooling"], "step"),
    GpuCase("", STEP, "projected"),
    GpuCase("", _BY_NAME["gnmt-infer"], "projected", train=True),
)
ACCEPTANCE = (
    *((STEP, task, False) for task in ("step", "full")),
    *((WIDE, task, train) for task, train in (("step", False), ("full", False))),
    *((shape, "projected", True) for shape in (WIDE, *PARALLEL)),
)
# Who is compared, the one that tunes itself last.
RIVALS = ("expert", "rewrite eager", "compiled", "d2l eager", "ours compiled", "compiled, tuned")


def _backends(device: torch.device) -> tuple[str, ...]:
    """Those whose kernels run on the device, and that can be loaded."""
    names = ("cuda", "triton") if device.type == "cuda" else ("triton", "cpu")
    return tuple(name for name in names if backends.why_not(name) is None)


def _served(cases: Iterable[GpuCase], device: torch.device) -> list[GpuCase]:
    """Each case on every backend that has kernels for it."""
    each = (replace(case, backend=name) for case in cases for name in _backends(device))
    return [c for c in each if c.backend != "cuda" or c.shape.queries <= GPU_STEP_QUERIES]


def _of_each_dtype(ways: Iterable[tuple[Shape, str, bool]]) -> list[GpuCase]:
    return [GpuCase("", *way[:2], dtype, way[2]) for way, dtype in product(ways, DTYPES)]


def smoke(device: str) -> list[Row]:
    """Every kernel of every backend in each dtype, small calls first."""
    where = torch.device(device)
    cases = _served(_of_each_dtype([*SMALL, *ACCEPTANCE]), where)
    return [Row(str(case), ROW_SECONDS, partial(figures.smoke, case, where)) for case in cases]


def _contest(
    kind: Callable[..., Any], name: str, case: GpuCase, who: Provider, where: torch.device
) -> Row:
    seconds = TUNED_SECONDS if "compiled" in who.name else ROW_SECONDS
    return Row(f"{name}: {case.call}", seconds, partial(kind, case, who, where))


def time(device: str) -> list[Row]:
    """The roof; ours, every shape in time and kernel by kernel; masks, fused modules; memory."""
    where = torch.device(device)
    rows = [Row("floor", ROW_SECONDS, partial(figures.floor, where))]
    for case in _served((*CALLS, *OURS_ALONE), where):
        rows.append(_contest(figures.times, case.backend, case, figures.subject(case), where))
    forms = [("W_q in front", GpuCase("auto", STEP, "step"))]
    forms += [
        (name, GpuCase("auto", LENS, "full", train=train))
        for name, train in product(("ours, masked", "d2l fused"), (False, True))
    ]
    rows += [_contest(figures.times, name, case, by_name(name), where) for name, case in forms]
    return rows + [
        Row(f"peak memory of {name}", ROW_SECONDS, partial(figures.peak, name, where))
        for name in ("d2l eager", "ours op")
    ]


def _contests(kind: Callable[..., Any], device: str, among: Iterable[str]) -> list[Row]:
    """Every rival in every call that it serves."""
    return [
        _contest(kind, name, replace(case, backend="auto"), by_name(name), torch.device(device))
        for name, case in product(among, CALLS)
        if case.task in by_name(name).builders
    ]


def build(device: str) -> list[Row]:
    """What the rivals compile, in several processes, for the next stage."""
    return _contests(figures.built, device, [name for name in RIVALS if "compiled" in name])


def rivals(device: str) -> list[Row]:
    """What ours is compared with, rival by rival."""
    return _contests(figures.times, device, RIVALS)


# --- the checks, each in a process of its own -----------------------------------------------------


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


def parity(device: str) -> list[Row]:
    """The tests of each backend that is there, the contract among them, where pytest is."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    words = [sys.executable, "-m", "pytest", "-q", "--maxfail=25", "--tb=short", "-o", "addopts="]
    words += ["-p", "no:cacheprovider", *(("-n", "8") if importlib.util.find_spec("xdist") else ())]
    folders = {"cuda": "tests/cuda/gpu", "triton": "tests/triton/kernels"}
    rows = []
    for backend in folders.keys() & _backends(torch.device(device)):
        call = partial(_command, [*words, folders[backend]])
        if missing:
            call = partial(dict, {"skipped": f"{' and '.join(missing)} not installed"})
        rows.append(Row(f"{backend}: pytest {folders[backend]}", TOOL_SECONDS, call))
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
    checks = [(check, "cuda") for check in ("memcheck", "racecheck", "initcheck", "synccheck")]
    checks.insert(1, ("memcheck", "triton"))
    rows = []
    for dtype, (check, backend) in product(DTYPES, checks):
        if backend not in _backends(torch.device(device)):
            continue
        # Races are checked in our kernels alone; reads need to know what torch's kernels wrote.
        ours = ["--kernel-regex", "kns=bahdanau_fast"] if check == "racecheck" else []
        command = [tool, "--tool", check, *ours, "--error-exitcode", "7"]
        command += [sys.executable, "-W", "ignore", "-m", __name__, backend, dtype]
        call = partial(_command, command, CLEAN, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        rows.append(Row(f"{backend}: {check}, {dtype}", TOOL_SECONDS, call))
    return rows


def main(backend: str, dtype: str, device: str = "cuda") -> None:
    """What a sanitizer runs: the small calls of a backend in a dtype, in this process."""
    for case in _served(_of_each_dtype(SMALL), torch.device(device)):
        if (case.backend, case.dtype) == (backend, dtype):
            figures.alone(case, torch.device(device))
            print(case)


if __name__ == "__main__":
    main(*sys.argv[1:])
