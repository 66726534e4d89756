"""Chooses among the tiles a kernel could be launched with: by the model, or by trying them.

``kernels/plans.py`` lists the candidates, the one its model prefers first. That one is taken,
unless ``BAHDANAU_FAST_AUTOTUNE=1``: then each is timed once per kernel, device, dtype and sizes
(rounded up to powers of two), and the fastest is kept for the process and, in a file, for later
ones (``BAHDANAU_FAST_CACHE``, a folder; else ``~/.cache/bahdanau_fast``). While a CUDA graph is
being captured nothing is timed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["choose"]

Plan = TypeVar("Plan")
REPEATS = 20
_chosen: dict[str, int] | None = None


def choose(
    kernel: str,
    key: Sequence[Any],
    candidates: Sequence[Plan],
    launch: Callable[[Plan], Any],
    device: torch.device,
) -> Plan:
    """The plan to launch with.

    Args:
        kernel: its name.
        key: what the best plan depends on, besides the device.
        candidates: plans, that of the model first.
        launch: makes the launches of a plan; called only to time them.
        device: of the data.
    """
    if len(candidates) == 1 or os.environ.get("BAHDANAU_FAST_AUTOTUNE", "0") != "1":
        return candidates[0]
    chosen = _load()
    entry = json.dumps([kernel, _device(device), len(candidates), *map(str, key)])
    if entry not in chosen:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return candidates[0]
        times = [_time(lambda plan=plan: launch(plan), device) for plan in candidates]  # type: ignore[misc]
        chosen[entry] = times.index(min(times))
        _store(chosen)
    return candidates[chosen[entry]]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _time(launch: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the best of a few rounds; infinite where it cannot be launched."""
    try:
        launch()  # compiles
        _wait(device)
    except Exception:  # out of shared memory or registers, say: another candidate will do
        return float("inf")
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(REPEATS):
            launch()
        _wait(device)
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _file() -> Path:
    folder = os.environ.get("BAHDANAU_FAST_CACHE") or Path.home() / ".cache" / "bahdanau_fast"
    return Path(folder) / "tuning.json"


def _load() -> dict[str, int]:
    """What was chosen before, in this process or an earlier one."""
    global _chosen
    if _chosen is None:
        try:
            read = json.loads(_file().read_text())
            _chosen = {str(entry): int(place) for entry, place in read.items()}
        except (OSError, ValueError, AttributeError):  # not there, or not ours: begin anew
            _chosen = {}
    return _chosen


def _store(chosen: dict[str, int]) -> None:
    """Write the file in one move; where the folder cannot be written, this process remembers."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(chosen, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        pass
