"""What ``fuse`` found."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from bahdanau_fast.fuse.caches import Caches
from bahdanau_fast.fuse.find import Addend, Piece
from bahdanau_fast.fuse.graph import Graph, Ref

__all__ = ["NOTED", "Entry", "Kind", "Record", "Report"]

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
        self.methods: list[str] = []  # that somebody else may call

    def __deepcopy__(self, memo: Any) -> Record:
        return Record(self.name, self.kind, self.always)

    def leave(self, place: str, why: str) -> None:
        """Say that something at a place stays as it is."""
        self.reasons[place] = why
        self.state = "left" if self.state in ("waiting", "none") else self.state

    @property
    def pays(self) -> bool:
        """Whether a kind of its calls is fused."""
        return any(kind.pays for kind in self.kinds.values())

    def asked(self, took: Any) -> Any:
        """Plain and fused seconds, with backward once there was one."""
        return took[2:] if self.trained else took[:2]

    def judge(self, kind: Kind) -> None:
        """Whether a kind is fused: by the time of what is done with it, forward alone or both."""
        plain, fused = self.asked(kind.took)
        kind.pays = bool(kind.tapes) and (self.always or fused <= PAYS * plain)
        self.state, self.last = "fused" if self.pays else "slow", None

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
        self.places[where, _formula(graph, piece, self.names)] = took, device

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
            self.state = "fused" if self.pays else "left"

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """A row for each place, and whether that is "fused", "waiting" or "left"."""
        named, state = (self.name, self.kind), "fused" if self.state == "fused" else "left"
        if self.state == "waiting":
            yield "waiting", Entry(*named, "", "", "is looked at when called")
        if self.state == "own":
            yield "left", Entry(*named, "", "", "already this package's")
        for (place, formula), (took, device) in self.places.items():
            plain, fused = (x * 1e6 for x in self.asked(took))
            speed = f"{plain:.0f} us as written, {fused:.0f} us fused, on {device}"
            text = "; ".join(self.reasons.values()) or f"runs as written, as fast: {speed}"
            text = f"fused, {self.fused} times; {speed}" if state == "fused" else text
            yield state, Entry(*named, place, formula, text)
        for place, why in self.reasons.items():
            if state == "fused" or not self.places:
                yield "left", Entry(*named, place, "", why)


def _formula(graph: Graph, piece: Piece, names: dict[int, str]) -> str:
    """A piece in words; parameters by their names."""
    letters = iter("qrst"), iter("kfgh")

    def name(number: int, other: str) -> str:
        x: Any = graph.values[number].tensor
        found = names.get(id(x)) or names.get(id(getattr(x, "_base", None)))
        return (found or other).removesuffix(".weight")

    def term(each: Addend) -> str:
        value = graph.values[each.x]
        if each.w is None and value.constant and len(value.shape) == 1:
            return name(each.x, "b")
        text = next(letters[each.key], "x")
        text = text if each.w is None else f"{name(each.w, 'W')} {text}"
        text = text if each.factor == 1.0 else f"{each.factor:g} {text}"
        return text if each.bias is None else f"{text} + {name(each.bias, 'b')}"

    terms = " + ".join(map(term, piece.addends))
    text = f"{name(piece.vector, 'w')} . {piece.activation}({terms})"
    for how, by in piece.after:
        number = name(by, "c") if type(by) is Ref else f"{by:g}"
        text = f"{text} + {number}" if how == "+" else f"({text}) {how} {number}"
    if piece.context is None:
        return text
    return f"softmax({text}{', mask' if piece.masks else ''}) v"


class Report:
    """Places that compute additive attention; complete once the model was called.

    It is true whenever it is read: its rows say what ran, up to the last call.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def _of(self, which: str) -> tuple[Entry, ...]:
        every = (each for record in self._records for each in record.entries())
        return tuple(entry for state, entry in every if state == which)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, those fused first."""
        return (*self.fused, *self.waiting, *self.left)

    @property
    def fused(self) -> tuple[Entry, ...]:
        """Those that this package computes."""
        return self._of("fused")

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Those that are looked at when they are called."""
        return self._of("waiting")

    @property
    def left(self) -> tuple[Entry, ...]:
        """Those that run as they are written, and this package's own modules."""
        return self._of("left")

    def _rows(self) -> list[tuple[str, ...]]:
        """A header, and what was looked at."""
        rows = [astuple(each) for each in (*self.fused, *self.left)]
        rows = [(name or "(the model)", *rest) for name, *rest in rows]
        return [("module", "class", "where", "formula", "how, or why not"), *rows]

    def __str__(self) -> str:
        rows, states = self._rows(), [record.state for record in self._records]
        none, waiting = states.count("none"), states.count("waiting")
        found = [each for each in self._records if each.state in ("none", "waiting")]
        others = [f"{each.name or each.kind}.{name}" for each in found for name in each.methods]
        notes = [f"calls of other methods than forward are not watched: {', '.join(others)}"]
        notes = notes * bool(others)
        notes += [f"{waiting} modules are looked at when they are called"] * bool(waiting)
        if len(rows) == 1:
            seen = [f"no additive attention in {none} modules that were called"] * bool(none)
            return "; ".join([*seen, *notes]) or "no module to look at"
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, tuple("-" * width for width in (*widths[:4], len(rows[0][4]))))
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([*lines, *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [[html.escape(cell) for cell in row] for row in self._rows()]
        lines = [f"<th>{'</th><th>'.join(rows[0])}</th>"]
        lines += [f"<td>{'</td><td>'.join(row)}</td>" for row in rows[1:]]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
