"""The chart of README.md, as SVG: bars of how long others take where ours take 1."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

COLOURS = {"ours": "#0b8a62", "compiled": "#8a8f98", "d2l": "#d08a3c"}
WIDTH, LABELS, BAR, ROW, HEAD = 760, 260, 10, 46, 30  # pixels; HEAD: a panel's heading
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:11px}.head{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
)


class Bars(NamedTuple):
    """A call: our time as text, and how many times as long others took."""

    what: str
    ours: str
    times: dict[str, float]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, who: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[who]}"/>'


def drawing(panels: dict[str, list[Bars]]) -> str:
    """The picture: a heading and rows for each panel, all to one scale."""
    longest = max(max(row.times.values()) for rows in panels.values() for row in rows)
    scale = (WIDTH - LABELS - 60) / longest
    parts, y = [], 20.0
    for x, who in zip((LABELS, LABELS + 70, LABELS + 170), COLOURS, strict=True):
        parts += [_bar(x, y - BAR, BAR, who), _text(x + 15, y, who)]
    for heading, rows in panels.items():
        y += HEAD
        parts.append(_text(0, y, heading, "head"))
        for row in rows:
            parts.append(_text(0, y + 27, row.what))
            for number, who in enumerate(COLOURS):
                long = row.times.get(who, 1.0)
                top = y + 9 + number * (BAR + 1)
                said = row.ours if who not in row.times else f"{long:.1f}x"
                parts.append(_bar(LABELS, top, long * scale, who))
                parts.append(_text(LABELS + long * scale + 5, top + BAR - 1, said, "small"))
            y += ROW
    size = f'width="{WIDTH}" height="{y + 10:g}" viewBox="0 0 {WIDTH} {y + 10:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])
