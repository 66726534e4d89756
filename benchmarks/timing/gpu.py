"""Timing on a GPU with events, of calls and of CUDA graphs, with a warm or a cold L2.

On a CPU the same class reads the clock, so that its users can be tested without a GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .measure import Timings

__all__ = ["Stopwatch", "captured", "read_bandwidth"]

SAMPLE_SECONDS = 1e-3
ROUNDS = 15


class Stopwatch:
    """Times calls on one device.

    Args:
        device: of the data.
        rounds: samples per call.
    """

    def __init__(self, device: torch.device, rounds: int = ROUNDS) -> None:
        self.device, self.rounds = device, rounds
        self.on_gpu = device.type == "cuda"
        # Larger than any L2: writing it between samples evicts the inputs.
        self._flush = torch.empty(64 << 20 if self.on_gpu else 16, device=device)

    def once(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds per call of one sample."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
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
            repeats[name] = 1 if cold else max(1, min(200, int(SAMPLE_SECONDS / self.once(call))))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name in random.sample(sorted(calls), len(calls)):
                if cold:
                    self._flush.add_(1.0)
                samples[name].append(self.once(calls[name], repeats[name]))
        return Timings(samples)


def captured(call: Callable[[], Any]) -> Callable[[], Any] | str:
    """``call`` as the replay of a CUDA graph, or why it cannot be one."""
    if not torch.cuda.is_available():
        return "no GPU"
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
        torch.cuda.synchronize()
        return str(error).strip().splitlines()[0]

    def replay(_: Any = kept) -> None:  # the graph writes into what it returned
        graph.replay()

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
