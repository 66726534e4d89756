"""``python -m benchmarks.gpu.decide FILE``: what an hour says of each constant of the GPU code.

FILE has the lines of ``make gpu-hour``. First comes what did not go well; then every constant that
the code marks as not measured, and the others that were timed: microseconds of each call, with no
input in the L2 where it has one query, and what to write where.

:data:`SWEEPS` has what decides a constant: it is timed at several values; or, where it bounds a
size, with calls within it and beyond it, whatever their size. Names are those of the sources.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..worker import ROOT
from . import is_wrong

ALL, NONE = 1 << 40, 0  # a bound that everything is within, and one that nothing is
WITHIN, BEYOND = "within", "beyond"
Sizes = tuple[int, int, int, int]


class Call(NamedTuple):
    """A call by B, Tq, Tk and H; of a decoder T in place of Tq."""

    what: str  # a key of lab.CALLS
    sizes: Sizes
    dtype: str = "bfloat16"
    values: int = 0  # their columns, where those are not H

    def __str__(self) -> str:
        columns = f", values of {self.values}" if self.values else ""
        return f"{str(self.sizes).replace(' ', '')}{columns}, {self.what}, {self.dtype}"


class Way(NamedTuple):
    """A backend, and constants that are set there; of a function of kernels/plans.py, its tile."""

    backend: str
    settings: dict[str, Any]


class Sweep(NamedTuple):
    """Ways to compute the same calls, by what the rows call them.

    Attributes:
        constant: what they decide.
        size: of a call, where the ways are within and beyond the constant.
        least: whether sizes from the constant on are beyond it, and not those above.
    """

    constant: str
    calls: list[Call]
    ways: dict[str, Way]
    size: Callable[[Call], float] | None = None
    least: bool = False


def _calls(what: str, *sizes: Sizes, **more: Any) -> list[Call]:
    return [Call(what, of, **more) for of in sizes]


def _values(backend: str, name: str, calls: list[Call], *values: int) -> Sweep:
    return Sweep(name, calls, {str(value): Way(backend, {name: value}) for value in values})


def _bound(
    backend: str, name: str, calls: list[Call], size: Callable[[Call], float], **also: int
) -> Sweep:
    bounds = {WITHIN: ALL, BEYOND: NONE}
    ways = {label: Way(backend, also | {name: bound}) for label, bound in bounds.items()}
    return Sweep(name, calls, ways, size)


def _backends(name: str, calls: list[Call], size: Callable[[Call], float]) -> Sweep:
    return Sweep(name, calls, {WITHIN: Way("cuda", {}), BEYOND: Way("triton", {})}, size)


def _tiles(function: str, calls: list[Call], names: str, *tiles: tuple[int, ...]) -> Sweep:
    found = [dict(zip(names.split(), of, strict=True)) for of in tiles]
    labels = (", ".join(f"{name} {n}" for name, n in tile.items()) for tile in found)
    # By Fourier sums, also where a dry run makes calls small.
    ways = (Way("triton", {function: tile, "_TANH_PER_FOURIER": ALL}) for tile in found)
    return Sweep(function, calls, dict(zip(labels, ways, strict=True)))


def _queries(call: Call) -> int:
    return call.sizes[1]


def _weight(call: Call) -> int:
    """Bytes of W_q in 16 bits."""
    return 2 * call.sizes[3] ** 2


def _read(call: Call) -> int:
    """Bytes of W_q, times the queries."""
    return _queries(call) * _weight(call)


def _attended(call: Call) -> int:
    """Numbers that a block of 128 attends to."""
    return -(-call.sizes[0] // 128) * call.sizes[2] * call.sizes[3]


def _fourier(call: Call) -> float:
    """What `pays_by_fourier` bounds, beside its own constant."""
    _, queries, keys, _ = call.sizes
    of_queries, of_keys = (-(-n // 64) * 64 for n in (queries, keys))
    return (2 * of_queries * of_keys + 256 * (of_queries + of_keys)) / (2 * queries * keys)


SHORT, LONG, WIDE = (64, 1, 50, 512), (64, 1, 400, 512), (256, 1, 400, 512)
FEW, ONE, POOLING = (16, 1, 400, 512), (1, 1, 1000, 512), (1, 1, 40000, 512)
LARGE, SMALL, SENTENCES = (16, 512, 512, 512), (4, 128, 128, 512), (32, 33, 34, 1024)
NARROW = [(64, 1, 50, n) for n in (64, 128, 256, 512)]
BEAMS = [(64, n, 50, 128) for n in (1, 2, 3, 4)]
DECODERS = (
    *((64, 10, 50, 512), (64, 50, 50, 512), (128, 12, 200, 512), (16, 12, 400, 512)),
    *((64, 12, 400, 512), (8, 12, 1000, 512), (4, 12, 2000, 512)),
)
MANY = (
    *(LARGE, SMALL, SENTENCES, (64, 50, 50, 512), (64, 100, 100, 512), (64, 128, 128, 512)),
    *((16, 64, 512, 512), (16, 100, 512, 512)),
)
STEP, FORWARD, BACKWARD = "step", "forward", "backward"
FOURIER = "BLOCK_H BLOCK_O BLOCK_R STAGES num_warps"
TERMS = "BLOCK_Q BLOCK_K num_warps STAGES splits"

SWEEPS = (
    # csrc/cuda
    _bound("cuda", "kMostAttended", _calls("decoder, forward + backward", *DECODERS), _attended),
    _bound(
        *("cuda", "kOwnWeight"),
        _calls(STEP, *NARROW, (1, 1, 50, 256), (256, 1, 50, 128)),
        lambda call: _weight(call) / 8,  # blocks of a cluster
    ),
    _bound("cuda", "kSharedWeight", _calls(STEP, *NARROW), _weight, kOwnWeight=ALL)._replace(
        least=True
    ),
    _values(
        *("cuda", "kMostSplits"),
        _calls(FORWARD, SHORT, LONG, WIDE, FEW, ONE, POOLING, (64, 4, 50, 512)),
        *(1, 2, 4, 8, 132, 256, 512),
    ),
    _values("cuda", "kMostScores", _calls(FORWARD, (256, 1, 8192, 32)), 1024, 2048, 4096, 8192),
    # This bounds roundings: to be faster does not settle it.
    _values(
        *("cuda", "kMostInTurn"),
        _calls(FORWARD, (256, 1, 4096, 128), POOLING, dtype="float32"),
        *(64, 128, 256),
    ),
    _values(
        *("cuda", "kRingLimit"),
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
        *("triton", "_PROJECT_BYTES"),
        _calls(STEP, *NARROW, (64, 4, 50, 128), (256, 1, 50, 512)),
        _read,
        _PROJECT_QUERIES=ALL,
    ),
    _bound("triton", "_PROJECT_QUERIES", _calls(STEP, *BEAMS), _queries, _PROJECT_BYTES=ALL),
    _bound("triton", "_TANH_PER_FOURIER", _calls(BACKWARD, *MANY), _fourier),
    _tiles(
        *("grad_fourier", _calls(BACKWARD, LARGE, (16, 128, 128, 512)), FOURIER),
        *((8, 64, 128, 1, 8), (8, 64, 128, 2, 8), (4, 64, 128, 3, 8)),
        *((8, 64, 64, 2, 4), (8, 128, 128, 2, 8), (16, 32, 64, 2, 4)),
    ),
    _tiles(
        *("rational_terms", _calls(FORWARD, LARGE), TERMS),
        *((64, 64, 4, 3, 1), (64, 64, 4, 2, 1), (64, 128, 8, 3, 1), (128, 64, 8, 3, 1)),
    ),
    _tiles(
        *("rational_terms", _calls(FORWARD, SMALL, SENTENCES), TERMS),
        *((16, 64, 4, 3, 4), (16, 64, 4, 3, 8), (16, 32, 4, 3, 4), (64, 64, 4, 3, 8)),
    ),
    _values("triton", "WHOLE_TILES", _calls(BACKWARD, LARGE, SENTENCES), 64, 128),
    _values(
        *("triton", "_SCRATCH", _calls("forward without weights", (64, 512, 1024, 256))),
        *(n << 20 for n in (32, 64, 128, 256)),
    ),
    _values(
        *("triton", "_TERM_BYTES", _calls("forward without weights", (256, 100, 400, 1024))),
        *(n << 20 for n in (128, 256, 512)),
    ),
    _values("triton", "_GRAD_KEYS", _calls(BACKWARD, ONE), 4, 8, 16, 32),
    _values("triton", "_MOST_IN_TURN", _calls(FORWARD, POOLING, dtype="float32"), 128, 256),
    _values(
        *("triton", "FEATURE_QUERIES"),
        _calls("forward, 32 features", *((64, n, 200, 128) for n in (2, 3, 4))),
        *(0, 2, 4),
    ),
)

# ---- what the sources say

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
