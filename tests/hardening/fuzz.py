"""Coverage-guided fuzzing of the C++ entry points: ``make fuzz``.

The extension is built with GCC's -fsanitize-coverage=trace-pc (libFuzzer and what stands on it want
clang, which a machine that builds this package need not have). Cases are bytes (entry_points.py):
those that reach a new place of the C++ are kept and changed further. Kept for good are the seeds in
tests/hardening/seeds, the ones that reach it all, which every run of the suite plays again.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent
SEEDS = HERE / "seeds"
LONGEST = 96


def change(data, others, draw):
    """Another case made of this one."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(data)) if data else 0
        what = draw.randrange(5)
        if what == 0 and data:
            data[at] = draw.randrange(256)
        elif what == 1 and data:
            data[at] = (data[at] + draw.choice((-1, 1))) % 256
        elif what == 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 5))
        elif what == 3 and data:
            del data[at : at + draw.randrange(1, 5)]
        else:
            other = draw.choice(others)
            data[at:] = other[at:]
    return bytes(data[:LONGEST])


class Coverage:
    """The places reached so far, as coverage.c marks them."""

    def __init__(self, library):
        self.map = (ctypes.c_uint8 * (1 << 16)).from_address(
            ctypes.cast(_function(library, "coverage_map")(), ctypes.c_void_p).value
        )
        self.reached = 0

    def grew(self):
        """Whether a new place was reached since the last call."""
        now = bytes(self.map).count(1)
        before, self.reached = self.reached, now
        return now > before


def _function(library, name):
    function = getattr(library, name)
    function.restype = ctypes.c_void_p
    return function


def fuzz(cases, minutes, seed, keep):
    """Run in the process that has the instrumented build; exit status."""
    library = ctypes.CDLL(os.environ["BAHDANAU_FAST_COVERAGE"], mode=ctypes.RTLD_GLOBAL)
    import entry_points
    import torch

    import bahdanau_fast._C_cpu  # noqa: F401  after the library whose function it calls

    torch.set_num_threads(1)
    coverage, draw = Coverage(library), random.Random(seed)
    known = [path.read_bytes() for path in sorted(SEEDS.glob("*"))]
    start, kinds, kept = time.time(), Counter(), []
    todo = known + [draw.randbytes(LONGEST) for _ in range(64)]
    tried = 0
    while tried < cases and time.time() - start < 60 * minutes:
        data = todo.pop() if todo else change(draw.choice(kept or known), kept or known, draw)
        tried += 1
        try:
            kinds[entry_points.one(data)] += 1
        except Exception as error:
            kinds["wrong"] += 1
            print(f"WRONG {data.hex()}: {type(error).__name__} {error}", flush=True)
            if kinds["wrong"] >= 20:
                break
        if coverage.grew():
            kept.append(data)
        if tried % 2000 == 0:
            print(f"{tried} cases, {coverage.reached} places, {len(kept)} kept", flush=True)
    if keep:
        write_seeds(kept)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{tried} cases in {(time.time() - start) / 60:.1f} minutes: {told}; ", end="")
    print(f"{coverage.reached} places reached, {len(kept)} cases kept, seed {seed}", flush=True)
    return 1 if kinds["wrong"] else 0


def write_seeds(kept):
    """The cases that reached something new, into the tree."""
    SEEDS.mkdir(exist_ok=True)
    for old in SEEDS.glob("*"):
        old.unlink()
    for number, data in enumerate(kept):
        (SEEDS / f"{number:03}").write_bytes(data)


def main():
    """Build, then fuzz in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=25_000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the seeds of the tree anew")
    arguments = parser.parse_args()
    if "BAHDANAU_FAST_COVERAGE" in os.environ:
        return fuzz(arguments.cases, arguments.minutes, arguments.seed, arguments.keep)
    folder = build.lay_out("fuzz", "-fsanitize-coverage=trace-pc -g1 -O1")
    library = folder / "libcoverage.so"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", str(HERE / "coverage.c"), "-o", str(library)], check=True
    )
    environment = build.environment(folder, BAHDANAU_FAST_COVERAGE=str(library))
    command = [sys.executable, __file__, *sys.argv[1:]]
    return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
