"""Where one way of computing becomes faster than another, by family of processor.

Every limit of the package is a field of :class:`Limits`. ``python -m bahdanau_fast bench --only
choices`` measures both sides of each and says which are wrong on the machine it runs on. The values
are fixed for a family: nothing is timed while the package runs, so every run gives the same bits.

``BAHDANAU_FAST_LIMITS`` (amd, intel, x86 or arm) forces those of one family, for tests.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

__all__ = ["FAMILIES", "LIMITS", "Limits", "describe", "family", "using"]


def _limit(unit: str, decides: str, measured_by: str) -> int:
    """A field that says what it is for."""
    return field(metadata={"unit": unit, "decides": decides, "measured by": measured_by})  # type: ignore[no-any-return]


_BENCH = "bench --only choices"


@dataclass(frozen=True, eq=False)  # by identity: route() looks them up at each call
class Limits:
    """The sizes at which :func:`route` changes its mind; ``describe`` prints what each decides."""

    one_operator_work: int = _limit(
        "multiplications in both projections",
        "up to here a call from raw queries and keys is one operator, projections included",
        _BENCH,
    )
    step_rows: int = _limit(
        "rows of queries",
        "up to here a step without gradients projects its queries in its own operator",
        _BENCH,
    )
    step_work: int = _limit(
        "multiplications in the projection of the queries",
        "the same, for narrow queries: up to here whatever the number of rows",
        _BENCH,
    )
    table_elements: int = _limit(
        "elements of the projected keys",
        "from here on exponentials of the keys are kept in a table for later steps",
        _BENCH,
    )
    table_queries: int = _limit(
        "queries per row of the batch",
        "from here on kernels make the exponentials as they go, whatever is kept",
        _BENCH,
    )
    reuse_elements: int = _limit(
        "elements of the keys",
        "from here on the projection of unchanged keys is remembered between calls",
        _BENCH,
    )
    onednn_work: int = _limit(
        "multiplications",
        "from here on fp32 projections go through oneDNN, below it through MKL",
        _BENCH,
    )
    onednn_rows: int = _limit(
        "rows",
        "below it a projection only reads its weight, and MKL does that as fast",
        _BENCH,
    )
    onednn_side: int = _limit(
        "rows or columns of a weight's gradient",
        "from here on such a gradient goes through oneDNN, which does not share out its sum",
        _BENCH,
    )


NEVER = 1 << 62

_AMD = Limits(
    one_operator_work=32768,
    step_rows=8,
    step_work=1 << 20,
    table_elements=513,
    table_queries=16,
    reuse_elements=513,
    onednn_work=1 << 20,
    onednn_rows=4,
    onednn_side=128,
)
# MKL is Intel's own: nowhere slower there than oneDNN, and up to 3.7 times as fast.
_INTEL = replace(_AMD, onednn_work=NEVER)

#: By name. Nobody has measured "x86" (other makers) and "arm": they take what was right for AMD,
#: where torch has MKL beside oneDNN, and torch's own products where it has not.
FAMILIES = {"amd": _AMD, "intel": _INTEL, "x86": _AMD, "arm": _INTEL}


def family() -> str:
    """The family of this processor, by what it says it is: a name of :data:`FAMILIES`.

    Raises:
        ValueError: ``BAHDANAU_FAST_LIMITS`` names no family.
    """
    forced = os.environ.get("BAHDANAU_FAST_LIMITS")
    if forced:
        if forced not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"BAHDANAU_FAST_LIMITS must be one of {known}, got {forced!r}")
        return forced
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
    """Other limits for a block, process-wide: for tests and studies.

    Args:
        **changes: fields of :class:`Limits`.
    """
    global LIMITS
    before, LIMITS = LIMITS, replace(LIMITS, **changes)
    try:
        yield LIMITS
    finally:
        LIMITS = before


def describe() -> str:
    """Every limit with its value for each family, as a table in Markdown."""
    names = list(FAMILIES)
    lines = [
        f"| limit | unit | decides | {' | '.join(names)} |",
        "|" + "---|" * (3 + len(names)),
    ]
    for each in fields(Limits):
        values = (getattr(FAMILIES[name], each.name) for name in names)
        shown = " | ".join("never" if v == NEVER else str(v) for v in values)
        unit, decides = each.metadata["unit"], each.metadata["decides"]
        lines.append(f"| `{each.name}` | {unit} | {decides} | {shown} |")
    return "\n".join(lines)
