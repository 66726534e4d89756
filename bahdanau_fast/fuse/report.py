"""What ``fuse`` found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from bahdanau_fast.fuse.watch import LEAST, Caches

__all__ = ["Entry", "Record", "Report"]


@dataclass(frozen=True)
class Entry:
    """A place that computes additive attention, or may.

    Attributes:
        name: of the module in the model, empty for the model itself.
        kind: name of its class.
        place: file and line of its code that computes the scores, once that is known.
        formula: as it was read.
        text: what computes it now, or why it was left alone.
    """

    name: str
    kind: str
    place: str
    formula: str
    text: str


class Record:
    """What is known of a module: found, to be found at its first call, or left alone.

    Attributes:
        state: "waiting", "fused", "left", "own", or "none" where there is nothing of the kind.
        places: (place, formula, text) of what was found.
    """

    def __init__(self, name: str, kind: str, state: str = "waiting", text: str = "") -> None:
        self.name, self.kind, self.state = name, kind, state
        self.text = text or "is looked at when it is first called"
        self.places: dict[tuple[str, str], str] = {}
        self.caches, self.least = Caches(), LEAST
        self.checked: Counter[Any] = Counter()
        self.pays: dict[Any, bool] = {}
        self.expected = 0  # calls that may show nothing

    def leave(self, why: str) -> None:
        """Say that the module stays as it is."""
        self.state, self.text = "left", why

    def entries(self) -> list[Entry]:
        """A row for each place."""
        if self.state in ("waiting", "own") or not self.places:
            return [Entry(self.name, self.kind, "", "", self.text)] if self.state != "none" else []
        left = self.state == "left"
        return [
            Entry(self.name, self.kind, *where, self.text if left else how)
            for where, how in self.places.items()
        ]


class Report:
    """Places that compute additive attention; complete once the model was called.

    Attributes:
        entries: of all of them, those fused first.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def _of(self, *states: str) -> tuple[Entry, ...]:
        found = (record.entries() for record in self._records if record.state in states)
        return tuple(entry for entries in found for entry in entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them."""
        return (*self.fused, *self.waiting, *self.left)

    @property
    def fused(self) -> tuple[Entry, ...]:
        """Those that this package computes."""
        return self._of("fused")

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Those that are looked at when they are first called."""
        return self._of("waiting")

    @property
    def left(self) -> tuple[Entry, ...]:
        """Those left alone, and this package's own modules."""
        return self._of("left", "own")

    def __str__(self) -> str:
        if not self.entries:
            return "nothing that looks like additive attention"
        rows = [("module", "class", "where", "formula", "how, or why not")]
        rows += [
            (e.name or "(the model)", e.kind, e.place, e.formula, e.text) for e in self.entries
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join((*(part.ljust(w) for part, w in zip(row, widths, strict=False)), row[4]))
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in (*widths, len(rows[0][4]))))
        return "\n".join(line.rstrip() for line in lines)
