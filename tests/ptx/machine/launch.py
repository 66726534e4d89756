"""Runs entries on the core, and says what they did."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import build
from .parse import Entry, Module, PtxError

__all__ = ["Buffer", "Machine", "Order", "Report"]

COUNTS = ("runs", "lanes", "requests", "sectors", "conflicts", "taken")


class Buffer:
    """Global memory that a launch may touch.

    Args:
        name: as messages give it.
        data: its bytes, changed in place.
        known: zero where nothing was written yet (an array of uint8, kept from launch to launch);
            None if all of it was.
        hot: the L2 holds what is read of it: an earlier launch or this one has written it.
    """

    def __init__(
        self, name: str, data: np.ndarray, known: np.ndarray | None = None, hot: bool = False
    ):
        self.name, self.known, self.hot = name, known, hot
        self.data = data.reshape(-1).view(np.uint8)

    @property
    def address(self) -> int:
        """Where the kernel finds it, which is where it is."""
        return self.data.ctypes.data

    def fields(self) -> tuple[bytes, int, int, int | None, bool]:
        """Those of ``_Buffer``."""
        known = None if self.known is None else self.known.ctypes.data
        return self.name.encode(), self.address, self.data.size, known, self.hot


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("known", ctypes.c_void_p),
        ("hot", ctypes.c_uint64),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 2),
        ("block_threads", ctypes.c_uint32),
        ("cluster_size", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("params_bytes", ctypes.c_uint64),
        ("params", ctypes.c_char_p),
        ("buffers_count", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("clusters", ctypes.c_void_p),
        ("clusters_count", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("counts", ctypes.c_int32),
        ("checks_races", ctypes.c_int32),
        ("lanes_clash", ctypes.c_int32),
        ("share", ctypes.c_double),
        ("fuel", ctypes.c_uint64),
        ("pace", ctypes.c_void_p),
        ("of_instr", ctypes.c_void_p),
        ("distinct_read", ctypes.c_uint64),
        ("distinct_written", ctypes.c_uint64),
        ("fetched", ctypes.c_uint64),
        ("trips", ctypes.c_uint64),
        ("most_trips", ctypes.c_uint64),
    ]


@functools.cache
def _core() -> ctypes.CDLL:
    core = ctypes.CDLL(str(build.core()))
    core.ptx_load.restype = ctypes.c_void_p
    core.ptx_load.argtypes = [ctypes.c_char_p]
    core.ptx_message.restype = ctypes.c_char_p
    core.ptx_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Arguments)]
    return core


class Order:
    """In which order blocks, and the warps of a block, take turns."""

    GIVEN, BACKWARDS, RANDOM = range(3)


@dataclass
class Report:
    """What a launch did.

    Attributes:
        entry: that ran.
        counts: by instruction, an array for each of COUNTS.
        races: two accesses that nothing orders, at least one a write: who, where, and both
            instructions.
        read: distinct bytes of global memory read.
        written: the same, written.
        fetched: bytes of the sectors of 32 bytes read, without hot buffers.
        trips: how often a block waits for global memory, the sum of all blocks; loads between two
            branches or barriers that do not depend on each other share a trip.
        most_trips: of one block.
    """

    entry: Entry
    counts: dict[str, np.ndarray]
    races: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0
    fetched: int = 0
    trips: int = 0
    most_trips: int = 0


_loaded: dict[str, int] = {}  # programs of the core by their text


class Machine:
    """Runs the entries of a module.

    Args:
        text: PTX.
    """

    def __init__(self, text: str):
        self.module = Module(text)

    def _load(self, name: str) -> int:
        text = self.module.entry(name).text
        if text not in _loaded:
            program = _core().ptx_load(text.encode())
            if not program:
                raise PtxError(f"{_core().ptx_message().decode()} in {name}")
            _loaded[text] = program
        return _loaded[text]

    def run(
        self,
        name: str,
        grid: int | Sequence[int],
        threads: int,
        params: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        shared: int = 0,
        cluster: int = 1,
        order: int = Order.GIVEN,
        seed: int = 0,
        counts: bool = False,
        races: bool = True,
        lanes_clash: bool = False,
        share: float = 1.0,
        fuel: int = 2_000_000_000,
        clusters: Sequence[int] | None = None,
        pace: np.ndarray | None = None,
    ) -> Report:
        """One launch.

        Args:
            name: of the entry.
            grid: blocks, in each of up to two directions.
            threads: of a block.
            params: the bytes of all parameters.
            buffers: all of global memory.
            shared: bytes of dynamic shared memory.
            cluster: blocks of a cluster.
            order: of blocks and warps, see Order.
            seed: of approximations and of a random order.
            counts: also count sectors, bank conflicts and trips to memory.
            races: look for races.
            lanes_clash: lanes of a warp may store to one place with one instruction: one wins.
            share: how much of the error that PTX allows approximations they may have.
            fuel: instructions of warps after which the kernel is said not to end.
            clusters: numbers of those that run; all unless given.
            pace: of each instruction (uint32), how it waits for memory in the machine code
                (``gpu_model.sass``); unless given, as the PTX stands.

        Raises:
            PtxError: the launch does not fit, or the kernel did something that it must not do.
        """
        program, entry = self._load(name), self.module.entry(name)
        if len(params) != entry.params:
            raise PtxError(f"{name} takes {entry.params} bytes of parameters, got {len(params)}")
        across, down, deep = (*np.atleast_1d(grid).tolist(), 1, 1)[:3]
        if deep != 1:
            raise PtxError(f"grid must have at most two directions, got {grid}")
        blocks = across * down
        if blocks % cluster:
            raise PtxError(f"{blocks} blocks are no whole clusters of {cluster}")
        turns = np.array(range(blocks // cluster) if clusters is None else clusters, np.uint32)
        if order == Order.BACKWARDS:
            turns = turns[::-1].copy()
        elif order == Order.RANDOM:
            np.random.default_rng(seed).shuffle(turns)
        held = sorted((b for b in buffers if b.data.size), key=lambda b: b.address)
        of_instr = np.zeros((len(entry.opcodes), len(COUNTS)), np.uint64)
        arguments = _Arguments(
            grid=(across, down),
            block_threads=threads,
            cluster_size=cluster,
            shared_bytes=entry.shared + shared,
            params_bytes=len(params),
            params=params,
            buffers_count=len(held),
            buffers=(_Buffer * len(held))(*(b.fields() for b in held)),
            clusters=turns.ctypes.data,
            clusters_count=len(turns),
            order=order,
            seed=seed,
            counts=counts,
            checks_races=races,
            lanes_clash=lanes_clash,
            share=share,
            fuel=fuel,
            pace=None if pace is None else pace.ctypes.data,
            of_instr=of_instr.ctypes.data,
        )
        _core().ptx_run(program, ctypes.byref(arguments))
        columns = dict(zip(COUNTS, of_instr.T, strict=True))
        found = arguments.distinct_read, arguments.distinct_written, arguments.fetched
        report = Report(entry, columns, [], *found, arguments.trips, arguments.most_trips)
        for line in _core().ptx_message().decode().splitlines():
            self._said(entry, line, report)
        return report

    @staticmethod
    def _said(entry: Entry, line: str, report: Report) -> None:
        what, rest = line.split(" ", 1)
        if what == "race":
            first, second, text = rest.split(" ", 2)
            places = f"{entry.where(int(first))}\n  {entry.where(int(second))}"
            report.races.append(f"race: {text}\n  {places}")
        elif what == "fault":
            pc, text = rest.split(" ", 1)
            raise PtxError(f"{entry.name}: {text}\n  {entry.where(int(pc))}")
        else:
            raise PtxError(f"{entry.name}: {rest}")
