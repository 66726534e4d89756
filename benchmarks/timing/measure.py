"""Interleaved timing: each round times every provider once, and ratios are taken within it."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..contestants.providers import Runnable

SAMPLE_SECONDS = 5e-3
SLOW_SECONDS = 0.05
PAUSE_SECONDS = 0.01
MAX_ROUNDS = 60
GPU_SAMPLE_SECONDS, GPU_ROUNDS = 1e-3, 15


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

    def fastest(self, names: list[str]) -> str:
        return min(names, key=lambda name: self.time(name).median)

    @property
    def rounds(self) -> int:
        return len(next(iter(self.samples.values())))


def prepare(runnable: Runnable, train: bool, grad_context: Tensor) -> Callable[[], Any]:
    """The call to be timed: a forward, or with ``train`` a forward and all gradients."""
    if not train:
        return runnable.forward

    def step() -> tuple[Tensor, ...]:
        context = runnable.forward()[0]  # weights that nobody holds have no gradient to be found
        return torch.autograd.grad(context, runnable.leaves, grad_context)

    return step


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_per_call(call: Callable[[], Any], repeats: int) -> float:
    """One sample; a call into another process (:class:`.worker.Worker`) measures its own time."""
    elsewhere = getattr(call, "seconds", None)
    if elsewhere is not None:
        return float(elsewhere(repeats))
    if repeats > 1:
        for _ in range(repeats):  # not timed: the provider before left its own data in the caches
            call()
    return _timed(call, repeats)


def _timed(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def interleave(calls: dict[str, Callable[[], Any]], seconds: float, min_rounds: int = 5) -> Timings:
    """Time calls in turn for about ``seconds``, at least ``min_rounds`` rounds.

    A sample repeats a call at least five times and for about 5 ms, one of more than 5 ms twice and
    one of more than 50 ms once, after as many calls that are not timed: a decoder reads the same
    memory at every step and finds it in the caches. The order of the calls is new in each round, so
    that no call always follows the same other call. A pause before each sample lets the threads of
    the provider before go to sleep: compiled code has an OpenMP pool of its own, which spins for
    some milliseconds on the cores that the next provider needs.

    Args:
        calls: the calls to time, already warm.
        seconds: for all calls together; the number of rounds follows from it.
        min_rounds: rounds that are taken even if they need longer; three of them if one round
            alone needs longer.
    """
    names = list(calls)
    with _no_collection():
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
    return Timings(samples)


class Stopwatch:
    """Times calls on a GPU with events, of calls and of CUDA graphs, with a warm or a cold L2.

    On a CPU it reads the clock, so that its users can be tested without a GPU.

    Args:
        device: of the data.
        rounds: samples per call.
    """

    def __init__(self, device: torch.device, rounds: int = GPU_ROUNDS) -> None:
        self.device, self.rounds = device, rounds
        self.on_gpu = device.type == "cuda"
        # Larger than any L2: reading it between samples evicts the inputs. Written lines would
        # have to be written back while the next call runs.
        self._flush = torch.zeros(64 << 20 if self.on_gpu else 16, device=device)

    def once(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds per call of one sample."""
        if not self.on_gpu:
            return _timed(call, repeats)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        for _ in range(repeats):
            call()
        end_event.record()
        torch.cuda.synchronize(self.device)
        return float(start_event.elapsed_time(end_event)) * 1e-3 / repeats

    def interleave(self, calls: dict[str, Callable[[], Any]], cold: bool = False) -> Timings:
        """Every call in each round, in random order."""
        repeats = {}
        for name, call in calls.items():
            self.once(call, 3)
            repeats[name] = (
                1 if cold else max(1, min(200, int(GPU_SAMPLE_SECONDS / self.once(call))))
            )
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name in random.sample(sorted(calls), len(calls)):
                if cold:
                    self._flush.sum()
                samples[name].append(self.once(calls[name], repeats[name]))
        return Timings(samples)


def captured(call: Callable[[], Any]) -> Callable[[], Any] | str:
    """``call`` as the replay of a CUDA graph, which returns the same, or why it cannot be one."""
    if not torch.cuda.is_available():
        return "no GPU"
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
            kept = call()
    except Exception as error:  # capture fails with many kinds of errors
        torch.cuda.set_stream(before)  # a capture that fails to end leaves its own
        torch.cuda.synchronize()
        return str(error).strip().splitlines()[0]

    def replay() -> Any:
        graph.replay()
        return kept  # what the graph writes into

    return replay


def read_bandwidth(stopwatch: Stopwatch) -> dict[str, float]:
    """Bytes per second of reading, and of copying (read and written counted), large tensors."""
    size = (1 << 30) if stopwatch.on_gpu else 1 << 20
    x: Tensor = torch.randn(size, device=stopwatch.device)
    y = torch.empty_like(x)
    reading = stopwatch.interleave({"read": x.sum, "copy": lambda: y.copy_(x)})
    return {
        "read": 4 * size / reading.time("read").median,
        "copy": 8 * size / reading.time("copy").median,
    }
