"""What ``fuse`` found."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from bahdanau_fast.fuse.caches import Caches
from bahdanau_fast.fuse.find import Addend, Piece
from bahdanau_fast.fuse.graph import Graph, Ref

__all__ = ["NOTED", "Entry", "Kind", "Record", "Report", "names_of"]


# A piece is fused where it takes at most so much of its own code's time.
PAYS = 0.8
# Calls of a kind that are noted, at most.
NOTED = 8


@dataclass(frozen=True)
class Entry:
    """A place that computes additive attention, or may.

    Attributes:
        name: of the module in the model, empty for the model itself.
        kind: name of its class.
        place: file and line of its code that computes the scores, once that is known.
        formula: as it was read; q are queries, k keys, v values.
        text: what computes it now, or why it was left alone, and what to do.
    """

    name: str
    kind: str
    place: str
    formula: str
    text: str


class Kind:
    """What is known of a kind of call."""

    def __init__(self) -> None:
        self.tapes: list[Any] = []  # of the ways that it takes, the last one first
        self.pinned: set[int] = set()  # calls whose results are kept, made at once
        self.took: Any = None
        self.pays = False
        self.wanted, self.noted = True, 0  # whether the next call is noted; how many were
        self.hits = self.misses = 0  # calls that took a way of a tape, and that did not
        self.limit = 0.0  # seconds of a call, as written, that clearly has more to do

    def note(self, seconds: float) -> None:
        """A call was noted."""
        self.wanted, self.noted, self.limit = False, self.noted + 1, 4 * seconds + 1e-3


class Record:
    """What is known of a module.

    Its state is "waiting"; "fused"; "slow", found, but its own code is as fast; "left"; "own"; or
    "none" where there is nothing of the kind.
    """

    def __init__(self, name: str, kind: str, always: bool = False) -> None:
        self.name, self.kind, self.state = name, kind, "waiting"
        self.always = self.at_once = always  # fuse what does not pay; look at the next call
        self.kinds: dict[Any, Kind] = {}
        self.last: Any = None  # the tape of the last call, and what tells an equal one
        self.proved: dict[Any, Any] = {}
        self.caches = Caches()
        # What its calls took as written, and what they are to take before one is noted again.
        self.seconds = self.due = 0.0
        self.dull = self.misses = self.fused = 0
        self.moved = False  # whether pieces end elsewhere from now on
        self.near = False  # whether it has a sum against a vector
        self.varies = False  # whether its calls took several ways
        self.trained = False  # a backward has come through what was fused
        self.places: dict[tuple[str, str], Any] = {}
        self.reasons: dict[str, str] = {}
        self.names: dict[int, str] = {}

    def __deepcopy__(self, memo: Any) -> Record:
        return Record(self.name, self.kind, self.always)

    def leave(self, place: str, why: str) -> None:
        """Say that something at a place stays as it is."""
        self.reasons[place] = why
        self.state = "left" if self.state in ("waiting", "none") else self.state

    def judge(self, kind: Kind) -> None:
        """Whether a kind is fused: by the time of what is done with it, forward alone or both."""
        plain, fused = kind.took[2:] if self.trained else kind.took[:2]
        kind.pays = bool(kind.tapes) and (self.always or fused <= PAYS * plain)
        pays = any(each.pays for each in self.kinds.values())
        self.state, self.last = "fused" if pays else "slow", None

    def train(self, _: Any = None) -> None:
        """A backward came through what was fused: from now on its time counts."""
        self.trained = True
        for kind in self.kinds.values():
            if kind.tapes:
                self.judge(kind)

    def found(self, graph: Graph, piece: Piece, took: Any) -> None:
        """Take down a piece."""
        where = graph.nodes[piece.at].place
        self.reasons.pop(where, None)
        if self.moved:  # another piece than before is there
            self.places = {key: x for key, x in self.places.items() if key[0] != where}
            self.moved = False
        device = graph.values[piece.activated].device
        self.places[where, _Formula(graph, piece, self.names).text] = took, device

    def miss(self, kind: Kind, tape: Any, why: str, kept: set[int]) -> None:
        """A call took another way than its tapes, or keeps what is put off: the next is noted."""
        self.misses += 1
        kind.misses += 1
        self.varies |= not kept
        self.last, kind.wanted, kind.pinned = None, kind.noted < NOTED, kind.pinned | kept
        hopeless = not kind.wanted and kind.misses > kind.hits
        self.moved |= bool(kept)
        if kept or hopeless:
            kind.tapes = [each for each in kind.tapes if each is not tape and not hopeless]
        if hopeless:
            self.reasons[""], kind.limit, kind.pays = why, float("inf"), False
            self.state = "fused" if any(each.pays for each in self.kinds.values()) else "left"

    def entries(self) -> Iterator[Entry]:
        """A row for each place."""
        named = self.name, self.kind
        if self.state in ("own", "waiting"):
            why = "already this package's" if self.state == "own" else "is looked at when called"
            yield Entry(*named, "", "", why)
        for (place, formula), (took, device) in self.places.items():
            plain, fused = (x * 1e6 for x in (took[2:] if self.trained else took[:2]))
            speed = f"{plain:.0f} us as written, {fused:.0f} us fused, on {device}"
            text = f"fused, {self.fused} times; {speed}"
            if self.state != "fused":
                text = "; ".join(self.reasons.values()) or f"runs as written, as fast: {speed}"
            yield Entry(*named, place, formula, text)
        for place, why in self.reasons.items():
            if self.state == "fused" or not self.places:
                yield Entry(*named, place, "", why)


class _Formula:
    """A piece in words."""

    def __init__(self, graph: Graph, piece: Piece, names: dict[int, str]) -> None:
        self.graph, self.names = graph, names
        letters = iter("qrst"), iter("kfgh")
        terms = []
        for each in piece.addends:
            terms.append(self.term(each, letters))
        text = f"{self.name(piece.vector, 'w')} . {piece.activation}({' + '.join(terms)})"
        for how, by in piece.after:
            number = self.name(int(by), "c") if type(by) is Ref else f"{by:g}"
            text = f"{text} + {number}" if how == "+" else f"({text}) {how} {number}"
        if piece.weights is not None:
            text = f"softmax({text}{', mask' if piece.masks else ''})"
        self.text = text if piece.context is None else f"{text} v"

    def term(self, each: Addend, letters: Any) -> str:
        value = self.graph.values[each.x]
        if each.w is None and value.constant and len(value.shape) == 1:
            return self.name(each.x, "b")
        letter = next(letters[each.key], "x")
        weight = self.name(each.w, "W") if each.w is not None else ""
        text = f"{weight} {letter}" if weight else letter
        text = text if each.factor == 1.0 else f"{each.factor:g} {text}"
        return text if each.bias is None else f"{text} + {self.name(each.bias, 'b')}"

    def name(self, number: int, other: str) -> str:
        x = self.graph.values[number].tensor
        for each in (x, None if x is None else x._base):
            if each is not None and id(each) in self.names:
                return self.names[id(each)].removesuffix(".weight")
        return other


class Report:
    """Places that compute additive attention; complete once the model was called.

    It is true whenever it is read: its rows say what ran, up to the last call.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def _of(self, *states: str) -> tuple[Entry, ...]:
        return tuple(
            e for record in self._records if record.state in states for e in record.entries()
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, those fused first."""
        return (*self.fused, *self.waiting, *self.left)

    @property
    def fused(self) -> tuple[Entry, ...]:
        """Those that this package computes."""
        return tuple(entry for entry in self._of("fused") if entry.formula)

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Those that are looked at when they are called."""
        return self._of("waiting")

    @property
    def left(self) -> tuple[Entry, ...]:
        """Those that run as they are written, and this package's own modules."""
        also = tuple(entry for entry in self._of("fused") if not entry.formula)
        return (*self._of("slow", "left", "own"), *also)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("module", "class", "where", "formula", "how, or why not")]
        for e in (*self.fused, *self.left):
            rows.append((e.name or "(the model)", e.kind, e.place, e.formula, e.text))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        states = [record.state for record in self._records]
        notes = [
            f"no additive attention in {states.count('none')} modules that were called"
            * (len(rows) == 1 and "none" in states),
            f"{states.count('waiting')} modules are looked at when they are called"
            * ("waiting" in states),
        ]
        notes = [note for note in notes if note] or ["no module to look at"] * (len(rows) == 1)
        if len(rows) == 1:
            return "; ".join(notes)
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join((*(part.ljust(w) for part, w in zip(row, widths, strict=False)), row[4]))
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in (*widths, len(rows[0][4]))))
        return "\n".join([*(line.rstrip() for line in lines), *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for row, tag in zip(self._rows(), itertools.chain(["th"], itertools.repeat("td")))  # noqa: B905
        )
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def names_of(module: nn.Module) -> dict[int, str]:
    """Of a module's parameters."""
    return {id(p): name for name, p in module.named_parameters()}
