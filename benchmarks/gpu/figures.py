"""What a row of the GPU report computes: a checked call, its times, those of its kernels."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import backends

from ..cases import SUBJECT, Inputs, Shape, draw
from ..contestants.parity import Oracle, prepare
from ..contestants.provider import Provider
from ..contestants.registry import by_name
from ..measure import GpuCall, captured, interleave
from . import rows

NAN = float("nan")
SECONDS = 0.5  # of timing a row
CALLS = 20  # in a graph: one alone is shorter than the graph's own launch


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
    moved = {}
    for field in fields(drawn):
        tensor = getattr(drawn, field.name)
        if tensor is not None:
            tensor = tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
        moved[field.name] = tensor
    if drawn.values is drawn.keys:
        moved["values"] = moved["keys"]
    inputs = replace(drawn, **moved)
    inputs.require_grad(case.train)
    return inputs


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that what goes wrong there is blamed on this row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def checked(
    case: GpuCase, provider: Provider, device: torch.device
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A provider's call, and its verdict against fp64 by the rule for ours."""
    inputs = inputs_of(case, device)
    oracle = Oracle(inputs, case.shape, case.task, case.train)
    call, verdict = oracle.checked(replace(provider, group="ours"), case.task, case.train)
    synchronize(device)
    return call, asdict(verdict)


@contextmanager
def _settings(case: GpuCase) -> Iterator[None]:
    with torch.set_grad_enabled(case.train), backends.use(case.backend):
        yield


def subject(case: GpuCase) -> Provider:
    """Ours, as it serves the task."""
    return by_name(SUBJECT[case.task])


def alone(case: GpuCase, device: torch.device) -> dict[str, Any]:
    """One call, and nothing else but what copies its inputs: the reference is not run."""
    with _settings(case):
        inputs = inputs_of(case, device)
        prepare(subject(case).build(case.task, inputs), case.train, inputs.grad_context)()
    synchronize(device)
    return {}


def smoke(case: GpuCase, device: torch.device) -> dict[str, Any]:
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


def times(case: GpuCase, provider: Provider, device: torch.device) -> dict[str, Any]:
    """Seconds (median, p20, p80) of a call: called, from a graph, from a graph with a cold L2.

    Of ours also microseconds by kernel.
    """
    with _settings(case):
        call, result = checked(case, provider, device)
        result["bytes"] = least_bytes(case, call(), device)
        timed = {"called": GpuCall(call, device)}
        graph = captured(call)
        many = captured(call, CALLS) if callable(graph) else graph
        if callable(graph) and callable(many):
            timed["graph"] = GpuCall(many, device, holds=CALLS)
            timed["cold"] = GpuCall(graph, device, cold=True)
            if provider.group == "ours":
                result["graph gives the same bits"] = repeats_bits(call, graph)
        else:
            result["no graph"] = many
        result |= interleave(timed, SECONDS).packed()
        return result | (kernels(call, device) if provider.group == "ours" else {})


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


def roof(device: torch.device) -> dict[str, Any]:
    """The bandwidth of a copy."""
    size = 1 << (30 if device.type == "cuda" else 20)
    x, y = torch.randn(size, device=device), torch.empty(size, device=device)
    found = interleave({"copy": GpuCall(lambda: y.copy_(x), device)}, SECONDS).packed()
    return found | {rows.COPY: 8 * size / found["copy"]["median"]}
