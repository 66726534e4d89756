"""Which implementation serves a call, and why.

``auto`` takes the fastest backend that is there for the device and dtype of the data. A backend
can be asked for by name, for one call (``backend="cpu"``) or for a block (``with use("cpu")``).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

import bahdanau_fast.ops  # noqa: F401  defines the operators that the extension implements
from bahdanau_fast import checks

__all__ = ["NAMES", "available", "explain", "resolve", "use"]

NAMES = ("cpu", "reference")

# Process-wide like torch's own backend flags: a plain global is what torch.compile can guard on.
_forced: str | None = None


def _load_cpu() -> str | None:
    """Import the C++ extension, which registers the CPU kernels; None or what went wrong."""
    try:
        _check_whole("bahdanau_fast._C_cpu")
        importlib.import_module("bahdanau_fast._C_cpu")
    except ModuleNotFoundError:
        return "the C++ extension is not built (install with a C++17 compiler present)"
    except (ImportError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return f"the C++ extension is there but does not load: {reason}"
    return None


def _check_whole(module: str) -> None:
    """Refuse a cut-off ELF file: the loader maps it and dies of SIGBUS, which nothing can catch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return
    with Path(spec.origin).open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return  # not 64-bit ELF: the loader itself has words for it
    order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
    sections = int.from_bytes(header[40:48], order)
    entry, count = (int.from_bytes(header[at : at + 2], order) for at in (58, 60))
    if size < sections + entry * count:
        raise ImportError(f"{spec.origin} is cut off at {size} bytes")


_cpu_problem = _load_cpu()
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
    return NAMES if _cpu_ready else ("reference",)


def why_not(name: str) -> str | None:
    """What keeps a backend from being available; None when nothing does."""
    return _cpu_problem if name == "cpu" else None


def explain(device: str | torch.device = "cpu") -> str:
    """One line per backend: whether it is there, why not, and which one ``auto`` takes.

    Args:
        device: the device of the data ``auto`` would be asked about.
    """
    chosen = resolve(torch.device(device))
    what = {
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


def resolve(device: torch.device, name: str | None = None) -> str:
    """The backend that serves a call on ``device``.

    Args:
        device: where the data is.
        name: a backend asked for by name; None takes that of ``use()``, else the fastest.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve this device here.
    """
    wanted = name or _forced
    if wanted is None or wanted == "auto":
        # torch.func needs formulas it can transform, which the reference is made of.
        transformed = (
            not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        )
        return "cpu" if _cpu_ready and device.type == "cpu" and not transformed else "reference"
    _check_name(wanted)
    if wanted == "cpu" and device.type != "cpu":
        checks.reject(ValueError, "backend", f"serve {device.type} tensors", repr(wanted))
    return wanted


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
        name: "auto", "cpu" or "reference".

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
