"""PTX text as the core takes it: registers are places in a register file, labels are numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KINDS = {"pred": 1, "b16": 2, "b32": 4, "b64": 8}
KINDS |= {kind: 2 for kind in ("u16", "s16", "f16", "bf16", "b8", "u8", "s8")}
KINDS |= {kind: 4 for kind in ("u32", "s32", "f32", "f16x2", "bf16x2")}
KINDS |= {kind: 8 for kind in ("u64", "s64", "f64")}
LANES = 32
CONSTANT_BYTES = 512  # kConstantBytes of core/program.h
PARAM, SHARED = 4096, 1024  # kParam and kShared of core/memory.h


class PtxError(Exception):
    """PTX that is not understood, or a mistake that it made while it ran."""


@dataclass
class Entry:
    """One kernel.

    Attributes:
        name: mangled.
        text: for ``ptx_load`` of core/machine.cpp.
        opcodes: by number of the instruction, as are
        lines: in the PTX, and
        places: in the source, innermost first, as "file:line".
        params: bytes of the parameters.
        shared: bytes of shared memory whose size is in the PTX.
    """

    name: str
    text: str = ""
    opcodes: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    params: int = 0
    shared: int = 0

    def where(self, pc: int) -> str:
        """An instruction as messages name it."""
        place = f" ({self.places[pc]})" if self.places[pc] else ""
        return f"PTX line {self.lines[pc]}, {self.opcodes[pc]}{place}"


_ENTRY = re.compile(r"^\.(?:visible\s+|weak\s+)?(?:\.?)entry\s+(\S+?)\s*\(", re.MULTILINE)
_VARIABLE = re.compile(
    r"\.(shared|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$.]+)(?:\[(\d*)\])?"
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")


class Module:
    """A PTX file, whose entries are read when they are asked for.

    Args:
        text: the PTX.
    """

    def __init__(self, text: str):
        self._lines = text.splitlines()
        self._files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
        self._at: dict[str, int] = {}
        for number, line in enumerate(self._lines):
            found = _ENTRY.match(line)
            if found:
                self._at[found[1]] = number
        first = min(self._at.values(), default=0)
        self._head = [line for line in self._lines[:first] if ".shared" in line]
        self._read: dict[str, Entry] = {}

    @property
    def names(self) -> list[str]:
        """Of the entries."""
        return list(self._at)

    def entry(self, name: str) -> Entry:
        """An entry by its name; PtxError if it is not understood."""
        if name not in self._read:
            at = self._at[name]
            end = min((x for x in self._at.values() if x > at), default=len(self._lines))
            # Modules that differ in other entries share what was read of this one.
            key = at, "\n".join([*self._head, *self._lines[at:end], *self._files.values()])
            if key not in _known:
                _known[key] = _Reader(self._lines, at, self._head, self._files).entry
            self._read[name] = _known[key]
        return self._read[name]


_known: dict[tuple[int, str], Entry] = {}


def _split(text: str) -> list[str]:
    """Operands, at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def _number(text: str) -> int | None:
    """The bits of a literal; None if it is none."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0) & (2**64 - 1)
    return None


class _Reader:
    def __init__(self, lines: list[str], at: int, head: list[str], files: dict[str, str]):
        self.entry = Entry(_ENTRY.match(lines[at])[1])  # type: ignore[index]
        self.files = files
        self.bytes = 8  # of registers; the first 8 are nobody's
        self.scopes: list[dict[str, str]] = []  # register or prefix -> kind
        self.slots: dict[str, tuple[int, int]] = {}
        self.constants: dict[int, int] = {}
        self.symbols: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str, str, list[str]]] = []  # guard, opcode, operands
        self.serial = 0
        for line in head:
            self._variable(line)
        self._statements(lines, at)
        run = [self._instruction(*parts) for parts in self.code]
        constants = [f"constant {slot} {value}" for value, slot in self.constants.items()]
        specials = [
            f"special {slot} {name[1:]}" for name, (slot, _) in self.slots.items() if name[0] == "%"
        ]
        memory = f"bytes {self.bytes}"
        self.entry.text = "\n".join([memory, *constants, *specials, *run])

    # ---- statements ------------------------------------------------------------------------------

    def _statements(self, lines: list[str], at: int) -> None:
        """From the entry's line to the brace that closes it."""
        number, place, pending = at, "", ""
        header = True
        while True:
            rest = lines[number].split("//")[0].strip()
            if header:
                for declared in re.findall(r"\.param[^,()]*", rest):
                    self._variable(declared)
                header = not rest.startswith("{")
            if rest.startswith(".loc"):
                place = self._place(rest)
                rest = ""
            while rest and not header:
                if not pending and rest[0] == "{":
                    self.scopes.append({})
                    rest = rest[1:].strip()
                elif not pending and rest[0] == "}":
                    self.scopes.pop()
                    rest = rest[1:].strip()
                    if not self.scopes:
                        return
                elif not pending and (label := re.match(r"([\w$]+):(?!:)\s*", rest)):
                    self.labels[self._scoped(label[1])] = len(self.code)
                    rest = rest[label.end() :]
                else:
                    statement, end, rest = rest.partition(";")
                    pending += " " + statement
                    rest = rest.strip()
                    if end:
                        self._statement(pending.strip(), number + 1, place)
                        pending = ""
            number += 1

    def _scoped(self, label: str) -> str:
        return label if label.startswith("$") else f"{len(self.scopes)}:{label}"

    def _place(self, line: str) -> str:
        found = _LOC.match(line)
        if found is None:
            return ""

        def name(file: str, row: str) -> str:
            return f"{self.files.get(file, file).rsplit('/', 1)[-1]}:{row}"

        inner = name(found[1], found[2])
        return f"{inner} in {name(found[3], found[4])}" if found[3] else inner

    def _variable(self, line: str) -> None:
        found = _VARIABLE.search(line)
        if found is None:
            raise PtxError(f"unknown declaration: {line}")
        space, align, kind, name, count = found.groups()
        step = int(align or 1)
        size = KINDS.get(kind, 1) if kind not in ("b8", "u8", "s8") else 1
        size *= int(count or (0 if "[" in line else 1))
        if space == "shared":
            at = -(-self.entry.shared // step) * step
            self.symbols[name] = SHARED + at
            self.entry.shared = at + size
        else:
            step = max(step, size if "[" not in line else 1)
            at = -(-self.entry.params // step) * step
            self.symbols[name] = PARAM + at
            self.entry.params = at + size

    def _statement(self, text: str, number: int, place: str) -> None:
        if text.startswith(".reg"):
            kind, names = text.split(None, 2)[1:]
            for name in names.split(","):
                self.scopes[-1][name.strip().split("<")[0]] = kind.lstrip(".")
            self.serial += 1
            self.scopes[-1].setdefault("", str(self.serial))
        elif text.startswith((".shared", ".local")):
            self._variable(text)
        elif not text.startswith("."):
            guard = ""
            if text.startswith("@"):
                guard, text = text[1:].split(None, 1)
            opcode, _, operands = text.partition(" ")
            opcode, _, more = opcode.partition("\t")
            parts = _split((more + " " + operands).strip())
            resolved = [self._resolve(part, opcode) for part in parts]
            self.code.append((self._name(guard), opcode, resolved))
            self.entry.opcodes.append(opcode)
            self.entry.lines.append(number)
            self.entry.places.append(place)

    # ---- operands: names are resolved where they stand, places given afterwards -----------------

    def _resolve(self, operand: str, opcode: str) -> str:
        if opcode.split(".", maxsplit=1)[0] == "bra":
            return self._scoped(operand)
        return re.sub(r"%[\w.$]+|(?<![\w.%$])[A-Za-z_$][\w$]*", lambda m: self._name(m[0]), operand)

    def _name(self, name: str) -> str:
        """A register with its kind and scope: "r7@3:b32"; others as they are."""
        if name.startswith("!"):
            return "!" + self._name(name[1:])
        for scope in reversed(self.scopes):
            prefix = name.rstrip("0123456789")
            for key in (name, prefix):
                if key in scope and key:
                    return f"{name}@{scope['']}:{scope[key]}"
        return name

    def _place_of(self, name: str, kind: str, size: int) -> tuple[int, int]:
        if name not in self.slots:
            if kind not in KINDS:
                raise PtxError(f"unknown kind of register: .{kind}")
            self.slots[name] = (self.bytes, size)
            self.bytes += 8 if size == 1 else size * LANES
        return self.slots[name]

    def _constant(self, value: int) -> tuple[int, int]:
        if value not in self.constants:
            self.bytes = -(-self.bytes // 8) * 8
            self.constants[value] = self.bytes
            self.bytes += CONSTANT_BYTES
        return self.constants[value], 0

    def _operand(self, text: str) -> tuple[int, int]:
        text = text.strip()
        if "@" in text:
            name, kind = text.split(":")
            return self._place_of(name.replace("%", ""), kind, KINDS.get(kind, 0))
        if text == "_":
            return self._place_of("_", "b64", 8)
        value = _number(text)
        if value is not None:
            return self._constant(value)
        if text.startswith("%"):
            return self._place_of(text, "b32", 4)
        symbol, _, offset = text.partition("+")
        if symbol.strip() in self.symbols:
            return self._constant(self.symbols[symbol.strip()] + int(offset or "0", 0))
        raise PtxError(f"unknown operand: {text}")

    def _instruction(self, guard: str, opcode: str, operands: list[str]) -> str:
        base = opcode.split(".", maxsplit=1)[0]
        places, offsets = [], [0, 0]
        if base == "bra":
            if operands[0] not in self.labels:
                raise PtxError(f"unknown label: {operands[0]}")
            offsets[0] = self.labels[operands[0]]
            operands = []
        addresses = 0
        for operand in operands:
            if operand.startswith("["):
                parts = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*([-+]?\w+)\s*)?\]", operand)
                if parts is None or addresses > 1:
                    raise PtxError(f"unknown address: {operand}")
                places.append(self._operand(parts[1]))
                offsets[addresses] = int(parts[2] or "0", 0)
                addresses += 1
            else:
                for part in operand.strip("{} ").split(","):
                    places += [self._operand(each) for each in part.split("|")]
        slot = self._operand(guard.lstrip("!"))[0] if guard else -1
        written = " ".join(f"{at} {size}" for at, size in places)
        negated = int(guard.startswith("!"))
        splits = int(bool(operands) and operands[0].startswith("{"))
        numbers = f"{offsets[0]} {offsets[1]} {splits} {len(places)}"
        return f"run {slot} {negated} {opcode} {numbers} {written}"
