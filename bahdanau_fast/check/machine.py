"""What there is here: versions, the processor, the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import bahdanau_fast
from bahdanau_fast import backends
from bahdanau_fast.check.children import Row
from bahdanau_fast.seq2seq.cli.cores import HELPS


def versions() -> dict[str, str]:
    """Of this package and of what it runs on; asks for no GPU."""
    # How OpenMP threads wait for one another, and what helps when that takes long.
    waiting, policy = f"slow when other programs use the cores? {HELPS} helps", "OMP_WAIT_POLICY"
    if policy in os.environ:
        waiting = f"{policy}={os.environ[policy]}"
    return {
        "bahdanau_fast": f"{bahdanau_fast.__version__} ({Path(bahdanau_fast.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "machine": platform.platform(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores; {waiting}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "not in this torch",
    }


def may_have_gpu() -> bool:
    """Whether torch could use one, and it can be asked in a child of this process."""
    return hasattr(os, "fork") and bool(torch.version.cuda or torch.version.hip)


def gpu() -> Iterator[Row]:
    """One row: the GPU of this process, and why each backend is not there; none without a GPU."""
    if not torch.cuda.is_available():
        return
    has = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    yield {
        "name": has.name,
        "capability": [has.major, has.minor],
        "multiprocessors": has.multi_processor_count,
        "bytes": has.total_memory,
        "hip": torch.version.hip,
        "triton": triton,
        "why_not": {name: backends.why_not(name) for name in ("cuda", "triton")},
    }
