"""The table of README.md, from the figures of a run.

``python -m benchmarks --json FILE`` measures, ``python -m benchmarks.readme_table FILE`` prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROWS = {
    ("step", "step", "forward"): "one decoder step, keys projected",
    ("loop", "loop", "forward"): "unchanged d2l loop of 50 steps",
    ("loop", "loop", "train"): "the same, forward and backward",
    ("many-queries", "projected", "forward"): "many queries, after the projections",
    ("many-queries", "projected", "train"): "the same, forward and backward",
    ("many-queries", "full", "forward"): "many queries, projections included",
    ("many-queries", "full", "train"): "the same, forward and backward",
    ("overhead", "full", "forward"): "toy call",
    ("overhead", "full", "train"): "the same, forward and backward",
}
OURS = ("ours module", "ours memory", "ours op")


def _line(row: dict[str, Any], what: str) -> str:
    seconds = {name: spread["median"] for name, spread in row["seconds"].items()}
    ours = next(seconds[name] for name in OURS if name in seconds)
    d2l = seconds["d2l eager"]
    others = {name: time for name, time in seconds.items() if not name.startswith("ours")}
    best = min(others, key=others.__getitem__)
    shape = ", ".join(str(row["shape"][size]) for size in ("batch", "queries", "keys", "hidden"))
    cells = [
        f"{what} ({shape})",
        f"{1e3 * d2l:.3g} ms",
        f"{1e3 * others[best]:.3g} ms ({best})",
        f"{1e3 * ours:.3g} ms",
        f"{d2l / ours:.1f}x",
        f"{others[best] / ours:.1f}x",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print machine and table in Markdown."""
    data = json.loads(Path(sys.argv[1]).read_text())
    about = data["machine"]
    where = f"{about['cpu']}, {about['cores']}, torch {about['torch']}"
    print(f"fp32, {where}, commit {about['commit']}\n")
    print(
        "| what (B, Tq, Tk, H) | d2l, eager | fastest baseline | ours | against d2l | against it |"
    )
    print("|---|---|---|---|---|---|")
    seen = set()
    for row in data["rows"]:
        key = (row["table"], row["task"], row["mode"])
        name = (*key, row["shape"]["name"])
        if key in ROWS and row.get("seconds") and name not in seen:
            seen.add(name)
            print(_line(row, ROWS[key]))


if __name__ == "__main__":
    main()
