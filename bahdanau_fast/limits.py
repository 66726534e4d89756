"""Where one way of computing a call gives way to another, by family of processor.

Every number that decides is a field here: of :class:`Limits` for the CPU, of :class:`GpuLimits` for
a GPU, and of :class:`PrecisionLimits` where exactness decides instead of speed. ``python -m
bahdanau_fast bench --only limits`` measures both sides of those of the CPU and says which are wrong
on the machine it runs on. All values are fixed: nothing is timed while the package runs, so every
run gives the same bits.

``BAHDANAU_FAST_LIMITS`` (amd, intel, x86 or arm) forces those of one family, for tests.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "FAMILIES",
    "GPU_FAMILIES",
    "LIMITS",
    "OTHER_GPU",
    "PRECISION",
    "GpuLimits",
    "Limits",
    "PrecisionLimits",
    "describe",
    "family",
    "of_gpu",
    "using",
]


def _limit(unit: str, decides: str, measured_by: str) -> int:
    """A field that says what it is for."""
    return field(metadata={"unit": unit, "decides": decides, "measured by": measured_by})  # type: ignore[no-any-return]


_BENCH = "python -m bahdanau_fast bench --only limits"
_GPU_REPORT = "make gpu-report"
_PRODUCTS = "python -m pytest tests/cpu/test_projection.py"
_ACCURACY = "python -m pytest tests/cpu/test_accuracy.py"


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
    turned_side: int = _limit(
        "rows and columns of a weight",
        "from here on fp32 projections of some rows are the transpose of an MKL product",
        _BENCH,
    )
    turned_rows: int = _limit("rows", "from here on, for such a weight", _BENCH)
    turned_rows_most: int = _limit("rows", "up to here, for such a weight", _BENCH)
    few_rows: int = _limit(
        "rows",
        "up to here, without oneDNN, fp32 projections by a large weight are this package's own",
        _BENCH,
    )
    few_rows_features: int = _limit("features of a row", "from here on, for so few", _BENCH)
    few_rows_hidden: int = _limit("rows of a weight", "from here on, for so few", _BENCH)
    few_rows_weight: int = _limit(
        "elements of a weight, for each row", "from here on, for so few", _BENCH
    )
    one_row_weight: int = _limit(
        "elements of a weight", "the same for one row, of which MKL makes less work", _BENCH
    )


@dataclass(frozen=True, eq=False)
class GpuLimits:
    """The sizes and rates by which a call is computed on a GPU; ``describe`` prints them."""

    step_queries: int = _limit(
        "queries per row of the batch",
        "up to here one launch serves a call, and backward is one pass over the keys",
        _GPU_REPORT,
    )
    step_features: int = _limit(
        "features of a value",
        "up to here one launch serves a call: its program keeps a context in registers",
        _GPU_REPORT,
    )
    step_features_fp64: int = _limit(
        "features of a value",
        "the same where fp32 values may be summed up in fp64",
        _GPU_REPORT,
    )
    shared: int = _limit(
        "bytes of shared memory",
        "a Triton program of several queries keeps a tile of values in so many, or there is none",
        "make budgets",
    )
    own_queries: int = _limit(
        "queries per row of the batch",
        "up to here a launch may project its own queries, and in CUDA C++ its own keys",
        _GPU_REPORT,
    )
    own_weight: int = _limit(
        "bytes of W_q, times the queries",
        "up to here each block of that launch reads W_q itself",
        _GPU_REPORT,
    )
    cluster: int = _limit(
        "blocks",
        "so many blocks of a CUDA C++ launch share out W_q: `own_weight` holds for each",
        _GPU_REPORT,
    )
    launch: int = _limit(
        "nanoseconds",
        "what a launch costs, which keys projected in the kernel save",
        _GPU_REPORT,
    )
    memory_rate: int = _limit(
        "bytes per nanosecond",
        "how fast projected keys would be written and read, which is saved too",
        _GPU_REPORT,
    )
    own_rate: int = _limit(
        "operations per nanosecond",
        "how fast the kernel that projects its keys multiplies, in 16 bits",
        _GPU_REPORT,
    )
    library_rate: int = _limit(
        "operations per nanosecond",
        "how fast the library multiplies instead",
        _GPU_REPORT,
    )


@dataclass(frozen=True, eq=False)
class PrecisionLimits:
    """What decides for exactness: the same on every processor; ``describe`` prints them."""

    fp64_gpu_elements: int = _limit(
        "elements (query, key, hidden)",
        "up to here fp32 calls are computed in fp64 on GPUs",
        "python -m pytest tests/cuda/host/test_cuda_ranges.py",
    )
    fp64_cpu_elements: int = _limit(
        "elements (query, key, hidden), of a table (key, hidden)",
        "up to here fp32 calls and tables are computed in fp64 on the CPU",
        _ACCURACY,
    )
    fp64_forward_table_elements: int = _limit(
        "elements (key, hidden)",
        "the same of tables where no gradient will be asked for",
        _ACCURACY,
    )
    fp32_norm: int = _limit(
        "norm of w_v",
        "above it fp32 calls of any size are computed in fp64 on the CPU",
        _ACCURACY,
    )
    onednn_terms: int = _limit(
        "terms of a sum",
        "sums of more are taken in parts: oneDNN adds up one by one, and would round more often",
        _PRODUCTS,
    )
    onednn_copied_terms: int = _limit(
        "terms of a sum",
        "the same where each part has to be copied first",
        _PRODUCTS,
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
    turned_side=NEVER,
    turned_rows=16,
    turned_rows_most=48,
    few_rows=32,
    few_rows_features=256,
    few_rows_hidden=128,
    few_rows_weight=4096,
    one_row_weight=1 << 18,
)
# MKL is Intel's own: nowhere slower there than oneDNN, and up to 3.7 times as fast.
_INTEL = replace(_AMD, onednn_work=NEVER, turned_side=512, few_rows=0)

#: By name. Nobody has measured "x86" (other makers) and "arm": they take what was right for AMD,
#: where torch has MKL beside oneDNN, and torch's own products where it has not.
FAMILIES = {
    "amd": _AMD,
    "intel": _INTEL,
    "x86": _AMD,
    "arm": replace(_INTEL, turned_side=NEVER),
}

# Modelled, not measured: rates are an H200's, a multiprocessor of which reads some 40 bytes a
# nanosecond from L2.
OTHER_GPU = GpuLimits(
    step_queries=16,
    step_features=2048,
    step_features_fp64=256,
    shared=64 * 1024,
    own_queries=4,
    own_weight=64 * 1024,
    cluster=1,
    launch=2500,
    memory_rate=4300,
    own_rate=400_000,
    library_rate=750_000,
)

#: By compute capability: sm_80 is 8.0 and 8.7, sm_86 also 8.9, sm_90 from 9.0 on, sm_120 from 12.0.
#: "other" is what no family is known of: AMD's GPUs, and Triton's interpreter. Shared memory is
#: what the CUDA C++ Programming Guide gives a block.
GPU_FAMILIES = {
    "sm_80": replace(OTHER_GPU, shared=163 * 1024),
    "sm_86": replace(OTHER_GPU, shared=99 * 1024),
    "sm_90": replace(OTHER_GPU, shared=227 * 1024, cluster=8),
    "sm_120": replace(OTHER_GPU, shared=99 * 1024, cluster=8),
    "other": OTHER_GPU,
}

#: csrc/common/limits.h has those of fp64 and fp32 for the kernels; a test compares them.
PRECISION = PrecisionLimits(
    fp64_gpu_elements=524288,
    fp64_cpu_elements=196608,
    fp64_forward_table_elements=16384,
    fp32_norm=64,
    onednn_terms=256,
    onednn_copied_terms=512,
)


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


@functools.cache
def of_gpu(device: torch.device) -> GpuLimits:
    """Those of a GPU by its compute capability; of no family for any other device.

    Args:
        device: of the data.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return OTHER_GPU
    capability = torch.cuda.get_device_capability(device)
    if capability in ((8, 6), (8, 9)):
        return GPU_FAMILIES["sm_86"]
    found = "sm_120" if capability >= (12, 0) else "sm_90" if capability >= (9, 0) else "sm_80"
    return GPU_FAMILIES[found]


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
    """Every limit with its value for each family, as tables in Markdown: CPU, GPU, precision."""
    found = (
        _table(Limits, FAMILIES),
        _table(GpuLimits, GPU_FAMILIES),
        _table(PrecisionLimits, {"all": PRECISION}),
    )
    return "\n\n".join(found)


def _table(kind: type[Any], families: dict[str, Any]) -> str:
    lines = [
        f"| limit | unit | decides | measured by | {' | '.join(families)} |",
        "|" + "---|" * (4 + len(families)),
    ]
    for each in fields(kind):
        values = (getattr(limits, each.name) for limits in families.values())
        shown = " | ".join("never" if v == NEVER else str(v) for v in values)
        unit, decides, measured_by = each.metadata.values()
        lines.append(f"| `{each.name}` | {unit} | {decides} | `{measured_by}` | {shown} |")
    return "\n".join(lines)
