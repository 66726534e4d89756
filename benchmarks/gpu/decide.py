"""``python -m benchmarks.gpu.decide FILE``: what an hour says of each constant of the GPU code.

FILE has the lines of ``make gpu-hour``. First comes what did not go well; then every constant that
the code marks as not measured: microseconds of each call, with no input in the L2 where it has one
query, and what to write where.

:data:`SWEEPS` has what decides a constant: it is timed at several values; or, where it bounds a
size, with calls within it and beyond it, whatever their size. Names are those of the sources. The
sweep of a constant goes once it is measured.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from ..worker import ROOT
from . import is_wrong

WITHIN, BEYOND = "within", "beyond"
Sizes = tuple[int, int, int, int]


class Call(NamedTuple):
    """A call by B, Tq, Tk and H."""

    what: str  # with W_q in it ("step") or without ("forward")
    sizes: Sizes
    dtype: str = "bfloat16"
    values: int = 0  # their columns, where those are not H

    def __str__(self) -> str:
        columns = f", values of {self.values}" if self.values else ""
        return f"{str(self.sizes).replace(' ', '')}{columns}, {self.what}, {self.dtype}"


class Way(NamedTuple):
    """A backend, and constants that are set there."""

    backend: str
    settings: dict[str, int]


class Sweep(NamedTuple):
    """Ways to compute the same calls, by what the rows call them, and the constant they decide."""

    constant: str
    calls: list[Call]
    ways: dict[str, Way]
    size: Callable[[Call], float] | None = None  # where they are within and beyond the constant


def _calls(what: str, *sizes: Sizes, **more: Any) -> list[Call]:
    return [Call(what, of, **more) for of in sizes]


def _values(name: str, calls: list[Call], *values: int) -> Sweep:
    return Sweep(name, calls, {str(value): Way("cuda", {name: value}) for value in values})


def _bound(name: str, calls: list[Call], size: Callable[[Call], float], **also: int) -> Sweep:
    inside, outside = (Way("triton", also | {name: bound}) for bound in (1 << 40, 0))
    return Sweep(name, calls, {WITHIN: inside, BEYOND: outside}, size)


def _backends(name: str, calls: list[Call], size: Callable[[Call], float]) -> Sweep:
    return Sweep(name, calls, {WITHIN: Way("cuda", {}), BEYOND: Way("triton", {})}, size)


def _queries(call: Call) -> int:
    return call.sizes[1]


SHORT, LONG, WIDE = (64, 1, 50, 512), (64, 1, 400, 512), (256, 1, 400, 512)
FEW, ONE, POOLING = (16, 1, 400, 512), (1, 1, 1000, 512), (1, 1, 40000, 512)
FOUR, STEP, FORWARD = (64, 4, 50, 128), "step", "forward"

SWEEPS = (
    # csrc/cuda
    _values(
        "kMostSplits",
        _calls(FORWARD, SHORT, LONG, WIDE, FEW, ONE, POOLING, (64, 4, 50, 512)),
        *(1, 2, 4, 8, 132, 256, 512),
    ),
    _values("kMostScores", _calls(FORWARD, (256, 1, 8192, 32)), 1024, 2048, 4096, 8192),
    # This bounds roundings: to be faster does not settle it.
    _values(
        "kMostInTurn", _calls(FORWARD, (256, 1, 4096, 128), POOLING, dtype="float32"), 64, 128, 256
    ),
    _values(
        "kRingLimit",
        [*_calls(FORWARD, (64, 1, 50, 2048), (256, 1, 400, 1024)), Call(FORWARD, LONG, "float32")],
        *(n << 10 for n in (40, 76, 112, 160)),
    ),
    # bahdanau_fast/backends/route.py
    _backends(
        "GPU_STEP_QUERIES", _calls(FORWARD, *((64, n, 50, 512) for n in (4, 8, 10, 16))), _queries
    ),
    _backends(
        "GPU_STEP_HIDDEN",
        _calls(FORWARD, *((64, 1, 50, n) for n in (512, 1024, 2048))),
        lambda call: call.sizes[3],
    ),
    _backends(
        "GPU_STEP_FEATURES",
        [Call(FORWARD, SHORT, values=n) for n in (512, 1024, 2048)],
        lambda call: call.values,
    ),
    # kernels/plans.py
    _bound(
        "_PROJECT_BYTES",
        _calls(STEP, *((64, 1, 50, n) for n in (64, 128, 256, 512)), FOUR, (256, 1, 50, 512)),
        lambda call: 2 * call.sizes[3] ** 2 * _queries(call),  # W_q in 16 bits, for each query
        _PROJECT_QUERIES=1 << 40,
    ),
    _bound(
        "_PROJECT_QUERIES",
        _calls(STEP, *((64, n, 50, 128) for n in (1, 2, 3, 4))),
        _queries,
        _PROJECT_BYTES=1 << 40,
    ),
)

# ---- what the sources say

FOLDERS, SUFFIXES = ("bahdanau_fast", "kernels", "csrc"), {".py", ".h", ".cpp", ".cu"}
PAYS, WRONG = 1.02, 0.05  # times as fast for a change; a difference that is no rounding
Times = dict[str, dict[str, float]]  # microseconds by call and way


class Constant(NamedTuple):
    """A constant, and whether its comment has the mark."""

    name: str
    place: str
    value: str = ""
    marked: bool = False


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
        marked = "not measured" in comment or bool(re.search("(#|//).*not measured", line))
        if marked and not names:
            names = [("", "")]
        found += [Constant(name, f"{path}:{number}", value, marked) for name, value in names]
        inside = inside and not line.endswith(";")
        comment = comment if inside else ""
    return found


def of_sources(root: Path = ROOT) -> list[Constant]:
    """All constants of the package and of the kernels."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    names = [path.relative_to(root).as_posix() for path in paths if path.suffix in SUFFIXES]
    return [
        found
        for name in names
        if not name.startswith("bahdanau_fast/kernels/")  # a link in a checkout
        for found in constants((root / name).read_text(encoding="utf-8"), name)
    ]


