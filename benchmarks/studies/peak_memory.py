"""Peak memory of forward and backward, each provider in a fresh process.

The high-water mark of the process's resident memory is reset (``/proc/self/clear_refs``) just
before the call. It counts tensors, workspaces of any allocator and stacks. glibc is told to give
each larger block its own mapping, so that freed memory returns at once and the mark counts live
bytes. Libraries, thread pools and compiled code are loaded before the reset.

A second call runs under the profiler, which counts the bytes from torch's allocator exactly, and
nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..contestants.providers import by_name
from ..timing.worker import Worker, WorkerError
from ..workloads.shapes import AXES, LARGEST, SWEEPS, Shape, draw


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of one forward and backward.

    Attributes:
        tensors: inputs, outputs and gradients; the bound is a multiple of these bytes.
        resident: inputs, and the growth of the process.
        allocated: inputs, and the bytes from torch's allocator.
    """

    provider: str
    task: str
    tensors: int
    resident: int
    allocated: int


def measure(provider: str, task: str, shape: Shape) -> Peak | str:
    """The peak in a fresh process, or why it could not be measured."""
    found = _measure(provider, task, [shape])
    return found if isinstance(found, str) else found[0]


def growth(providers: Sequence[str], axes: Sequence[str] = tuple(AXES)) -> list[dict[str, Any]]:
    """Peaks of forward and backward along the sweeps, a process for each provider.

    Args:
        providers: names.
        axes: along which sizes.

    Returns:
        A dictionary for each point: provider, axis, size and the fields of :class:`Peak`; for a
        provider that cannot be measured one with ``error``.
    """
    points = [(axis, shape) for axis in axes for shape in SWEEPS[axis][-LARGEST:]]
    shapes = list(dict.fromkeys(shape for _, shape in points))
    found: list[dict[str, Any]] = []
    for name in providers:
        peaks = _measure(name, "projected", shapes)
        if isinstance(peaks, str):
            found.append({"provider": name, "axis": "", "error": peaks})
            continue
        of_shape = dict(zip(shapes, peaks, strict=True))
        for axis, shape in points:
            size = getattr(shape, AXES[axis])
            found.append({"axis": axis, "size": size, **asdict(of_shape[shape])})
    return found


def _measure(provider: str, task: str, shapes: Sequence[Shape]) -> list[Peak] | str:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return "needs a Linux /proc with a resettable high-water mark"
    variables = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    packed = [asdict(shape) for shape in shapes]
    with Worker(variables) as worker:
        try:
            found = worker.make(__name__, peaks.__name__, provider, task, packed)["peaks"]
        except WorkerError as error:
            return str(error)
    return [Peak(**peak) for peak in found]


def peaks(provider: str, task: str, shapes: list[dict[str, Any]]) -> tuple[None, dict[str, Any]]:
    """The peaks of some shapes, for :meth:`Worker.make`, which is given no call to time."""
    found = [_in_this_process(provider, task, Shape(**shape)) for shape in shapes]
    return None, {"peaks": [asdict(peak) for peak in found]}


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _resident_growth(call: Callable[[], Any]) -> tuple[int, Any]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")
    before = _status("VmRSS")
    result = call()
    return max(0, _status("VmHWM") - before), result


def allocator_events(call: Callable[[], Any]) -> list[int]:
    """Bytes that torch's allocator gave out (above 0) and took back during a call, in order."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = call()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def allocated_growth(call: Callable[[], Any]) -> int:
    """Peak of the bytes that torch's allocator has given out during a call."""
    return max(accumulate(allocator_events(call), initial=0))


def _training_step(
    provider: str, task: str, shape: Shape
) -> tuple[Callable[[], tuple[Tensor, ...]], int, int]:
    """A call that returns outputs and gradients; bytes of its inputs; bytes of its results."""
    inputs = draw(shape)
    inputs.require_grad(True)
    runnable = by_name(provider).build(task, inputs)
    leaves, grad = runnable.leaves, inputs.grad_context

    def call() -> tuple[Tensor, ...]:
        context, weights = runnable.forward()
        gradients = torch.autograd.grad(context, leaves, grad)
        return context.detach(), weights.detach(), *gradients

    outputs = 4 * shape.batch * shape.queries * (shape.value_size + shape.keys)
    of_leaves = sum(leaf.nbytes for leaf in leaves)
    return call, of_leaves + grad.nbytes, outputs + of_leaves


def _in_this_process(provider: str, task: str, shape: Shape) -> Peak:
    torch.ones(1 << 22).sum()  # starts the threads
    # A warm-up of the same shape would hide a workspace that is kept for the next call, so ours and
    # eager code warm up on a smaller shape. Compiled code has to be compiled for its own shape.
    small = replace(shape, queries=max(1, shape.queries // 8), keys=max(1, shape.keys // 8))
    compiled = by_name(provider).group == "compiled"
    call, inputs, outputs = _training_step(provider, task, shape if compiled else small)
    call()
    if not compiled:
        call, inputs, outputs = _training_step(provider, task, shape)
    resident, result = _resident_growth(call)
    del result
    allocated = allocated_growth(call)
    return Peak(provider, task, inputs + outputs, inputs + resident, inputs + allocated)
