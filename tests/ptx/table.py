"""Runs every case on every entry of csrc/cuda and writes the table of docs/ptx.md.

``python tests/ptx/table.py`` (``make ptx``) ends with 1 if a case fails.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), *(str(HERE.parent / name) for name in ("ptx", "support", "cuda/host"))]

# ruff: noqa: E402
from cases import DTYPES, ROWS, STEPS, Drivers, measure_row, measure_step
from driven import ARCHS
from machine import build
from machine.parse import Module

from benchmarks.machine_code.cuda import KINDS, Kernel

PAGE = ROOT / "docs" / "ptx.md"
MARK = "<!-- make ptx writes what follows -->\n"


def cases(dtype):
    """(name, function) of every case that a dtype has."""
    for row in ROWS:
        yield row, measure_row
    for name, step in STEPS.items():
        if step.Dk is None or dtype in ("bf16", "fp16"):
            yield name, measure_step


def run(arch, found):
    """All cases of an architecture into (kind, entry) -> shares; what failed."""
    failed = []
    for dtype in DTYPES:
        drivers = Drivers(arch)
        for name, function in cases(dtype):
            try:
                share = function(drivers, name, dtype)
                if share > 1:
                    print(f"sm_{arch} {dtype} {name}: {share:.3f} of what is allowed", flush=True)
                for place in drivers.took():
                    found[place].append(share)
            except Exception as error:
                failed.append(f"sm_{arch} {dtype} {name}: {error}")
                print(failed[-1], flush=True)
                drivers = Drivers(arch)
        print(f"sm_{arch} {dtype} done", flush=True)
    return failed


def short(kind, entry):
    """An entry as the table names it: function, template numbers, kind of numbers."""
    kernel = Kernel(entry, kind, "", 0, 0, 0)
    return f"`{kernel.name}` {KINDS[kind]}"


def lines(results):
    """The table: an entry a line, cases and the worst share by architecture."""
    yield "| entry | " + " | ".join(f"sm_{arch}: cases | worst share" for arch in ARCHS) + " |"
    yield "|---" * (1 + 2 * len(ARCHS)) + "|"
    entries = sorted(
        {place for found in results.values() for place in found}, key=lambda e: short(*e)
    )
    for place in entries:
        cells = [short(*place)]
        for arch in ARCHS:
            shares = results[arch][place]
            cells += [str(len(shares)), f"{max(shares):.2f}" if shares else "-"]
        yield f"| {' | '.join(cells)} |"


def main():
    results, failed, absent = {}, [], []
    for arch in ARCHS:
        results[arch] = defaultdict(list)
        failed += run(arch, results[arch])
        for kind in KINDS:
            for entry in Module(build.ptx(kind, arch)).names:
                if not results[arch][kind, entry]:
                    absent.append(f"sm_{arch} {short(kind, entry)} never ran")
    print("\n".join(absent))
    head = re.split(re.escape(MARK), PAGE.read_text())[0]
    PAGE.write_text(head + MARK + "\n" + "\n".join(lines(results)) + "\n")
    return 1 if failed or absent else 0


if __name__ == "__main__":
    sys.exit(main())
