"""The time of a launch from its counts. Modelled, not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .gpus import ASSUMED, LIMITS, PORT_BYTES, SCHEDULERS, SHARED_BYTES, SHUFFLE, Gpu

__all__ = ["Time", "Work", "modelled", "resident_blocks"]

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
        units: instructions of warps, by unit (``machine.launch.unit_of``).
        turns: of the banks of shared memory.
        sectors: of 32 bytes that loads and stores of global memory ask for.
        moved: distinct bytes read and written.
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
        roof: seconds that the bytes take at the bandwidth of the data sheet, or the operations on
            all multiprocessors, whichever is longer.
    """

    parts: dict[str, float]
    roof: float

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def seconds(self) -> float:
        """Of the kernel without its launch: computing, moving and waiting overlap in part."""
        moving = max(self.parts[name] for name in MOVING)
        waiting = self.parts["latency"]
        computing = max(s for name, s in self.parts.items() if name not in (*MOVING, "latency"))
        return (moving**OVERLAP + waiting**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP)


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


def modelled(gpu: Gpu, work: Work) -> Time:
    """The time of a launch on a GPU whose caches hold nothing of its inputs.

    Each resource takes as long as it would alone; :attr:`Time.seconds` puts them together.
    """
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
    parts["DRAM"] = work.moved / (gpu.dram * 1e12 * ASSUMED.dram_share)
    parts["latency"] = _in_turn(gpu, work, waves)
    everywhere = gpu.multiprocessors * gpu.clock * 1e9
    roof = max(work.moved / (gpu.dram * 1e12), max(units.values()) / everywhere)
    return Time(parts, roof)


def _in_turn(gpu: Gpu, work: Work, waves: int) -> float:
    """What a block does one thing after the other, wave by wave, and what the last block adds."""
    asked = work.sectors * SECTOR
    first = min(1.0, work.moved / asked) if asked else 0.0  # share of loads that go to DRAM
    trip = (first * gpu.dram_cycles + (1 - first) * gpu.l2_cycles) * ASSUMED.loaded
    of_warp = work.instructions / work.blocks / work.warps
    barriers = work.units.get("barrier", 0) / work.blocks / work.warps
    block = work.trips * trip + of_warp * ASSUMED.dependent + barriers * ASSUMED.barrier
    last = work.last_trips * gpu.l2_cycles * ASSUMED.loaded
    return (waves * block + last) / (gpu.clock * 1e9)
