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

NEVER = 1 << 62


@dataclass(frozen=True)
class Limits:
    """Which product of fp32 matrices is taken on the CPU."""

    # Multiplications from which on a projection goes through oneDNN, below through MKL; and where
    # its gradients do, too.
    onednn_work: int
    onednn_work_to_train: int
    # Rows and columns of a weight from which on a projection of some rows is the transpose of an
    # MKL product.
    turned_side: int
    # Rows up to which a projection by a large weight is this package's own product.
    few_rows: int


# MKL takes its AVX2 path on AMD's processors. On Zen 4, whose AVX-512 does no more in a cycle,
# oneDNN is ahead in the largest products alone, and never in a step of training; on Zen 5 it is up
# to 2.3 times as fast. On Intel's MKL is nowhere slower, and up to 3.7 times as fast.
_AMD = Limits(1 << 25, NEVER, turned_side=NEVER, few_rows=32)
_INTEL = Limits(NEVER, NEVER, turned_side=512, few_rows=0)
#: By name. Nobody has measured "x86" (other makers) and "arm": they take what was right for AMD,
#: where torch has MKL beside oneDNN, and torch's own products where it has not.
FAMILIES = {
    "amd": _AMD,
    "zen5": Limits(1 << 20, 1 << 20, turned_side=NEVER, few_rows=0),
    "intel": _INTEL,
    "x86": _AMD,
    "arm": replace(_INTEL, turned_side=NEVER),
}
_ZEN5 = 26  # what it, and what comes after it, says of itself


def family() -> str:
    """The family of this processor, by what it says it is: a name of :data:`FAMILIES`."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686", "x86"):
        return "arm"
    maker, number = _maker()
    if maker == "AuthenticAMD":
        return "zen5" if number >= _ZEN5 else "amd"
    return "intel" if maker == "GenuineIntel" else "x86"


def _maker() -> tuple[str, int]:
    """The name of its maker, and the number of its family there; 0 where nobody says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # elsewhere than on Linux
        *_, maker = ("", *platform.processor().split())
        return maker, 0
    fields = {name.strip(): text.strip() for name, _, text in (x.partition(":") for x in lines)}
    number = fields.get("cpu family", "")
    return fields.get("vendor_id", ""), int(number) if number.isdecimal() else 0


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