# ---- what was measured


def _problem(row: dict[str, Any]) -> str:
    if row.get("differs", 0.0) <= WRONG:
        return str(row.get("problem", ""))
    return f"its results differ by {row['differs']:.2g} of the largest number"


def slower(found: Times, chosen: dict[str, str]) -> float:
    """Times of the chosen ways, over those of the fastest, in the mean over calls."""
    return geometric_mean(of[chosen[call]] / min(of.values()) for call, of in found.items())


def candidates(sweep: Sweep, found: Times, now: float) -> dict[float, dict[str, str]]:
    """The way of each call, by the values that a constant can have."""
    if sweep.size is None:
        ways = [label for label in sweep.ways if all(label in of for of in found.values())]
        return {float(label): dict.fromkeys(found, label) for label in ways}
    sizes = {str(call): sweep.size(call) for call in sweep.calls}
    bounds = sorted({0.0, now, *sizes.values()})
    return {b: {c: WITHIN if sizes[c] <= b else BEYOND for c in found} for b in bounds}


def verdict(sweep: Sweep, found: Times, constant: Constant) -> str:
    """What to write."""
    now = float(eval(constant.value))
    whole = {call: of for call, of in found.items() if not sweep.size or len(of) == len(sweep.ways)}
    if not whole:
        return "nothing to choose from"
    chosen = candidates(sweep, whole, now)
    costs = {value: slower(whole, ways) for value, ways in chosen.items()}
    best = min(costs, key=costs.__getitem__)
    if now in costs and costs[now] < PAYS * costs[best]:
        return f"{constant.name} = {constant.value} stays"
    gain = f": {costs[now] / costs[best]:.3g} times as fast" if now in costs else ""
    return f"write {constant.name} = {best:.12g}{gain}"


def _said(constant: Constant, lines: list[dict[str, Any]]) -> Iterator[str]:
    """What the lines of a file say of a constant."""
    yield f"{constant.place}: {constant.name or 'a mark'} = {constant.value} (not measured)"
    rows, found = [line for line in lines if line.get("constant") == constant.name], Times()
    for row in rows:
        spread = row.get("cold") or row.get("graph")
        if spread and not _problem(row):
            found.setdefault(row["call"], {})[row["way"]] = 1e6 * spread["median"]
    for call, of in found.items():
        yield f"    {call}: " + ", ".join(f"{way} {us:.4g}" for way, us in of.items())
    for row in filter(_problem, rows):
        yield f"    {row['call']}: {row['way']}: {_problem(row)}"
    if found:
        (sweep,) = (sweep for sweep in SWEEPS if sweep.constant == constant.name)
        yield f"    -> {verdict(sweep, found, constant)}"
    if not any(kind in row for row in rows for kind in ("graph", "problem")):
        yield "    not timed in this file" if rows else "    not in this file"


def report(lines: list[dict[str, Any]], root: Path = ROOT) -> list[str]:
    said = []
    for line in filter(is_wrong, lines):
        kept = {k: v for k, v in line.items() if k not in ("text", "stage", "row", "said")}
        said += [f"NOT WELL: {line['row']}: {kept}", *line.get("said", [])[-2:]]
    marked = (constant for constant in of_sources(root) if constant.marked)
    return said + [text for constant in marked for text in _said(constant, lines)]


def main(path: str) -> None:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    print("\n".join(report([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main(*sys.argv[1:])
