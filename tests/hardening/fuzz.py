"""Coverage-guided fuzzing of the C++ entry points: ``python tests/hardening/fuzz.py``.

The extension is built with GCC's -fsanitize-coverage=trace-pc (libFuzzer and fuzzers built on it
want clang, which a machine that builds this package need not have). A case is a string of bytes,
which the files in fuzzing/ turn into a call. Cases that reach a new
place of the C++ are kept and changed further. Every run of the suite plays cases of chance.
"""

import argparse
import ctypes
import importlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent / "fuzzing"
LONGEST = 128
# Its share of a hundred cases, and the module in fuzzing/ that holds its function.
TARGETS = {
    "attend": (30, "attention_points"),
    "scores": (4, "attention_points"),
    "location": (7, "attention_points"),
    "raw": (22, "attention_points"),
    "pool": (7, "attention_points"),
    "project": (5, "attention_points"),
    "decode": (15, "decoder_points"),
    "greedy": (10, "decoder_points"),
}


def function_of(target):
    """What runs a case: bytes to "refused", "checked" or "ran"."""
    return getattr(importlib.import_module(f"fuzzing.{TARGETS[target][1]}"), target)


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
    """The places reached so far, as fuzzing/coverage.c marks them."""

    def __init__(self, library):
        library.coverage_map.restype = ctypes.POINTER(ctypes.c_uint8 * (1 << 16))
        self.map = library.coverage_map().contents
        ctypes.memset(self.map, 0, 1 << 16)
        self.reached = 0

    def grew(self):
        """Whether a new place was reached since the last call."""
        now = bytes(self.map).count(1)
        before, self.reached = self.reached, now
        return now > before


def fuzz(target, cases, minutes, seed, coverage, last):
    """Cases of one target; a row for the table.

    Each case is in the file ``last`` before it runs, for those that end the process.
    """
    one, draw = function_of(target), random.Random(seed)
    start, kinds, kept = time.time(), Counter(), []
    todo = [draw.randbytes(LONGEST) for _ in range(64)]
    tried = 0
    while tried < cases and time.time() - start < 60 * minutes:
        data = todo.pop() if todo else change(draw.choice(kept), kept, draw)
        tried += 1
        last.write_text(f"{target} {data.hex()}")
        try:
            kinds[one(data)] += 1
        except Exception as error:
            kinds["wrong"] += 1
            print(f"WRONG {target} {data.hex()}: {type(error).__name__} {error}", flush=True)
            if kinds["wrong"] >= 20:
                break
        if coverage.grew():
            kept.append(data)
    row = {"target": target, "cases": tried}
    row |= {kind: kinds[kind] for kind in ("checked", "ran", "refused", "wrong")}
    row |= {"places": coverage.reached, "kept": len(kept)}
    row["minutes"] = round((time.time() - start) / 60, 1)
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def inside(arguments):
    """In the process that has the instrumented build; exit status."""
    library = ctypes.CDLL(os.environ["BAHDANAU_FAST_COVERAGE"], mode=ctypes.RTLD_GLOBAL)
    import torch

    import bahdanau_fast._C_cpu  # noqa: F401  after the library whose function it calls

    torch.set_num_threads(1)
    last, rows = Path(os.environ["BAHDANAU_FAST_LAST_CASE"]), []
    for target, (share, _) in TARGETS.items():
        cases, minutes = arguments.cases * share // 100, arguments.minutes * share / 100
        rows.append(fuzz(target, cases, minutes, arguments.seed, Coverage(library), last))
    last.unlink()
    if arguments.json is not None:
        build.write(arguments.json, {"seed": arguments.seed, "targets": rows})
    tried, wrong = (sum(row[name] for row in rows) for name in ("cases", "wrong"))
    minutes = sum(row["minutes"] for row in rows)
    print(f"{tried} cases in {minutes:.1f} minutes, {wrong} wrong, seed {arguments.seed}")
    return int(wrong > 0 or tried < arguments.cases)


def main():
    """Build, then fuzz in a process of its own; 1 where something is wrong or time was short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40_000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=lambda path: Path(path).resolve(), help="write figures there"
    )
    arguments = parser.parse_args()
    if "BAHDANAU_FAST_COVERAGE" in os.environ:
        return inside(arguments)
    folder = build.lay_out("fuzz", "-fsanitize-coverage=trace-pc -g1 -O1")
    library, last = folder / "libcoverage.so", folder / "last-case"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", str(HERE / "coverage.c"), "-o", str(library)], check=True
    )
    environment = build.environment(
        folder, BAHDANAU_FAST_COVERAGE=str(library), BAHDANAU_FAST_LAST_CASE=str(last)
    )
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment, check=False)
    if done.returncode < 0:
        print(f"ended by signal {-done.returncode} at: {last.read_text()}", flush=True)
    return 1 if done.returncode < 0 else done.returncode


if __name__ == "__main__":
    sys.exit(main())
