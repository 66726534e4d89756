"""Memory that torch's allocator gives out during a call, in C++ operators too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


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
