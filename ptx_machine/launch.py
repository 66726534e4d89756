"""Runs entries on the core, and says what they did."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .built import built
from .parse import Entry, Module, PtxError

CORE = Path(__file__).resolve().parent / "core"


class Buffer:
    """Global memory that a launch may touch.

    Args:
        name: as messages give it.
        data: its bytes, changed in place.
        known: zero where nothing was written yet (an array of uint8, kept from launch to launch);
            None if all of it was.
    """

    def __init__(self, name: str, data: np.ndarray, known: np.ndarray | None = None):
        self.name, self.known = name, known
        self.data = data.reshape(-1).view(np.uint8)

    @property
    def address(self) -> int:
        """Where the kernel finds it, which is where it is."""
        return self.data.ctypes.data

    def fields(self) -> tuple[bytes, int, int, int | None]:
        """Those of ``_Buffer``."""
        known = None if self.known is None else self.known.ctypes.data
        return self.name.encode(), self.address, self.data.size, known


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("known", ctypes.c_void_p),
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
        ("clusters", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("lanes_clash", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("fuel", ctypes.c_uint64),
    ]


@functools.cache
def _core() -> ctypes.CDLL:
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-frounding-math"]
    command = ["g++", *flags, "-fPIC", "-shared", "-Wall", "-Wextra", str(CORE / "machine.cpp")]
    files = sorted(path for path in CORE.rglob("*") if path.is_file())
    core = ctypes.CDLL(str(built("ptx/machine.so", files, command)))
    core.ptx_load.restype = ctypes.c_void_p
    core.ptx_load.argtypes = [ctypes.c_char_p]
    core.ptx_message.restype = ctypes.c_char_p
    core.ptx_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Arguments)]
    return core


class Order:
    """In which order blocks, and the warps of a block, take turns.

    Blocks that are there at once go on until they wait for others; if RANDOM, in turns of random
    length.
    """

    GIVEN, BACKWARDS, RANDOM = range(3)


_loaded: dict[str, int] = {}  # programs of the core by their text


class Machine:
    """Runs the entries of a module.

    Args:
        text: PTX.

    Attributes:
        instructions: of warps, that the last launch took.
    """

    def __init__(self, text: str):
        self.module, self.instructions = Module(text), 0

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
        lanes_clash: bool = False,
        cooperative: bool = False,
        fuel: int = 2_000_000_000,
    ) -> list[str]:
        """One launch; its races.

        A race is two accesses that nothing orders, at least one a write: who, where, and both
        instructions.

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
            lanes_clash: lanes of a warp may store to one place with one instruction: one wins.
            cooperative: all blocks are there at once.
            fuel: instructions of warps after which the kernel is said not to end.

        Raises:
            PtxError: the launch does not fit, or the kernel did something that it must not do.
        """
        program, entry = self._load(name), self.module.entry(name)
        if len(params) != entry.params:
            raise PtxError(f"{name} takes {entry.params} bytes of parameters, got {len(params)}")
        across, down = (*np.atleast_1d(grid).tolist(), 1)[:2]
        held = sorted((b for b in buffers if b.data.size), key=lambda b: b.address)
        arguments = _Arguments(
            grid=(across, down),
            block_threads=threads,
            cluster_size=cluster,
            shared_bytes=entry.shared + shared,
            params_bytes=len(params),
            params=params,
            buffers_count=len(held),
            buffers=(_Buffer * len(held))(*(b.fields() for b in held)),
            clusters=across * down // cluster,
            order=order,
            seed=seed,
            lanes_clash=lanes_clash,
            cooperative=cooperative,
            fuel=fuel,
        )
        _core().ptx_run(program, ctypes.byref(arguments))
        self.instructions = fuel - arguments.fuel
        said = _core().ptx_message().decode().splitlines()
        return [self._race(entry, *line.split(" ", 1)) for line in said]

    @staticmethod
    def _race(entry: Entry, what: str, rest: str) -> str:
        """A race in words; what else the core says is raised."""
        if what == "race":
            first, second, text = rest.split(" ", 2)
            places = f"{entry.where(int(first))}\n  {entry.where(int(second))}"
            return f"race: {text}\n  {places}"
        if what == "fault":
            pc, rest = rest.split(" ", 1)
            rest = f"{rest}\n  {entry.where(int(pc))}"
        raise PtxError(f"{entry.name}: {rest}")
