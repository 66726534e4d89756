"""What ``fuse`` found."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bahdanau_fast.graphs.caches import Caches, Shared

if TYPE_CHECKING:
    from bahdanau_fast.graphs.graph import Graph
    from bahdanau_fast.graphs.piece import Addend, Piece

# Calls that run as written between two that are captured, where nothing is fused.
_REST = 100


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


def _elements(args: tuple[Any, ...]) -> int:
    """Elements of the tensors among some arguments."""
    n = 0
    for x in args:
        if isinstance(x, Tensor):
            n += x.numel()
    return n


class Record:
    """The state of a module, and where it computes additive attention.

    Its state is "waiting"; "looked" at, and to be compiled; "fused", compiled with the operator in
    it; "left"; "own"; or "none" where there is nothing of the kind.
    """

    def __init__(self, name: str, kind: str, always: bool = False) -> None:
        self.name, self.kind, self.state = name, kind, "waiting"
        self.shared = Shared(Caches(), always)
        self.at_once = always  # the next call is looked at
        self.choices: list[Any] = []  # of its graphs
        self.compiled = 0  # graphs
        # Why a softmax is no part, by line and formula.
        self.formulas: dict[tuple[str, str], str] = {}
        self.reasons: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.methods: list[str] = []  # that somebody else may call
        # How many calls, of how many elements at most, run as written: with gradients, without.
        self._rest: dict[bool, list[int]] = {}
        self.way: Any = None  # how it is called
        self.done = False  # it is left for good
        self.calls: list[None] = []  # that run: the module keeps its class, which Dynamo guards

    def __deepcopy__(self, memo: Any) -> Record:
        return Record(self.name, self.kind, self.shared.always)

    @property
    def fused(self) -> int:
        """How often a graph with the operator in it ran."""
        return sum(kind.runs for choice in self.choices for kind in choice.kinds.values())

    def rests(self, args: tuple[Any, ...]) -> bool:
        """Whether a call runs as written, as those of at most its size that were timed."""
        rest = self._rest.get(torch.is_grad_enabled())
        if rest is None or not rest[0] or _elements(args) > rest[1]:
            return False
        rest[0] -= 1
        return True

    def rest(self, args: tuple[Any, ...]) -> None:
        """Nothing of this call was fused: the next ones like it run as written."""
        self._rest[torch.is_grad_enabled()] = [_REST, _elements(args)]

    def leave(self, source: str, why: str, done: bool = False) -> None:
        """Say that something at a line stays as it is, or the module for good."""
        self.reasons[source] = why
        self.done |= done
        if self.state in ("waiting", "none") or (self.state == "looked" and not source):
            self.state = "left"

    def fuse(self, source: str, graph: Graph, piece: Piece) -> None:
        """Say that a piece at a line is computed by the operator."""
        self.reasons.pop(source, None)
        self.state = "fused"
        why = piece.why_scores_only if piece.context is None else ""
        note = f"; softmax not part: {why}" if why else ""
        self.formulas[source, _formula(graph, piece, self.names)] = note

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """A row for each place and kind of call, and whether that is "fused" or "left"."""
        named = (self.name, self.kind)
        if self.state in ("waiting", "looked"):
            yield "waiting", Entry(*named, "", "", "is looked at when called")
        if self.state == "own":
            yield "left", Entry(*named, "", "", "already this package's")
        why = f"; {self.reasons['']}" if "" in self.reasons else ""
        for (source, formula), rest in self.formulas.items():
            for fused, text in self._kinds():
                entry = Entry(*named, source, formula, text + rest + why)
                yield "fused" if fused else "left", entry
        for source, reason in self.reasons.items():
            if source or not self.formulas:
                yield "left", Entry(*named, source, "", reason)

    def _kinds(self) -> list[tuple[bool, str]]:
        """Of each kind of call whether it is fused, and its times."""
        rows = []
        for choice in self.choices:
            mode = "with gradients" if choice.grad else "without gradients"
            for kind in choice.kinds.values():
                fused = kind.run is choice.fused
                why = "not timed" if kind.times is None else "as fast"
                text = f"fused, {kind.runs} times" if fused else f"runs as written, {why}"
                if kind.times is not None:
                    plain, ours, shapes = kind.times
                    sizes = ", ".join(map(str, shapes))
                    text += f": {plain * 1e6:.0f} us as written, {ours * 1e6:.0f} us fused "
                    text += f"({plain / ours:.1f}x), {mode}, {sizes}"
                rows.append((fused, text))
        return [*dict.fromkeys(rows)] or [(False, "not called since it was found")]


def _formula(graph: Graph, piece: Piece, names: dict[int, str]) -> str:
    """A piece in words; parameters by their names."""
    letters = (iter("x"), iter("xx")) if piece.is_pooling else (iter("qrst"), iter("kfgh"))

    def name(number: int, other: str) -> str:
        data = graph.values[number].data
        return names.get(id(data), other).removesuffix(".weight")

    def term(addend: Addend) -> str:
        value = graph.values[addend.x]
        if addend.w is None and value.constant and len(value.shape) == 1:
            return name(addend.x, "b")
        text = next(letters[addend.of_keys], "x")
        text = text if addend.w is None else f"{name(addend.w, 'W')} {text}"
        text = text if addend.factor == 1.0 else f"{addend.factor:g} {text}"
        return text if addend.bias is None else f"{text} + {name(addend.bias, 'b')}"

    text = f"{piece.activation}({' + '.join(map(term, piece.addends))})"
    text = f"({text} * sigmoid({term(piece.gate[0])}))" if piece.gate else text
    factor = "m * " if piece.context is None and piece.masks else ""
    text = f"{factor}{name(piece.vector, 'w')} . {text}"
    for how, by in piece.score_ops:
        number = f"{by:g}" if type(by) in (int, float) else name(by, "c")
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
        rows = itertools.chain.from_iterable(record.entries() for record in self._records)
        return tuple(entry for state, entry in rows if state == which)

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
        rows = map(astuple, (*self.fused, *self.left))
        named = [(name or "(the model)", *rest) for name, *rest in rows]
        return [("module", "class", "where", "formula", "how, or why not"), *named]

    def __str__(self) -> str:
        rows, states = self._rows(), [record.state for record in self._records]
        none, waiting = states.count("none"), len(self.waiting)
        bare = [record for record in self._records if record.state in ("none", "waiting")]
        others = [f"{r.name or r.kind}.{method}" for r in bare for method in r.methods]
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
