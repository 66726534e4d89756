"""The machine code that ptxas makes of an entry, laid over the PTX that runs.

nvcc's ``.loc`` are replaced by one for each line of PTX, so that the disassembler names the line of
PTX that an instruction of machine code is of. How often that runs follows from how often its PTX
ran; of a loop that ptxas unrolls, blocks with most copies take all the turns they can.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from machine import build
from machine.launch import Report
from machine.parse import Module

from benchmarks.machine_code import reported

# Units by the beginning of an opcode (Programming Guide: throughput of native instructions), the
# first that fits; the rest are integer and logic ("alu").
UNITS = {
    "fma": "FFMA FADD FMUL HFMA HADD HMUL IMAD", "fp64": "DFMA DADD DMUL DSETP",
    "special": "MUFU I2F. F2I F2F. FLO POPC BREV", "tensor": "HMMA HGMMA",
    "load": "LD ULDC", "store": "ST", "atomic": "ATOM RED. REDG", "warp": "SHFL REDUX",
    "cluster": "UCGABAR_WAIT", "barrier": "BAR",
    "branch": "BRA EXIT BSSY BSYNC CALL RET WARPSYNC BRX",
}  # fmt: skip
# Neither merged nor made of several in the place of one: by these copies are counted.
_ANCHOR = re.compile(r"(LD|ST)[GSL]?\b|LDGSTS|ATOM|RED|MUFU|SHFL|HMMA|HGMMA|BAR\.SYNC|UCGABAR")
_NEAR = re.compile(r"LDS|SHFL|ATOMS|REDUX")  # shared memory and other lanes
_FAR = re.compile(r"LDG\b|LD\.|ATOMG?\b")  # global memory
_LINE = re.compile(
    r'//## File "k.ptx", line (\d+)|^([.$]\S+):|'
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)


class Instr(NamedTuple):
    """One of machine code: the instruction of PTX that it is of (-1: none), registers."""

    opcode: str
    at: int
    written: range
    read: list[int]
    called: str

    @classmethod
    def parsed(cls, opcode: str, operands: str, at: int) -> Instr:
        first = None if opcode.startswith("ST") else re.match(r"(?:U?P\w+,\s*)?R(\d+)", operands)
        size = re.search(r"\.(64|128)\b", opcode)
        start, count = (int(first[1]), int(size[1]) // 32 if size else 1) if first else (0, 0)
        read = [int(number) for number in re.findall(r"\bR(\d+)", operands)[bool(first) :]]
        called = re.search(r"\((\$\S+)\)", operands)
        return cls(opcode, at, range(start, start + count), read, called[1] if called else "")


@dataclass
class Block:
    """Instructions between two labels or branches; what they are copies of, and how many; whether
    they are for what does not happen: lanes gone apart, a cluster of one."""

    code: list[Instr] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    cold: bool = False

    def waits(self, pending: re.Pattern[str], turns: int) -> tuple[int, dict[int, int]]:
        """In the last of some turns, how often it waits for what is pending, one after the other,
        and how often since a barrier before each that it asks for."""
        level, first, under_way, before = 0, 0, {}, {}
        for _ in range(turns):
            start, first, before = level, level, {}
            for opcode, at, written, read, _ in self.code:
                start = level if opcode.startswith("BAR.") else start
                level = max([level, *(under_way.get(number, 0) for number in read)])
                asks = pending.match(opcode)
                under_way |= dict.fromkeys(written, level + 1 if asks else 0)
                if asks:
                    before.setdefault(at, level - start)
        return level - first, before


class Code:
    """What ptxas makes for ``arch`` of an entry of PTX; ``pace`` is for ``Machine.run``."""

    def __init__(self, text: str, name: str, arch: str):
        module = Module(text)
        self.entry = module.entry(name)
        listing = build.machine_code(module.numbered(name), arch)
        self.registers = reported("", listing)[0].registers
        run = [row.split() for row in self.entry.text.splitlines() if row.startswith("run")]
        branches = {at: int(row[4]) for at, row in enumerate(run) if row[3].startswith("bra")}
        self.loops = {at: target for at, target in branches.items() if target <= at}
        starts = {*branches.values(), *(at + 1 for at in branches)}
        self._functions: dict[str, Counter[str]] = {}
        self.blocks = self._read(listing)
        self._count_copies(np.cumsum([at in starts for at in range(len(run))]).tolist())
        self.pace = self._pace()

    def _read(self, listing: str) -> list[Block]:
        of_line = {line: at for at, line in reversed([*enumerate(self.entry.lines)])}
        blocks, at, function = [Block()], -1, ""
        for row in listing.splitlines():
            found = _LINE.search(row)
            line, label, opcode, operands = found.groups() if found else (None,) * 4
            at = of_line.get(int(line), -1) if line else at
            if label:
                blocks.append(Block())
                function = label if label.startswith("$") else function
            elif opcode in (None, "NOP"):
                continue
            elif function:
                self._functions.setdefault(function, Counter())[unit_of(opcode)] += 1
            else:
                blocks[-1].code.append(Instr.parsed(opcode, operands, at))
                alone = opcode.startswith("BAR.") and "cluster" in self.entry.opcodes[at]
                blocks[-1].cold |= "COLLECTIVE" in opcode or alone
                if opcode.startswith(("BRA", "EXIT", "BRX", "RET")):
                    blocks.append(Block())
        return [block for block in blocks if block.code]

    def _count_copies(self, of: list[int]) -> None:
        """Those of each block, given the block of PTX of each of its instructions."""
        seen = [
            [(bool(_ANCHOR.match(i.opcode)), i.at) for i in block.code
             if i.at >= 0 and not block.cold and not i.opcode.startswith("BRA")]
            for block in self.blocks
        ]  # fmt: skip
        anchored = {of[at] for lines in seen for anchor, at in lines if anchor}
        for block, lines in zip(self.blocks, seen, strict=True):
            block.copies = dict(Counter(at for anchor, at in lines if anchor))
            if not block.copies:  # plain arithmetic
                own = Counter(at for _, at in lines if of[at] not in anchored)
                block.copies = dict.fromkeys(own, min(own.values(), default=1))

    def _pace(self) -> np.ndarray:
        pace = np.zeros(len(self.entry.opcodes), np.uint32)
        pace[list(self.loops)] = 1
        for block in self.blocks:
            copies, (waits, _) = max(block.copies.values(), default=1), block.waits(_FAR, 2)
            before = block.waits(_FAR, 1)[1]
            for opcode, at, *_ in block.code:
                if opcode.startswith(("BRA", "BRX")):
                    turns = copies // max(waits, 1) if at in self.loops else 1
                    pace[at] = max(pace[at], turns, 1)
                elif at in before and copies == 1 and _FAR.match(opcode):
                    pace[at] = before[at]
        return pace

    def runs(self, report: Report) -> list[float]:
        """How often each block ran: as often as the copies in it that ran most; if it has none, as
        what is in it and ran least, for the rest was moved there."""
        runs, taken = (report.counts[name].astype(float) for name in ("runs", "taken"))
        places, ran = {}, [0.0] * len(self.blocks)
        for number, block in enumerate(self.blocks):
            for at in block.copies:
                places.setdefault(at, []).append(number)
            if not (block.copies or block.cold):
                ran[number] = min((runs[i.at] for i in block.code if i.at >= 0), default=0.0)
        for at, numbers in places.items():
            left, entered = runs[at], self._entered(at, runs, taken)
            sizes = Counter(self.blocks[number].copies[at] for number in numbers)
            for size, same in sorted(sizes.items(), reverse=True):
                turns = left / size
                if size > min(sizes) and entered:
                    turns = entered * (left / entered // size)
                left -= turns * size
                for number in numbers:
                    if self.blocks[number].copies[at] == size:
                        ran[number] = max(ran[number], turns / same)
        return ran

    def _entered(self, at: int, runs: np.ndarray, taken: np.ndarray) -> float:
        """How often the loop around an instruction was entered on the way to it."""
        around = [(end - to, to) for end, to in self.loops.items() if to <= at <= end]
        to = min(around)[1] if around else at
        back = sum(taken[end] for end, target in self.loops.items() if target == to and around)
        return max(runs[to] - back, 1.0) * runs[at] / max(runs[to], 1.0)

    def counts(self, report: Report) -> tuple[Counter[str], int]:
        """Instructions by unit, and "waits", one by one, for _NEAR; bytes of the code that ran."""
        found: Counter[str] = Counter()
        ran = zip(self.blocks, self.runs(report), strict=True)
        for block, runs in (some := [(block, runs) for block, runs in ran if runs]):
            found["waits"] += runs * block.waits(_NEAR, 2)[0]
            for i in block.code:
                found[unit_of(i.opcode)] += runs
                for unit, count in self._functions.get(i.called, {}).items():
                    found[unit] += runs * count * ("slowpath" not in i.called)
        return found, sum(16 * len(block.code) for block, _ in some)


@functools.cache
def unit_of(opcode: str) -> str:
    """The unit that runs an opcode: a key of UNITS, or "alu"."""
    whole = f"{opcode}."
    return next((unit for unit, of in UNITS.items() if whole.startswith(tuple(of.split()))), "alu")
