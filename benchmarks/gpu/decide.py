"""``python -m benchmarks.gpu.decide FILE``: what an hour says of each constant of the GPU code.

FILE has the lines of ``make gpu-hour``. First comes what did not go well; then every constant that
the code marks as not measured, and the others that were timed: microseconds of each call, with no
input in the L2 where it has one query, and what to write where.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .constants import SWEEPS, WITHIN, Sweep
from .runner import is_wrong

ROOT = Path(__file__).resolve().parents[2]
FOLDERS, SUFFIXES = ("bahdanau_fast", "kernels", "csrc"), {".py", ".h", ".cpp", ".cu"}
PAYS, WRONG = 1.02, 0.05  # times as fast for a change; a difference that is no rounding
Times = dict[str, dict[str, float]]  # microseconds by call and way


class Constant(NamedTuple):
    """A constant, or a function that cuts work, and whether its comment has the mark."""

    name: str
    place: str
    value: str = ""
    marked: bool = False

    @property
    def number(self) -> float | None:
        """The value."""
        return float(eval(self.value)) if re.fullmatch(r"[\d\s.*<]+", self.value) else None


def constants(text: str, path: str) -> list[Constant]:
    """Those of a file; a mark above none has no name."""
    found, comment, names, inside = [], "", list[tuple[str, str]](), False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith(("#", "//")) and not line.startswith(("#include", "#pragma")):
            comment += f" {line.lstrip('#/ ')}"
            continue
        inside = inside or bool(re.match(r"(?:LAB_CONSTEXPR|constexpr) \w+ k[A-Z]", line))
        names = re.findall(r"\b(k[A-Z]\w*) = ([^,;]+)", line) if inside else []
        if several := re.match(r"(_?[A-Z]\w*(?:, _?[A-Z]\w*)*)(?:: [^=]+)? = (.+)$", line):
            values = several[2].split(", ") if "," in several[1] else [several[2]]
            names = [*zip(several[1].split(", "), values, strict=False)]
        elif function := re.match(r"def ([a-z]\w*)\(", line):
            names = [(function[1], "")]
        marked = "not measured" in comment or bool(re.search("(#|//).*not measured", line))
        if marked and not names:
            names = [("", "")]
        found += [Constant(name, f"{path}:{number}", value, marked) for name, value in names]
        inside = inside and not line.endswith(";")
        comment = comment if inside else ""
    return found


def of_sources(root: Path = ROOT) -> list[Constant]:
    """All constants of the package and of the kernels, with the functions that cut work."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    names = [path.relative_to(root).as_posix() for path in paths if path.suffix in SUFFIXES]
    return [
        found
        for name in names
        if not name.startswith("bahdanau_fast/kernels/")  # a link in a checkout
        for found in constants((root / name).read_text(encoding="utf-8"), name)
    ]


# ---- what was measured


def times(rows: Iterable[dict[str, Any]]) -> tuple[Times, dict[str, float], list[str]]:
    """Of a constant's rows: microseconds, sizes by call, and what is wrong with others."""
    found, sizes, problems = Times(), dict[str, float](), list[str]()
    for row in rows:
        spread = row.get("cold") or row.get("graph")
        problem = row.get("problem", "")
        if not row.get("differs", 0.0) <= WRONG:
            problem = f"its results differ by {row['differs']:.2g} of the largest number"
        if problem:
            problems.append(f"{row['call']}: {row['way']}: {problem}")
        elif spread:
            found.setdefault(row["call"], {})[row["way"]] = 1e6 * spread["median"]
            sizes[row["call"]] = row.get("size", 0.0)
    return found, sizes, problems


def slower(found: Times, chosen: dict[str, str]) -> float:
    """Times of the chosen ways, over those of the fastest, in the mean over calls."""
    shares = [of[chosen[call]] / min(of.values()) for call, of in found.items()]
    return math.exp(sum(map(math.log, shares)) / len(shares))


def candidates(
    sweep: Sweep, found: Times, sizes: dict[str, float], now: float | None
) -> dict[float, dict[str, str]]:
    """The way of each call, by the values that a constant can have."""
    if sweep.size is None:
        ways = [label for label in sweep.ways if all(label in of for of in found.values())]
        return {float(label): dict.fromkeys(found, label) for label in ways}
    beyond = next(label for label in sweep.ways if label != WITHIN)
    bounds = {*sizes.values(), 2 * max(sizes.values()) if sweep.least else 0.0}

    def way(size: float, bound: float) -> str:
        return WITHIN if (size < bound if sweep.least else size <= bound) else beyond

    rounded = sorted(
        {math.ceil(100 * b) / 100 for b in bounds} | ({now} if now is not None else set())
    )
    return {b: {call: way(sizes[call], b) for call in found} for b in rounded}


def verdict(sweep: Sweep, found: Times, sizes: dict[str, float], constant: Constant) -> str:
    """What to write."""
    if not all(label.isdigit() or sweep.size for label in sweep.ways):
        best = {call: min(of, key=of.__getitem__) for call, of in found.items()}
        return "; ".join(f"{call}: {way}" for call, way in best.items()) + " is the fastest"
    whole = {call: of for call, of in found.items() if not sweep.size or len(of) == len(sweep.ways)}
    costs = (
        {
            value: slower(whole, chosen)
            for value, chosen in candidates(sweep, whole, sizes, constant.number).items()
        }
        if whole
        else {}
    )
    if not costs:
        return "nothing to choose from"
    best, now = min(costs, key=costs.__getitem__), costs.get(constant.number or 0.0)
    if now is not None and now < PAYS * costs[best]:
        return f"{constant.name} = {constant.value} stays"
    gain = f": {now / costs[best]:.3g} times as fast" if now is not None else ""
    return f"write {constant.name} = {best:.12g}{gain}"


def report(lines: list[dict[str, Any]], root: Path = ROOT) -> list[str]:
    """The text, in lines."""
    said = []
    for line in lines:
        if is_wrong(line):
            kept = {k: v for k, v in line.items() if k not in ("text", "stage", "row", "said")}
            said += [f"NOT WELL: {line['row']}: {kept}", *line.get("said", [])[-2:]]
    sources = of_sources(root)
    marked = [constant for constant in sources if constant.marked]
    others = [c for s in SWEEPS for c in sources if c.name == s.constant and not c.marked]
    for constant in dict.fromkeys(marked + others):
        mark = " (not measured)" if constant.marked else ""
        said.append(f"{constant.place}: {constant.name or 'a mark'} = {constant.value}{mark}")
        rows = [line for line in lines if line.get("constant") == constant.name]
        for sweep in (s for s in SWEEPS if s.constant == constant.name):
            calls = set(map(str, sweep.calls))
            found, sizes, problems = times(r for r in rows if r["call"] in calls)
            for call, of in found.items():
                size = f" ({sizes[call]:.12g})" if sweep.size else ""
                ways = ", ".join(f"{way} {us:.4g}" for way, us in of.items())
                said.append(f"    {call}{size}: {ways}")
            said += [f"    {problem}" for problem in problems]
            if found:
                said.append(f"    -> {verdict(sweep, found, sizes, constant)}")
        if not any(kind in row for row in rows for kind in ("graph", "problem")):
            said.append("    not timed in this file" if rows else "    not in this file")
    return said


def main(path: str) -> None:
    """Print the report of a file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    print("\n".join(report([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main(*sys.argv[1:])
