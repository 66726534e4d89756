"""``make bench-compare BASE=<git ref>``: is this working tree slower than that commit?

The commit is checked out and built under ``build/compare``. Two processes, one for each version,
with the benchmark code of this tree, take turns sample by sample; then both are started anew,
several times. A disturbance of a round affects both, so each pair of processes gives the median of
the ratios of its rounds. The placement of pages and threads, however, differs from process to
process and stays for all rounds. The pair is therefore the unit of the statistics: the mean of the
pairs' log ratios follows Student's t distribution, and its confidence interval, at a confidence
shared out among the rows, is the noise bound.

Two versions differ if the whole interval lies beyond ``FLOOR``. Smaller differences also come from
unrelated changes (alignment, order of allocations).
"""

import argparse
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .cases import LIST, LOOP, MANY_QUERIES, MODES, SCAN, STEPS_ON_MEMORY, TOY, Mode, Shape
from .contestants import registry
from .contestants.parity import checked_call
from .measure import Timings, interleave
from .tables import markdown
from .worker import ROOT, Worker, WorkerError, where

PAIRS = 7
SECONDS = 0.8
FLOOR = 0.03
SLOWDOWN = 1.15  # the smallest slowdown that must be seen
CONFIDENCE = 0.99  # that no row of a comparison differs by chance alone
NEW, OLD = "new", "old"


class Difference(NamedTuple):
    """The new version's time over the old one's: above 1 the new one is slower; with its bounds."""

    ratio: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """``slower``, ``faster``, ``no difference``, or ``too noisy`` to see ``SLOWDOWN``."""
        if self.low > 1 + FLOOR:
            return "slower"
        if self.high < 1 / (1 + FLOOR):
            return "faster"
        seen = (SLOWDOWN / (1 + FLOOR)) ** 2  # its interval, as wide as this one, ends at the floor
        return "no difference" if self.high / self.low < seen else "too noisy"


def judge(pairs: list[Timings], rows: int = 1) -> Difference:
    """The difference in one row of so many that are compared together."""
    from scipy.stats import ttest_1samp

    logs = [math.log(pair.ratio(NEW, OLD).median) for pair in pairs]
    low, high = ttest_1samp(logs, 0.0).confidence_interval(1 - (1 - CONFIDENCE) / rows)
    return Difference(math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high))


class Comparison(NamedTuple):
    """One row: one of our providers on one shape, in both versions."""

    provider: str
    task: str
    shape: Shape
    mode: Mode = "forward"
    source: str = registry.__name__

    def __str__(self) -> str:
        return f"{self.provider}, {self.shape}, {self.task}, {MODES[self.mode]}"


_TSP = next(shape for shape in LIST if shape.name == "tsp")
ROWS = (
    *(Comparison("ours memory", "step", shape) for shape in STEPS_ON_MEMORY),
    Comparison("ours module", "loop", LOOP),
    Comparison("ours op", "scan", SCAN),
    Comparison("ours op", "projected", MANY_QUERIES[0]),
    Comparison("ours op", "projected", MANY_QUERIES[0], "train"),
    Comparison("ours module", "full", MANY_QUERIES[0], "train"),
    Comparison("ours module", "full", _TSP, "train"),
    Comparison("ours module", "full", TOY),
    Comparison("ours module", "full", TOY, "train"),
)


def _run(*command: str, folder: Path = ROOT, **variables: str) -> str:
    """What a command prints, or ValueError with its last line."""
    env = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError((done.stderr.strip().splitlines() or [f"{command[0]} failed"])[-1])
    return done.stdout.strip()


