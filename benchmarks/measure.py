"""Time, in turns: a round times every provider once, ratios are taken within it."""

from __future__ import annotations

import functools
import gc
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLE_SECONDS = 5e-3
SLOW_SECONDS = 0.05
PAUSE_SECONDS = 0.01
MAX_ROUNDS = 60
GPU_SECONDS = 0.5  # of timing a row on a GPU
GPU_CALLS = 20  # in a graph: one alone is shorter than the graph's own launch


@dataclass(frozen=True)
class Spread:
    """Median with the 20th and the 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        shares = torch.tensor((0.5, 0.2, 0.8), dtype=torch.float64)
        return cls(*torch.tensor(samples, dtype=torch.float64).quantile(shares).tolist())


@dataclass(frozen=True)
class Timings:
    """Seconds per call, one sample per provider and round."""

    samples: dict[str, list[float]]

    def time(self, name: str) -> Spread:
        return Spread.of(self.samples[name])

    def ratio(self, slow: str, fast: str) -> Spread:
        """``slow / fast`` round by round, so that a disturbance of a round affects both."""
        pairs = zip(self.samples[slow], self.samples[fast], strict=True)
        return Spread.of([above / below for above, below in pairs])

    def packed(self) -> dict[str, dict[str, float]]:
        """Median, p20 and p80 by name, as they are written in JSON."""
        return {name: asdict(self.time(name)) for name in self.samples}


def _clocked(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def seconds_per_call(call: Callable[[], Any], repeats: int) -> float:
    """One sample; a :class:`.worker.Worker` or :class:`GpuCall` takes its own."""
    own = getattr(call, "seconds", None)
    if own is not None:
        return float(own(repeats))
    if repeats > 1:
        _clocked(call, repeats)  # unused: the provider before left its own data in the caches
    return _clocked(call, repeats)


def interleave(calls: dict[str, Callable[[], Any]], seconds: float, min_rounds: int = 5) -> Timings:
    """Time warm calls in turn for about ``seconds``, at least ``min_rounds`` rounds (or three).

    A sample repeats a call at least five times and for about 5 ms, one of more than 5 ms twice and
    one of more than 50 ms once, after as many calls that are not timed: a decoder finds the memory
    of the step before in the caches. No call always follows the same other call. A pause before
    each sample lets the OpenMP threads of the provider before go to sleep.
    """
    names = list(calls)
    gc.collect()
    gc.disable()
    try:
        repeats, round_seconds = {}, 0.0
        for name, call in calls.items():
            once = seconds_per_call(call, 1)
            if once < SLOW_SECONDS:  # the first may still have been the warm-up
                once = min(once, seconds_per_call(call, 1))
            enough = math.ceil(SAMPLE_SECONDS / max(once, 1e-9))
            least = 5 if once < SAMPLE_SECONDS else 2
            repeats[name] = min(500, max(least, enough)) if once < SLOW_SECONDS else 1
            round_seconds += once * repeats[name] * (2 if repeats[name] > 1 else 1) + PAUSE_SECONDS
        at_least = min_rounds if round_seconds < seconds else min(min_rounds, 3)
        rounds = max(at_least, min(MAX_ROUNDS, int(seconds / round_seconds)))
        samples: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                time.sleep(PAUSE_SECONDS)
                samples[name].append(seconds_per_call(calls[name], repeats[name]))
    finally:
        gc.enable()
    return Timings(samples)


@dataclass(frozen=True)
class GpuCall:
    """A call, or the replay of its graph, on a GPU, timed by events; on a CPU by the clock.

    ``cold``: no input is in the L2 when a call begins. ``holds``: calls that a replay makes.
    ``host``: until it returns, whether or not the GPU is done.
    """

    call: Callable[[], Any]
    device: torch.device
    cold: bool = False
    holds: int = 1
    host: bool = False

    def __call__(self) -> Any:
        return self.call()

    def seconds(self, repeats: int) -> float:
        if self.host:
            synchronize(self.device)
            took = _clocked(self.call, repeats)
            synchronize(self.device)
            return took
        if self.device.type != "cuda":
            return seconds_per_call(self.call, repeats)
        self.call()  # not timed: the call before left its own data in the L2
        if not self.cold:
            return self._between_events(repeats)
        total = 0.0
        for _ in range(repeats):
            # Read, not written: written lines would go back to memory while the next call runs.
            _larger_than_any_l2(self.device).sum()
            total += self._between_events(1)
        return total / repeats

    def _between_events(self, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) * 1e-3 / repeats / self.holds


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that what goes wrong there is blamed on this row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def _larger_than_any_l2(device: torch.device) -> Tensor:
    return torch.zeros(64 << 20, device=device)


def captured(call: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
    """``call``, so many times, as the replay of a CUDA graph; RuntimeError where it cannot be one.

    The replay returns what the last call does.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU")
    before = torch.cuda.current_stream()
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                kept = call()
    except Exception as error:  # capture fails with many kinds of errors
        torch.cuda.set_stream(before)  # a capture that fails to end leaves its own
        torch.cuda.synchronize()
        raise RuntimeError(str(error).strip().splitlines()[0]) from error

    def replay() -> Any:
        graph.replay()
        return kept  # what the graph writes into

    return replay


def graphs(
    call: Callable[[], Any], device: torch.device, calls: int, cold: bool
) -> dict[str, GpuCall]:
    """A graph of so many calls, and with ``cold`` one of one."""
    found = {"graph": GpuCall(captured(call, calls), device, holds=calls)}
    return found | {"cold": GpuCall(captured(call), device, cold=True)} if cold else found


def in_turns(
    call: Callable[[], Any], device: torch.device, holds: int, cold: bool
) -> tuple[dict[str, Any], dict[str, GpuCall]]:
    """Seconds of a call, and from graphs of it, with those graphs; without them says why."""
    made, told = dict[str, GpuCall](), {} if holds else {"no graph": "not asked for"}
    try:
        made = graphs(call, device, holds, cold) if holds else {}
    except RuntimeError as error:
        told = {"no graph": str(error)}
    calls = {"called": GpuCall(call, device)} | made
    return interleave(calls, GPU_SECONDS).packed() | told, made
