"""The rows of each stage of the GPU report, the most telling first; of ``user``, in user.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES

from ..cases import LIST, MANY_QUERIES, STEPS_ON_MEMORY, Shape
from ..contestants.provider import Provider
from ..contestants.registry import by_name
from ..worker import Row
from . import figures
from .figures import GpuCase
from .user import user

__all__ = ["build", "rivals", "smoke", "time", "user"]

DTYPES = ("bfloat16", "float32", "float16")
ROW_SECONDS, TUNED_SECONDS = 60.0, 90.0

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
# And ours alone: beams, narrow and wide, more keys, a single row, a projected query, the largest.
HIDDEN = {n: Shape(f"step-64-h{n}", 64, 1, 50, n) for n in (128, 256, 2048)}
OURS_ALONE = (
    *(GpuCase("", replace(STEP, name=f"beam-{n}", queries=n), "step") for n in (4, 10, 16)),
    *(GpuCase("", shape, "step") for shape in HIDDEN.values()),
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
    """The roof; ours, every shape in time and kernel by kernel; masks, fused modules."""
    where = torch.device(device)
    rows = [Row("roof", ROW_SECONDS, partial(figures.roof, where))]
    for case in _served((*CALLS, *OURS_ALONE), where):
        rows.append(_contest(figures.times, case.backend, case, figures.subject(case), where))
    forms = [("W_q in front", GpuCase("auto", HIDDEN[n], "step")) for n in (128, 256)]
    forms += [
        (name, GpuCase("auto", LENS, "full", train=train))
        for name, train in product(("ours, masked", "d2l fused"), (False, True))
    ]
    return rows + [_contest(figures.times, n, case, by_name(n), where) for n, case in forms]


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


def main(backend: str, dtype: str, device: str = "cuda") -> None:
    """The small calls of a backend in a dtype, for a sanitizer: no reference runs beside them."""
    for case in _served(_of_each_dtype(SMALL), torch.device(device)):
        if (case.backend, case.dtype) == (backend, dtype):
            figures.alone(case, torch.device(device))
            print(case)


if __name__ == "__main__":
    main(*sys.argv[1:])
