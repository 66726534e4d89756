"""Counts of real launches, from a few of their blocks in the PTX machine.

What the library does (products, sums) is its bytes and multiply-adds, at full speed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from calls import KINDS
from driven import CudaPtx
from machine import build
from machine.launch import Report
from mock_cuda import library
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.machine_code import Kernel

from .gpus import Gpu
from .sass import Code
from .times import LANES, MMA, Work

__all__ = [
    "Counted",
    "Launch",
    "Library",
    "Problem",
    "kept",
    "launch_of",
    "launches",
    "scaled",
    "works",
]

BITS = re.compile(r"[bsuf](8|16|32|64)$|f16x2$|bf16$")
# Of a batch row of so many blocks or more, tiles that do the same, only some are counted. Splits of
# a row, which the last block joins, are fewer.
MANY_BLOCKS, MOST_BLOCKS = 64, 16
SOURCES = Path(__file__), Path(__file__).with_name("sass.py")
NOT_ALIKE = "sum_parts", "step_sums_kernel"  # blocks sum those of w, or of queries; all are run
MOST_ROWS = 24  # that are there: two clusters of eight are counted, or all of fewer than three


@dataclass(frozen=True)
class Problem:
    """A call: ``scores`` of projected queries and keys, in 16 or 32 bits.

    Attributes:
        dtype: of its tensors.
        lens: of the rows, or None.
    """

    batch: int
    queries: int
    keys: int
    hidden: int
    value_size: int
    dtype: torch.dtype = torch.bfloat16
    lens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Launch:
    """How a launch is cut, and its counts over all blocks.

    Attributes:
        entry: name in the PTX.
        kind: of numbers, a key of ``benchmarks.machine_code.KINDS``.
        registers: of a thread.
        code: bytes of machine code that ran.
        counts: instructions by unit, and "waits", "turns", "sectors", "read", "cold" and "written"
            as in ``Work``.
    """

    entry: str
    kind: str
    registers: int
    code: int
    blocks: int
    threads: int
    shared: int
    counts: dict[str, float]
    trips: float
    most_trips: float


# Operations of torch that launch a kernel.
PRODUCTS, REST = ("mm", "bmm"), ("copy_", "zero_", "nan_to_num", "amax", "fill_")


class Library(TorchDispatchMode):
    """Counts operations of torch; products and sums, which can be large, are not computed.

    Args:
        of: what they are added to: ``found`` in turn, beside launches of a ``kind``, and ``given``,
            where the tensors of the call lie.
    """

    def __init__(self, of):
        super().__init__()
        self.of = of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if name in (*PRODUCTS, "sum"):
            shapes = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
            out = torch.empty_like(func(*shapes, **kwargs), device="cpu")
        else:
            out = func(*args, **kwargs)
            if name not in REST:
                return out
        self._add(name, out, tensors[1:] if name.endswith("_") else tensors)
        return out

    def _add(self, name, out, read) -> None:
        def size(tensors):
            return sum(x.numel() * x.element_size() for x in tensors)

        cold = size(x for x in read if x.untyped_storage().data_ptr() in self.of.given)
        written = size([out])
        blocks, units = max(1, out.numel() // 1024), {}
        if name in PRODUCTS:
            products = out.numel() * read[0].shape[-1]
            half = out.dtype is not torch.float32
            units = {"tensor": products / MMA} if half else {"fma": products / LANES}
            blocks = math.prod(out.shape[:-2]) * math.prod(-(-n // 64) for n in out.shape[-2:])
        moved = size(read) + written
        self.of.found.append(Launch(
            f"torch's {name}", self.of.kind, 64, 0, blocks, 128, 0,
            {**units, "turns": 0, "sectors": moved / 32, "read": moved - written, "cold": cold,
             "written": written}, 1, 1,
        ))  # fmt: skip


class Counted(CudaPtx):
    """Runs a few blocks of each launch and scales their counts to all.

    Args:
        arch: of the PTX.
        code: that ptxas makes machine code for.

    Attributes:
        rows: of the batch; the blocks of a row follow each other.
        alike: all rows do the same.
        everything: count all blocks.
        found: the launches since it was emptied.
        given: where the tensors of the call lie.
    """

    def __init__(self, arch: str, code: str):
        super().__init__(arch, all_known=True, counts=True, races=False, share=0.0)
        self.code, self._codes = code, {}
        self.rows, self.alike, self.everything = 1, True, False
        self.found: list[Launch] = []
        self.given: set[int] = set()
        self._known: dict[tuple, Launch] = {}

    def count(self, p: Problem, gpu: Gpu, backward: bool) -> list[Launch]:
        """The launches of a call, forward or, alone, backward, as they are cut for a GPU."""
        self.rows, self.alike = p.batch, p.lens is None and not self.everything
        drawn = min(p.batch, MOST_ROWS) if self.alike else p.batch
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 0.577) -> torch.Tensor:  # that of nn.Linear's outputs
            return (torch.randn(shape, generator=generator) * scale).to(p.dtype)

        def rows(*shape: int) -> torch.Tensor:
            whole = torch.empty((p.batch, *shape), dtype=p.dtype)
            whole[:drawn] = draw(drawn, *shape)
            return whole

        keys, values = rows(p.keys, p.hidden), rows(p.keys, p.value_size)
        queries = rows(p.queries, p.hidden)
        w_v = draw(1, p.hidden, scale=p.hidden**-0.5)
        lens = None if p.lens is None else torch.tensor(p.lens)
        self.found.clear()
        self.begin(gpu.multiprocessors, p.dtype)
        inputs = queries, keys, values, w_v, lens
        if backward:
            weights = torch.empty((p.batch, p.queries, p.keys))
            grad = torch.empty((p.batch, p.queries, p.value_size), dtype=p.dtype)
            weights[:drawn], grad[:drawn] = 1 / p.keys, 1
            call = functools.partial(self.backward, weights, grad, None, 15, *inputs)
            inputs = *inputs, weights, grad
        else:
            call = functools.partial(self.forward, True, *inputs)
        self.given = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
        with Library(self):
            call()
        return list(self.found)

    def run(self, machine, name, blocks, threads, params, buffers, shared, cluster):
        sizes = _sizes(params, buffers)
        key = (self.kind, name, blocks, shared, cluster, self.rows, self.alike, sizes)
        if key not in self._known:
            place = self.kind, name
            if place not in self._codes:
                self._codes[place] = Code(build.ptx(self.kind, self.arch), name, self.code)
            code = self._codes[place]
            unlike = any(kernel in name for kernel in NOT_ALIKE)
            group = blocks if unlike else self._group(blocks, cluster)
            run = functools.partial(
                machine.run, name, blocks, threads, params, buffers, shared=shared,
                cluster=cluster, pace=code.pace, **self.options,
            )  # fmt: skip
            made = run, code, blocks, threads, shared, self.kind
            self._known[key] = scaled(*made, cluster, group)
        self.found.append(self._known[key])

    def _group(self, blocks: int, cluster: int) -> int:
        """Clusters that are counted together: those of a batch row, or fewer of many."""
        clusters = blocks // cluster
        if not self.alike:
            return clusters
        if blocks % self.rows:
            return 1
        of_row = blocks // self.rows
        joined = -(-of_row // cluster)
        return MOST_BLOCKS if joined >= MANY_BLOCKS and self.rows > 1 else joined


def scaled(run, code, blocks, threads, shared, kind, cluster=1, group=MOST_BLOCKS) -> Launch:
    """A launch of which ``run`` runs some clusters: those of two groups, or all if that is few."""
    groups = blocks // cluster / group
    if groups < 3:
        return launch_of(run(), code, blocks, threads, shared, kind)
    one = _numbers(run(clusters=range(group)), code)
    report = run(clusters=range(2 * group))
    two, ran = _numbers(report, code), 2 * group * cluster
    counts = {k: one[k] + (groups - 1) * (two[k] - one[k]) for k in two}
    made = launch_of(report, code, ran, threads, shared, kind)
    return replace(made, blocks=blocks, counts=counts)


def launch_of(report: Report, code: Code, blocks: int, threads: int, shared=0, kind="") -> Launch:
    """A launch whose blocks have all run, with so many bytes of dynamic shared memory."""
    return Launch(
        report.entry.name, kind, code.registers, code.counts(report)[1], blocks, threads,
        report.entry.shared + shared, dict(_numbers(report, code)), report.trips / blocks,
        report.most_trips,
    )  # fmt: skip


def _sizes(params: bytes, buffers) -> tuple[int, ...]:
    """The numbers of a launch's parameters, with 0 for addresses."""
    words = struct.unpack(f"<{len(params) // 8}q", params[: len(params) // 8 * 8])
    spans = [(b.address, b.address + b.data.size) for b in buffers]
    return tuple(0 if any(a <= word <= b for a, b in spans) else word for word in words)


def _numbers(report: Report, code: Code) -> Counter[str]:
    """The counts of a report by name."""
    found, _ = code.counts(report)
    found.update(read=report.read, cold=report.fetched, written=report.written)
    columns = zip(report.entry.opcodes, *report.counts.values(), strict=True)
    for opcode, _, lanes, requests, sectors, conflicts, _ in columns:
        found["sectors"] += int(sectors)
        if requests and not sectors:  # of shared memory
            found["turns"] += max(int(requests), int(lanes) * _width(opcode) / 128) + int(conflicts)
    return found


@functools.cache
def _width(opcode: str) -> int:
    """Bytes of a lane that a load or store moves."""
    bits = BITS.search(opcode)
    count = re.search(r"\.v(\d)\.", opcode)
    element = 16 if bits and bits[0] == "bf16" else int(bits[1] or 32) if bits else 32
    return (int(count[1]) if count else 1) * element // 8


@functools.cache
def _driver(arch: str, code: str) -> Counted:
    return Counted(arch, code)


def kept(key: object, count: Callable[[], list[Launch]]) -> list[Launch]:
    """What was counted, from ``build/`` if that was done before."""
    name = hashlib.sha256(repr((key, *(x.read_text() for x in SOURCES))).encode()).hexdigest()[:24]
    path = build.ROOT / "build" / "gpu-model" / f"{name}.json"
    if not path.exists():
        found = count()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(launch) for launch in found]))
    return [Launch(**fields) for fields in json.loads(path.read_text())]


def launches(problem: Problem, gpu: Gpu, backward: bool = False) -> list[Launch]:
    """The launches of a call, forward or, alone, backward, as they are cut for a GPU."""
    p = problem
    kind = KINDS[p.dtype]
    code = [x.name for x in (build.core(), build.ptx_file(kind, gpu.ptx), library())]
    cut = gpu.ptx, gpu.code, gpu.multiprocessors
    return kept((code, p, cut, backward), lambda: _driver(*cut[:2]).count(p, gpu, backward))


def works(found: list[Launch]) -> list[Work]:
    """Launches as the model of time takes them."""
    made = []
    for launch in found:
        name = Kernel(launch.entry, launch.kind, "", launch.registers, 0, 0).name
        units = dict(launch.counts)
        others = {
            key: units.pop(key, 0) for key in ("turns", "sectors", "waits", "cold", "written")
        }
        others["moved"] = units.pop("read") + others["written"]
        last = launch.most_trips - launch.trips
        cut = launch.blocks, launch.threads // 32, launch.registers, launch.shared
        trips = {"trips": launch.trips, "last_trips": last, "code": launch.code}
        made.append(Work(name, *cut, units, **others, **trips))
    return made
