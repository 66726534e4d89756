"""Where one way of computing gives way to another, as far as that differs between processors.

What is the same on all of them is a constant beside its use (``backends/route.py``,
``ops/projection.py``). All values are fixed: nothing is timed while the package runs, so every run
gives the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["FAMILIES", "LIMITS", "NEVER", "Limits", "family", "using"]

NEVER = 1 << 62


@dataclass(frozen=True)
class Limits:
    """Which product of fp32 matrices is taken on the CPU."""

    # Multiplications from which on a projection goes through oneDNN, below through MKL.
    onednn_work: int
    # Rows and columns of a weight from which on a projection of some rows is the transpose of an
    # MKL product.
    turned_side: int
    # Rows up to which a projection by a large weight is this package's own product, where there is
    # no oneDNN.
    few_rows: int


# MKL is Intel's own: nowhere slower there than oneDNN, and up to 3.7 times as fast.
_AMD = Limits(onednn_work=1 << 20, turned_side=NEVER, few_rows=32)
_INTEL = Limits(onednn_work=NEVER, turned_side=512, few_rows=0)
#: By name. Nobody has measured "x86" (other makers) and "arm": they take what was right for AMD,
#: where torch has MKL beside oneDNN, and torch's own products where it has not.
FAMILIES = {
    "amd": _AMD,
    "intel": _INTEL,
    "x86": _AMD,
    "arm": replace(_INTEL, turned_side=NEVER),
}


def family() -> str:
    """The family of this processor, by what it says it is: a name of :data:`FAMILIES`."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686", "x86"):
        return "arm"
    return {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(_maker(), "x86")


def _maker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # elsewhere than on Linux
        words = platform.processor().split()
        return words[-1] if words else ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


#: Those in force. To be read where they are used (``limits.LIMITS``), so that :func:`using` works.
LIMITS = FAMILIES[family()]


@contextmanager
def using(**changes: int) -> Iterator[Limits]:
    """Other :class:`Limits` for a block, process-wide."""
    global LIMITS
    before, LIMITS = LIMITS, replace(LIMITS, **changes)
    try:
        yield LIMITS
    finally:
        LIMITS = before
