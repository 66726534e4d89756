"""What the model of GPUs rests on: loads one after the other, gaps between kernels of a graph."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc

from ..timing.measure import GpuCall, captured, interleave
from . import figures

LINE = 16  # numbers of 8 bytes
STEPS, LAUNCHES = 4096, 200
SIZES = {"L2": 8 << 20, "memory": 256 << 20}


@triton.jit
def chase_kernel(following, place, steps):
    """Each load says where the next one is; none is in the L1. Goes on from where it stopped."""
    at = tl.load(place)
    for _ in range(steps):
        at = tl.load(following + at, cache_modifier=".cg")
    tl.debug_barrier()  # every thread has read where it stopped
    tl.store(place, at)


@triton.jit
def one_kernel(x, PROGRAMMATIC: tl.constexpr):
    """Writes a one; the next launch may begin before this one ends."""
    if PROGRAMMATIC:
        gdc.gdc_launch_dependents()
        gdc.gdc_wait()
    tl.store(x, 1.0)


def chain(lines: int, device: torch.device) -> torch.Tensor:
    """A way through all lines of 128 bytes in a random order: each holds the place of the next."""
    order = torch.randperm(lines, generator=torch.Generator().manual_seed(0))
    order = torch.roll(order, -int((order == 0).nonzero()))  # from the first on
    following = torch.zeros(lines * LINE, dtype=torch.int64)
    following[order * LINE] = order.roll(-1) * LINE
    return following.to(device)


def chase(device: torch.device, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """Nanoseconds of a load that waits for the one before."""
    calls = {}
    for name, size in sizes.items():
        way = chain(size // 8 // LINE, device), torch.zeros(1, dtype=torch.int64, device=device)
        calls[name] = GpuCall(lambda way=way: chase_kernel[(1,)](*way, STEPS), device)
    timings = interleave(calls, figures.SECONDS)
    return {f"ns, {name}": 1e9 * timings.time(name).median / STEPS for name in calls}


def gap(device: torch.device) -> dict[str, Any]:
    """Microseconds of a kernel in a graph of one after the other, each as short as can be."""
    x, calls = torch.zeros(1, device=device), {}
    ways = {"ordinary": {}}
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9:
        ways["programmatic"] = {"launch_pdl": True}
    for name, options in ways.items():
        graph = captured(lambda o=options: one_kernel[(1,)](x, bool(o), **o), LAUNCHES)
        if isinstance(graph, str):
            return {"problem": graph}
        calls[name] = GpuCall(graph, device, holds=LAUNCHES)
    timings = interleave(calls, figures.SECONDS)
    return {f"us, {name}": 1e6 * timings.time(name).median for name in calls}
