"""What :func:`bahdanau_fast.fuse` did, as a table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Entry", "Report"]


@dataclass(frozen=True)
class Entry:
    """What became of one module.

    Attributes:
        name: in the model; empty for the model itself.
        kind: name of its class.
        family: whose attention it was found to be; None where it was left alone.
        text: how its forward is computed now, or why it was left alone.
    """

    name: str
    kind: str
    family: str | None
    text: str


@dataclass(frozen=True)
class Report:
    """Modules that look like additive attention, those fused first.

    Attributes:
        entries: of all of them.
    """

    entries: tuple[Entry, ...]

    @property
    def fused(self) -> tuple[Entry, ...]:
        """Those whose ``forward`` was replaced."""
        return tuple(entry for entry in self.entries if entry.family is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """Those left alone."""
        return tuple(entry for entry in self.entries if entry.family is None)

    def __str__(self) -> str:
        if not self.entries:
            return "no module looks like additive attention"
        rows = [("module", "class", "fused as", "how, or why not")]
        rows += [
            (entry.name or "(the model)", entry.kind, entry.family or "left alone", entry.text)
            for entry in (*self.fused, *self.left)
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join((*(part.ljust(w) for part, w in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in (*widths, len(rows[0][3]))))
        return "\n".join(lines)
