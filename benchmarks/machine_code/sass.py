"""Counts instructions in the basic blocks of a compiled kernel."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

__all__ = ["Block", "hot"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# Issued to the fma pipe of sm_80 and later; FADD and FMUL are fma there.
FMA = ("FFMA", "FADD", "FMUL", "DFMA", "DADD", "DMUL")
ENDS = ("BRA", "EXIT", "BSYNC", "BRX", "RET")


@dataclass(frozen=True)
class Block:
    """Instructions between two jumps, counted by opcode."""

    counts: Counter[str]

    def count(self, *opcodes: str) -> int:
        """Number of instructions with one of these opcodes, any suffix."""
        return sum(n for name, n in self.counts.items() if name.split(".")[0] in opcodes)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def special(self) -> int:
        """Special-function operations: reciprocals, exponentials, square roots."""
        return self.count("MUFU")

    @property
    def fma(self) -> int:
        return self.count(*FMA)


def _blocks(sass: str) -> list[Block]:
    """The basic blocks of nvdisasm's or cuobjdump's listing."""
    found: list[Block] = []
    counts: Counter[str] = Counter()
    for line in sass.splitlines():
        if re.match(r"^\s*\.L_\w+:", line):
            found.append(Block(counts))
            counts = Counter()
        match = _INSTRUCTION.search(line)
        if match:
            counts[match[1]] += 1
            if match[1].split(".")[0] in ENDS:
                found.append(Block(counts))
                counts = Counter()
    found.append(Block(counts))
    return [block for block in found if block.counts]


def hot(sass: str, exponentials: bool) -> Block | None:
    """The block with most reciprocals, of those with exponentials or of those without."""
    wanted = [
        block
        for block in _blocks(sass)
        if block.counts["MUFU.RCP"] and bool(block.counts["MUFU.EX2"]) == exponentials
    ]
    return max(wanted, key=lambda block: block.counts["MUFU.RCP"], default=None)
