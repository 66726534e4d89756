"""What the GPU report computes: checked calls, their times and kernels; the rows of each stage.

Rows come the most telling first; those of ``user`` are in user.py.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES

from .. import measure
from ..cases import LIST, MANY_QUERIES, STEPS_ON_MEMORY, SUBJECT, Inputs, Shape, draw
from ..contestants import Provider
from ..contestants.parity import Oracle, prepare
from ..contestants.registry import by_name
from ..measure import GPU_CALLS, GpuCall, in_turns, interleave, synchronize
from . import Row, rows
from .user import user

__all__ = ["build", "rivals", "smoke", "time", "user"]

NAN = float("nan")


@dataclass(frozen=True)
class GpuCase:
    """A call on a GPU, forward or with ``train`` forward and backward."""

    backend: str
    shape: Shape
    task: str
    dtype: str = "bfloat16"
    train: bool = False

    @property
    def call(self) -> str:
        """What is computed, whoever does it."""
        way = "forward + backward" if self.train else "forward"
        return f"{self.shape}, {self.task}, {way}, {self.dtype}"

    def __str__(self) -> str:
        return f"{self.backend}: {self.call}"


_draw = functools.lru_cache(1)(draw)  # rows of one shape follow each other


def inputs_of(case: GpuCase, device: torch.device) -> Inputs:
    """The tensors of a case, on the device and in its dtype."""
    drawn, dtype = _draw(case.shape), getattr(torch, case.dtype)

    def moved(x: Tensor | None) -> Tensor | None:
        floats = x is not None and x.is_floating_point()
        return x if x is None else x.to(device, dtype if floats else None, copy=True)

    found = {name: moved(x) for name, x in vars(drawn).items()}
    found |= {"values": found["keys"]} if drawn.values is drawn.keys else {}
    inputs = Inputs(**found)
    inputs.require_grad(case.train)
    return inputs


def checked(
    case: GpuCase, provider: Provider, device: torch.device
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A provider's call, and its verdict against fp64 by the rule for ours."""
    inputs = inputs_of(case, device)
    oracle = Oracle(inputs, case.shape, case.task, case.train)
    call, verdict = oracle.checked(replace(provider, group="ours"))
    synchronize(device)
    return call, asdict(verdict)


@contextmanager
def _settings(case: GpuCase) -> Iterator[None]:
    with torch.set_grad_enabled(case.train), backends.use(case.backend):
        yield


def subject(case: GpuCase) -> Provider:
    """Ours, as it serves the task."""
    return by_name(SUBJECT[case.task])


def poisoned(case: GpuCase, device: torch.device) -> dict[str, Any]:
    """One call against fp64, where torch.empty gives NaN: memory that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return built(case, subject(case), device)
    finally:
        torch.use_deterministic_algorithms(False)


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in results if tensor is not None)


def repeats_bits(call: Callable[[], Any], replay: Callable[[], Any]) -> bool:
    """Whether a graph writes its results anew, and the same bits as the call."""
    want = [tensor.clone() for tensor in _tensors(call())]
    for tensor in _tensors(replay()):
        tensor.fill_(NAN)
    return all(map(torch.equal, _tensors(replay()), want))


def least_bytes(case: GpuCase, results: Any, device: torch.device) -> int:
    """What a call has to move: inputs, read once for each pass, and results."""
    inputs = inputs_of(case, device)
    read = inputs.leaves("full" if case.task == "full" else "projected")
    passes = 2 if case.train else 1
    return sum(t.nbytes for t in read) * passes + sum(t.nbytes for t in _tensors(results))


def timed(case: GpuCase, provider: Provider, device: torch.device) -> dict[str, Any]:
    """Seconds (median, p20, p80) of a call: called, from a graph, from a graph with a cold L2.

    Of ours also microseconds by kernel.
    """
    with _settings(case):
        call, result = checked(case, provider, device)
        result["bytes"] = least_bytes(case, call(), device)
        times, found = in_turns(call, device, GPU_CALLS, cold=True)
        if provider.group == "ours":
            if found:
                result["graph gives the same bits"] = repeats_bits(call, found["cold"])
            result |= kernels(call, device)
        return result | times


def kernels(call: Callable[[], Any], device: torch.device, calls: int = 10) -> dict[str, Any]:
    """Launches a call and microseconds a launch of every kernel, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(calls):
            call()
        synchronize(device)
    found = defaultdict(list)
    for event in profiled.events():
        if event.device_type.name == activity.name:
            found[event.name].append(event.time_range.elapsed_us())
    return {"kernels": {name: (len(us) / calls, sum(us) / len(us)) for name, us in found.items()}}


def built(case: GpuCase, provider: Provider, device: torch.device) -> dict[str, Any]:
    """A call that is compiled and checked, so that a later process finds it in the cache."""
    with _settings(case):
        return checked(case, provider, device)[1]


def copy_rate(device: torch.device) -> dict[str, Any]:
    size = 1 << (30 if device.type == "cuda" else 20)
    x, y = torch.randn(size, device=device), torch.empty(size, device=device)
    found = interleave({"copy": GpuCall(lambda: y.copy_(x), device)}, measure.GPU_SECONDS).packed()
    return found | {rows.COPY: 8 * size / found["copy"]["median"]}


# ---- the stages

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
RIVALS = ("expert", "d2l eager", "compiled, tuned")


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


def _row(kind: Callable[..., Any], case: GpuCase, device: torch.device, rival: str = "") -> Row:
    who = (by_name(rival) if rival else subject(case),) if kind is not poisoned else ()
    seconds = TUNED_SECONDS if "compiled" in rival else ROW_SECONDS
    return Row(f"{rival or case.backend}: {case.call}", seconds, partial(kind, case, *who, device))


def smoke(device: str) -> list[Row]:
    """Every kernel of every backend in each dtype, small calls first."""
    where = torch.device(device)
    return [_row(poisoned, c, where) for c in _served(_of_each_dtype([*SMALL, *ACCEPTANCE]), where)]


def time(device: str) -> list[Row]:
    """The roof; ours, every shape in time and kernel by kernel."""
    where = torch.device(device)
    roof = Row("roof", ROW_SECONDS, partial(copy_rate, where))
    return [roof, *(_row(timed, case, where) for case in _served((*CALLS, *OURS_ALONE), where))]


def rivals(device: str, kind: Callable[..., Any] = timed, among: str = "") -> list[Row]:
    """What ours is compared with, rival by rival, in every call that it serves."""
    return [
        _row(kind, replace(case, backend="auto"), torch.device(device), name)
        for name, case in product(RIVALS, CALLS)
        if among in name and case.task in by_name(name).builders
    ]


def build(device: str) -> list[Row]:
    """What the rivals compile, in several processes, for the next stage."""
    return rivals(device, built, "compiled")


def main(backend: str, dtype: str, device: str = "cuda") -> None:
    """The small calls of a backend in a dtype, for a sanitizer: no reference runs beside them."""
    for case in _served(_of_each_dtype(SMALL), torch.device(device)):
        if (case.backend, case.dtype) == (backend, dtype):
            with _settings(case):
                inputs = inputs_of(case, torch.device(device))
                call = subject(case).build(case.task, inputs)
                prepare(call, case.train, inputs.grad_context)()
            synchronize(torch.device(device))
            print(case)


if __name__ == "__main__":
    main(*sys.argv[1:])
