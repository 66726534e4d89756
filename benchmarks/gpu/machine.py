"""What the GPU report runs on, or why it cannot; ``python -m benchmarks.gpu.machine`` says it.

torch is imported only when asked for: it may be missing, and a driver may hang.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from ..worker import Row


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"no torch: {sys.executable} cannot import it ({error})"
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return f"a CPU torch: {torch.__version__} is built for neither CUDA nor ROCm"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__}, built for {built}, sees none"
    return None


def machine(device: str) -> list[Row]:
    """What the figures come from; a problem where there is no GPU."""

    def found() -> dict[str, Any]:
        problem = missing() if device == "cuda" else None
        if problem:
            return {"problem": problem}
        import torch

        from bahdanau_fast import backends

        from ..machine import machine as host

        where = host() | {"backends": backends.explain(device), "gpu": device}
        where["cuda"] = torch.version.cuda or torch.version.hip or "none"
        with suppress(ImportError):  # of several distributions: triton, pytorch-triton-rocm
            where["triton"] = importlib.import_module("triton").__version__
        if os.environ.get("BAHDANAU_FAST_COMMIT"):
            where["commit"] = os.environ["BAHDANAU_FAST_COMMIT"]
        if device == "cuda":
            gpu = torch.cuda.get_device_properties(0)
            where["gpu"] = f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
        return where

    return [Row("machine", 60.0, found)]


if __name__ == "__main__":
    problem = missing()
    if problem:
        who = (*sys.argv[1:], "gpu-report")[0]
        print(f"{who}: {problem}; nothing is measured", file=sys.stderr)
    sys.exit(2 if problem else 0)
