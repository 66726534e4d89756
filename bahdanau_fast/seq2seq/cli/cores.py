"""Whether threads wait for cores that other programs use, and what helps."""

from __future__ import annotations

import os
import time

import torch

HELPS = "OMP_NUM_THREADS=1, or OMP_WAIT_POLICY=passive,"

_SECONDS = 0.2  # many turns of a scheduler, so that a lucky one decides nothing


def busy() -> str:
    """A line on what helps, where all threads are slower than one alone; else an empty one."""
    threads = torch.get_num_threads()
    if threads == 1 or "OMP_WAIT_POLICY" in os.environ:
        return ""
    alone, together = (_products(n) for n in (1, threads))
    if 1.5 * together > alone:
        return ""
    slow = f"{threads} threads take {alone / together:.0f} times as long as one"
    return f"note: other programs seem to use the cores, where {slow}; {HELPS} helps"


def _products(threads: int) -> float:
    """Small products of matrices in a second; torch keeps this number of threads."""
    torch.set_num_threads(threads)
    left, right = torch.ones(64, 256), torch.ones(256, 256)
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < _SECONDS:
        left @ right
        count += 1
    return count / took
