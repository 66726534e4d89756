"""Which implementation serves a call, and why.

``auto`` takes the fastest backend that is there for the device and dtype of the data. A backend
can be asked for by name, for one call (``backend="cpu"``) or for a block (``with use("cpu")``).
"""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import bahdanau_fast.ops  # noqa: F401  defines the operators that the backends implement
from bahdanau_fast import checks, transforms
from bahdanau_fast.backends import availability

__all__ = ["NAMES", "available", "explain", "resolve", "use"]

NAMES = ("cuda", "triton", "cpu", "reference")

# Process-wide like torch's own backend flags: a plain global is what torch.compile can guard on.
_forced: str | None = None


_cpu_problem = availability.cpu_problem()
_cpu_ready = _cpu_problem is None

if _cpu_problem is not None:
    warnings.warn(
        f"bahdanau_fast: {_cpu_problem}; using the slower reference backend. "
        "`python -m bahdanau_fast info` says more.",
        RuntimeWarning,
        stacklevel=2,
    )


def available() -> tuple[str, ...]:
    """Names of the backends that can serve calls in this process, fastest first.

    >>> "reference" in available()
    True
    """
    return tuple(name for name in NAMES if why_not(name) is None)


def why_not(name: str) -> str | None:
    """What keeps a backend from being available; None when nothing does."""
    if name == "cuda":
        return availability.cuda_problem()
    if name == "triton":
        return availability.triton_problem()
    return _cpu_problem if name == "cpu" else None


def explain(device: str | torch.device | None = None) -> str:
    """One line per backend: whether it is there, why not, and which one ``auto`` takes.

    Args:
        device: the device of the data ``auto`` would be asked about; unless given, a GPU if there
            is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = resolve(torch.device(device))
    where = (
        "in its interpreter, on the CPU"
        if availability.interpreted()
        else "for CUDA and ROCm tensors"
    )
    what = {
        "cuda": "CUDA C++ kernels for CUDA tensors",
        "triton": f"Triton kernels {where}; not float64",
        "cpu": f"fused C++ for CPU tensors, {_instruction_set()}",
        "reference": "plain PyTorch, any device",
    }
    lines = [f"auto takes {chosen!r} for {torch.device(device).type} tensors"]
    for name in NAMES:
        problem = why_not(name)
        state = f"available: {what[name]}" if problem is None else f"not available: {problem}"
        lines.append(f"  {name:<10} {state}")
    if _forced is not None:
        lines.append(f"  forced to {_forced!r} by backends.use()")
    return "\n".join(lines)


def _instruction_set() -> str:
    if not _cpu_ready:
        return platform.machine()
    name: str = importlib.import_module("bahdanau_fast._C_cpu").instruction_set()
    return f"{name} kernels"


def resolve(
    device: torch.device, name: str | None = None, dtype: torch.dtype = torch.float32
) -> str:
    """The backend that serves a call on ``device``.

    Args:
        device: where the data is.
        name: a backend asked for by name; None takes that of ``use()``, else the fastest.
        dtype: of the data.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve this device or dtype here.
    """
    wanted = name or _forced
    if wanted is None or wanted == "auto":
        if _needs_reference():
            return "reference"
        if device.type == "cpu":
            return "cpu" if _cpu_ready else "reference"
        if device.type == "cuda" and availability.cuda_problem() is None:
            return "cuda"
        fits = device.type == "cuda" and dtype != torch.float64
        return "triton" if fits and availability.triton_problem() is None else "reference"
    _check_name(wanted)
    serves = {
        "cpu": "cpu",
        "cuda": "cuda",
        "triton": "cpu" if availability.interpreted() else "cuda",
    }
    if device.type != serves.get(wanted, device.type):
        checks.reject(ValueError, "backend", f"serve {device.type} tensors", repr(wanted))
    if wanted == "triton" and dtype == torch.float64:
        checks.reject(ValueError, "backend", f"serve {dtype} tensors", repr(wanted))
    if wanted != "reference" and _needs_reference():
        where = "torch.func, forward-mode differentiation, torch.jit.trace and torch.onnx.export"
        need = f"be 'reference' or left to 'auto' under {where}"
        checks.reject(ValueError, "backend", need, repr(wanted))
    return wanted


def _needs_reference() -> bool:
    """Whether only plain PyTorch operations will do: ONNX knows no operators but its own."""
    return transforms.active() or (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export())


def _check_name(name: str) -> None:
    if name not in NAMES:
        known = ", ".join(repr(n) for n in ("auto", *NAMES))
        checks.reject(ValueError, "backend", f"be one of {known}", repr(name))
    problem = why_not(name)
    if problem is not None:
        checks.reject(ValueError, "backend", "be available here", f"{name!r}: {problem}")


@contextmanager
def use(name: str) -> Iterator[None]:
    """Make every call in the block take one backend; process-wide, like torch's own flags.

    Args:
        name: "auto", "cuda", "triton", "cpu" or "reference".

    Raises:
        ValueError: unknown, or not available here.

    >>> with use("reference"):
    ...     resolve(torch.device("cpu"))
    'reference'
    """
    global _forced
    if name != "auto":
        _check_name(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
