"""Writes the figures of ``fuzz.py`` and ``sanitize.py`` into docs/compatibility.md."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results"
HEAD = "| run | what | failures | minutes |\n|---|---|---|---|\n"


def read(name):
    """The figures of a run, or an empty dict where none are kept."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table():
    """Its lines, below the head."""
    fuzzed, sanitized = read("fuzz"), read("sanitize")
    return [
        f"| `fuzz.py`: {row['target']} | {row['cases']} cases, {row['checked']} compared, "
        f"{row['refused']} refused | {row['wrong']} | {row['minutes']} |"
        for row in fuzzed.get("targets", [])
    ] + [
        f"| `sanitize.py`: {row['sanitizer']} | {row['tests']} tests, {row['drawn']} drawn cases "
        f"| {row['failures']} | {row['minutes']} |"
        for row in sanitized.get("sanitizers", [])
    ]


def page():
    """The page as it should be."""
    before, _, after = PAGE.read_text().partition(HEAD)
    return (
        before + HEAD + "".join(f"{line}\n" for line in table()) + "\n" + after.split("\n\n", 1)[1]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
