"""The rows of each stage of the GPU report, the most telling first."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES

from ..contestants.baselines import MASKED
from ..contestants.baselines import compiled as torch_compiled
from ..contestants.peers import imported
from ..contestants.providers import Outputs, Provider, Runnable, by_name, rewrites
from ..timing.machine import machine as host
from ..timing.worker import ROOT, Row
from ..workloads.shapes import LIST, MANY_QUERIES, STEPS_ON_MEMORY, Inputs, Shape
from . import figures
from .figures import GpuCase

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


def machine(device: str) -> list[Row]:
    """What the figures come from; a problem where there is no GPU."""

    def found() -> dict[str, Any]:
        if device == "cuda" and not torch.cuda.is_available():
            return {"problem": "no CUDA or ROCm device is visible"}
        where = host() | {"backends": backends.explain(device)}
        where["cuda"] = torch.version.cuda or torch.version.hip or "none"
        if importlib.util.find_spec("triton"):
            where["triton"] = importlib.metadata.version("triton")
        if os.environ.get("BAHDANAU_FAST_COMMIT"):
            where["commit"] = os.environ["BAHDANAU_FAST_COMMIT"]
        where["gpu"] = device
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            where["gpu"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        return where

    return [Row("machine", ROW_SECONDS, found)]


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
    return _rows(figures.verdict, where, *_cases(_SMALL, where))


def time(device: str) -> list[Row]:
    """Ours: every shape in time, then kernel by kernel; peak memory."""
    where = torch.device(device)
    calls = [(STEP, "step"), (WIDE, "step"), (PARALLEL[0], "projected")]
    wanted = [GpuCase("", shape, task) for shape, task in calls]
    wanted += [GpuCase("", shape, "projected", train=True) for shape in (WIDE, *PARALLEL)]
    wanted += [GpuCase("", shape, "projected") for shape in PARALLEL[1:]]
    wanted += [
        GpuCase("", replace(STEP, name="step-64-long", keys=400), "step"),
        GpuCase("", ONE, "step"),
        GpuCase("", ONE, "step", "float32"),
        GpuCase("", LONG, "step"),
        GpuCase("", WIDE, "full"),
        GpuCase("", PARALLEL[-1], "projected", "float32", True),
    ]
    cases = [
        replace(case, backend=name)
        for case in wanted
        for name in _backends(where)
        if _serves(name, case.shape)
    ]
    timed = [
        Row(str(c), ROW_SECONDS, partial(figures.times, c, figures.subject(c), where))
        for c in cases
    ]
    by_kernel = (
        row._replace(name=f"kernels of {row.name}") for row in _rows(figures.kernels, where, *cases)
    )
    peaks = (
        Row(f"peak memory of {name}", ROW_SECONDS, partial(figures.peak, name, where))
        for name in ("d2l eager", "ours op")
    )
    return [Row("floor", ROW_SECONDS, partial(figures.floor, where)), *timed, *by_kernel, *peaks]


def _plans(where: torch.device) -> Iterator[Row]:
    if "triton" not in _backends(where):
        return
    for function, shapes, train in (
        ("step", (WIDE, STEP, ONE), False),
        ("scores", PARALLEL, False),
        ("grad_tanh", (WIDE, *PARALLEL), True),
    ):
        for shape in shapes:
            case = GpuCase("triton", shape, "projected", train=train)
            call = partial(figures.candidates, case, where, function)
            yield Row(f"plans of {function}, {case}", ROW_SECONDS, call)


def plans(device: str) -> list[Row]:
    """What the plans choose between: tiles and splits of the Triton kernels."""
    return list(_plans(torch.device(device)))


# --- what ours is compared with: eager code, torch.compile in its modes, JAX ---------------------


def _tuned(name: str, mode: str, tuned: bool = False) -> Provider:
    def wrap(function: Callable[..., Any]) -> Any:
        if tuned:
            from torch._inductor import config

            config.coordinate_descent_tuning = True
        return torch_compiled(function, mode)

    return Provider(name, "compiled", rewrites(wrap))


def _jax(inputs: Inputs, step: bool) -> Runnable:
    """The rewrite in JAX under jit; a call waits for its result, as JAX has a stream of its own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = imported("jax", "JAX")
    jnp = jax.numpy

    def attend(query: Any, key: Any, value: Any, w_v: Any, lens: Any, w_q: Any) -> Any:
        query = query if w_q is None else query @ w_q.T
        scores = (jnp.tanh(query[:, :, None] + key[:, None]) * w_v).sum(-1)
        if lens is not None:
            keep = jnp.arange(scores.shape[-1]) < lens[:, None, None]
            scores = jnp.where(keep, scores, MASKED)
        weights = jax.nn.softmax(scores, -1)
        return weights @ value, weights

    def given(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        return jax.dlpack.from_dlpack(tensor if tensor.is_floating_point() else tensor.int())

    query, w_q = (inputs.queries, inputs.w_q) if step else (inputs.projected_queries, None)
    tensors = (query, inputs.projected_keys, inputs.values, inputs.w_v, inputs.valid_lens, w_q)
    arrays = [None if tensor is None else given(tensor) for tensor in tensors]
    call = jax.jit(attend)

    def forward() -> Outputs:
        context, weights = jax.block_until_ready(call(*arrays))
        return from_dlpack(context), from_dlpack(weights)

    return Runnable(forward, ())


_JAX = {"projected": partial(_jax, step=False), "step": partial(_jax, step=True)}

# Those that take seconds to compile come after those that do not.
RIVALS: tuple[Provider, ...] = (
    by_name("rewrite eager"),
    by_name("compiled"),
    by_name("d2l eager"),
    Provider("JAX jit", "peer", _JAX),
    _tuned("compiled reduce-overhead", "reduce-overhead"),
    _tuned("compiled tuned", "max-autotune-no-cudagraphs", tuned=True),
)


def compiled(device: str) -> list[Row]:
    """What ours is compared with, rival by rival; the one that tunes itself last."""
    where = torch.device(device)
    cases = [GpuCase("auto", shape, "step") for shape in (STEP, WIDE)]
    cases += [GpuCase("auto", shape, "projected") for shape in PARALLEL]
    cases += [GpuCase("auto", shape, "projected", train=True) for shape in (PARALLEL[-1], WIDE)]
    found = []
    for rival, case in product(RIVALS, cases):
        if rival.group == "peer" and case.train:  # forward only
            continue
        seconds = TUNED_SECONDS if rival.name.endswith("tuned") else ROW_SECONDS
        # JAX has a stream of its own, and this mode graphs of its own.
        replayed = rival.name not in ("JAX jit", "compiled reduce-overhead")
        call = partial(figures.times, case, rival, where, replayed)
        found.append(Row(f"{rival.name}: {case.call}", seconds, call))
    return found


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
    """compute-sanitizer over the small rows of smoke, a process for each tool and dtype.

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


def main(backend: str, dtype: str) -> None:
    """What a sanitizer runs: the small rows of a backend in a dtype, in this process."""
    for row in small("cuda"):
        if row.name.startswith(f"{backend}:") and dtype in row.name:
            result = row.compute()
            figures.synchronize(torch.device("cuda"))
            print(row.name, result)
            if not result["passed"]:
                raise RuntimeError(f"{row.name} must keep the parity rule, got {result}")


if __name__ == "__main__":
    main(*sys.argv[1:])
