"""The time of a launch from its counts. Modelled, not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from .gpus import ASSUMED, CACHE, LIMITS, PORT_BYTES, SCHEDULERS, SHARED_BYTES, SHUFFLE, Gpu

__all__ = ["Time", "Work", "fits", "in_graph", "modelled", "resident_blocks"]

LANES, SECTOR = 32, 32
UNITS = "fma", "fp64", "alu", "special"  # whose rates a Gpu has by their names
MMA = 2048  # multiply-adds of an mma.m16n8k16
MOVING = ("shared", "port", "L2", "DRAM")
OVERLAP = 3  # 1 would be one after the other, infinity all at once


@dataclass(frozen=True)
class Work:
    """A launch: how it is cut, and what all of its blocks do together.

    Attributes:
        name: of the kernel.
        blocks: of the grid.
        warps: of a block.
        registers: of a thread.
        shared: bytes of a block.
        units: instructions of warps, by unit (``sass.unit_of``).
        turns: of the banks of shared memory.
        sectors: of 32 bytes that loads and stores of global memory ask for.
        moved: distinct bytes read and written.
        written: those written.
        cold: of the sectors read; without what this or an earlier launch of the call wrote.
        waits: of warps for shared memory or a shuffle, one after the other.
        code: bytes of machine code that ran.
        trips: to memory, one after the other, of a block.
        last_trips: more of them, of a block that joins the parts of others.
    """

    name: str
    blocks: int
    warps: int
    registers: int
    shared: int
    units: dict[str, float] = field(default_factory=dict)
    turns: float = 0.0
    sectors: float = 0.0
    moved: float = 0.0
    written: float = 0.0
    cold: float = 0.0
    waits: float = 0.0
    code: float = 0.0
    trips: float = 0.0
    last_trips: float = 0.0

    @property
    def instructions(self) -> float:
        """Of warps, all units."""
        return sum(self.units.values())


@dataclass(frozen=True)
class Time:
    """What a launch takes, modelled.

    Attributes:
        parts: seconds that each resource alone would take.
        dependent: seconds that a block takes for one instruction after the other.
        roof: seconds that the bytes take at the bandwidth of the data sheet, or the operations on
            all multiprocessors, whichever is longer.
    """

    parts: dict[str, float]
    roof: float
    dependent: float = 0.0

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def seconds(self) -> float:
        """Of the kernel without its launch: computing, moving and waiting overlap in part.

        A warp's own instructions do not overlap with what it waits for. With many warps they are
        part of what the multiprocessor computes, and count once.
        """
        moving = max(self.parts[name] for name in MOVING)
        waiting = self.parts["latency"]
        computing = max(s for name, s in self.parts.items() if name not in (*MOVING, "latency"))
        alone = _together(moving, waiting + self.dependent)
        return max(alone, _together(moving, waiting, computing))


def _together(*seconds: float) -> float:
    return sum(s**OVERLAP for s in seconds) ** (1 / OVERLAP)


def in_graph(gpu: Gpu, works: list[Work], in_l2: bool = False) -> float:
    """Seconds that the launches of a call take in a CUDA graph, one after the other."""
    in_l2 = in_l2 and fits(gpu, works)
    return sum(modelled(gpu, work, in_l2).seconds + ASSUMED.launch * 1e-6 for work in works)


def fits(gpu: Gpu, works: list[Work]) -> bool:
    """Whether the L2 holds all that the launches of a call read and write."""
    return sum(work.moved for work in works) <= gpu.l2_mb * 1e6


def resident_blocks(gpu: Gpu, warps: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at a time; 0 if not even one fits.

    Args:
        gpu: whose limits hold.
        warps: of a block.
        registers: of a thread; they are given to warps by 256, out of a quarter of the file each.
        shared: bytes of a block, given by 128.
    """
    limits = LIMITS[gpu.code]
    of_warp = math.ceil(max(registers, 1) * LANES / 256) * 256
    by_registers = limits.registers // SCHEDULERS // of_warp * SCHEDULERS // warps
    by_shared = limits.shared // (math.ceil((shared + limits.reserved) / 128) * 128)
    return min(by_registers, by_shared, limits.warps // warps, limits.blocks)


def modelled(gpu: Gpu, work: Work, in_l2: bool = False) -> Time:
    """The time of a launch on a GPU.

    Each resource takes as long as it would alone; :attr:`Time.seconds` puts them together. How much
    a load under load takes longer depends on the time itself, which is found in a few steps.

    Args:
        gpu: with its rates.
        work: of the launch.
        in_l2: the L2 holds all that is read and written; else nothing that the call was given.
    """
    if in_l2:
        work = replace(work, cold=0.0)
    time = _modelled(gpu, work, in_l2, 1.0)
    for _ in range(20):
        share = min(1.0, time.parts["DRAM"] / time.seconds) if time.seconds else 0.0
        time = _modelled(gpu, work, in_l2, 1 + ASSUMED.loaded * share)
    return time


def _modelled(gpu: Gpu, work: Work, in_l2: bool, loaded: float) -> Time:
    resident = resident_blocks(gpu, work.warps, work.registers, work.shared)
    if resident == 0:
        raise ValueError(f"{work.name} must fit on a multiprocessor, got {work}")
    busiest = math.ceil(work.blocks / gpu.multiprocessors)
    waves = math.ceil(busiest / resident)
    share = busiest / work.blocks / (gpu.clock * 1e9)  # of that multiprocessor, and clocks
    bytes_asked = work.sectors * SECTOR
    units = {name: work.units.get(name, 0) * LANES / getattr(gpu, name) for name in UNITS}
    units["warp"] = work.units.get("warp", 0) * LANES / SHUFFLE
    units["tensor"] = work.units.get("tensor", 0) * MMA / gpu.tensor
    parts = {name: clocks * share for name, clocks in units.items()}
    parts["issue"] = work.instructions / SCHEDULERS * share
    parts["shared"] = work.turns * LANES * 4 / SHARED_BYTES * share
    parts["port"] = bytes_asked / PORT_BYTES * share
    parts["L2"] = bytes_asked / (gpu.l2 * 1e12)
    to_dram = 0.0 if in_l2 else work.cold + work.written
    parts["DRAM"] = to_dram / (gpu.dram * 1e12 * ASSUMED.dram_share)
    parts["latency"] = _in_turn(gpu, work, waves, loaded)
    of_warp = work.instructions / work.blocks / work.warps
    dependent = waves * of_warp * ASSUMED.dependent / (gpu.clock * 1e9)
    everywhere = gpu.multiprocessors * gpu.clock * 1e9
    roof = max(work.moved / (gpu.dram * 1e12), max(units.values()) / everywhere)
    return Time(parts, roof, dependent)


def _in_turn(gpu: Gpu, work: Work, waves: int, loaded: float) -> float:
    """What a block waits for, one after the other, wave by wave; what the last block adds; and its
    code, which the first wave meets cold."""
    asked = work.sectors * SECTOR - work.written  # by loads
    first = work.cold / max(asked, work.cold, 1.0)  # share of loads that go to DRAM
    trip = (first * gpu.dram_cycles + (1 - first) * gpu.l2_cycles) * loaded
    warps = work.blocks * work.warps
    waits = work.waits * ASSUMED.wait + work.units.get("barrier", 0) * ASSUMED.barrier
    waits += work.units.get("cluster", 0) * ASSUMED.cluster
    block = work.trips * trip + waits / warps
    last = work.last_trips * gpu.l2_cycles * loaded
    fetched = max(0.0, work.code - CACHE) * ASSUMED.fetch
    return (waves * block + last + fetched) / (gpu.clock * 1e9)