def build(ref: str) -> Path:
    """The folder of a commit's package, checked out and built unless an earlier run did."""
    commit = _run("git", "rev-parse", "--verify", "--short=12", f"{ref}^{{commit}}")
    folder = ROOT / "build" / "compare" / commit
    source, built = folder / "source", folder / "built"
    if not (built / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run("git", "archive", "--output", f"{source}.tar", commit)
        shutil.unpack_archive(f"{source}.tar", source)
        shutil.copytree(source / "bahdanau_fast", built / "bahdanau_fast")
        shutil.copytree(source / "kernels", built / "bahdanau_fast" / "kernels")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(built)]
        _run(*command, folder=source, BAHDANAU_FAST_CPU="1", BAHDANAU_FAST_CUDA="0")
        (built / "done").touch()
    return built


@contextmanager
def _started(sides: dict[str, Path], names: Sequence[str]) -> Iterator[dict[str, Worker]]:
    """A process of each version, started in the order of the names."""
    with ExitStack() as stack:
        workers = {n: stack.enter_context(Worker(folder=sides[n])) for n in names}
        for name, worker in workers.items():
            found = worker.make(where)
            if not found.samefile(sides[name]):
                raise WorkerError(f"{name} was to be found in {sides[name]}: {found}")
        yield workers


def _timed(workers: dict[str, Worker], row: Comparison, seconds: float) -> Timings | str:
    """The timings of a row, or why there are none."""
    try:
        for name, worker in workers.items():
            given = row.source, row.provider, row.task, row.shape, row.mode
            found = worker.make(checked_call, *given)
            if not found.passed:
                share = f"{found.worst:.3g} of the allowed error"
                return f"{name} fails parity, {found.where}: {share}"
        return interleave(dict(workers), seconds)
    except WorkerError as problem:
        return str(problem)


def compare(
    sides: dict[str, Path], rows: Sequence[Comparison], pairs: int = PAIRS, seconds: float = SECONDS
) -> tuple[dict[Comparison, Difference], dict[Comparison, str]]:
    """The difference in each row, or why a row could not be compared.

    Both ``sides``, the folders of ``new`` and ``old``, are started ``pairs`` times; each time, a
    row is timed for ``seconds``. One that does not start from its folder is a WorkerError.
    """
    timings: dict[Comparison, list[Timings]] = {row: [] for row in rows}
    problems: dict[Comparison, str] = {}
    order = random.Random(0)
    for _ in range(pairs):
        # The process that starts first must not always be the same version.
        with _started(sides, order.sample(sorted(sides), len(sides))) as workers:
            for row in rows:
                result = _timed(workers, row, seconds)
                if isinstance(result, str):
                    problems[row] = result
                else:
                    timings[row].append(result)
    compared = {row: of for row, of in timings.items() if row not in problems}
    return {row: judge(of, len(rows)) for row, of in compared.items()}, problems


def lines(verdicts: dict[Comparison, Difference], problems: dict[Comparison, str]) -> list[str]:
    """The table, the rows that were not compared, and a summary."""
    cells = [
        [str(row), f"{v.ratio:.3f}", f"{v.low:.3f} to {v.high:.3f}", v.word]
        for row, v in verdicts.items()
    ]
    table = markdown(["row", "new / old", f"bounds at {CONFIDENCE:.0%}", "verdict"], cells)
    table += [f"not compared: {row}: {problem}" for row, problem in problems.items()]
    words = Counter(verdict.word for verdict in verdicts.values())
    summed = ", ".join(f"{count} {word}" for word, count in words.items())
    return [*table, "", f"{summed or 'nothing compared'}; less than {FLOOR:.0%} is not called"]


def main() -> int:
    """Compare and print; 1 if a row is slower or was not compared, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", help="a git commit, branch or tag")
    options = parser.parse_args()
    try:
        sides = {OLD: build(options.base), NEW: ROOT}
        print(f"old: {options.base}; new: the working tree; {PAIRS} pairs of processes\n")
        verdicts, problems = compare(sides, ROWS)
    except (OSError, ValueError, WorkerError) as error:
        print(f"bench-compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(verdicts, problems)))
    return 1 if problems or any(verdict.word == "slower" for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
