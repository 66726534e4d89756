"""Runs every case on every entry of csrc/cuda and writes the table of docs/ptx.md.

``python tests/ptx/table.py`` (``make ptx``) ends with 1 if a case fails. What cases gave is kept in
build/ptx/table.json: a run that was stopped goes on where it was, until the sources change.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
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
KEPT = ROOT / "build" / "ptx" / "table.json"
MARK = "<!-- make ptx writes what follows -->\n"


def cases(dtype):
    """(name, function) of every case that a dtype has."""
    for row in ROWS:
        yield row, measure_row
    for name, step in STEPS.items():
        if step.Dk is None or dtype in ("bf16", "fp16"):
            yield name, measure_step


def sources():
    """What tells the sources of the kernels and of this machine from others."""
    files = [*build.SOURCES.rglob("*.h"), *build.SOURCES.rglob("*.cu"), *HERE.rglob("*.[hcp]*")]
    read = b"".join(path.read_bytes() for path in sorted(files) if path.suffix != ".pyc")
    return hashlib.sha256(read).hexdigest()[:16]


class Kept:
    """Results of cases, by name, written after each."""

    def __init__(self):
        self.of, self.cases = sources(), {}
        if KEPT.exists():
            stored = json.loads(KEPT.read_text())
            self.cases = stored["cases"] if stored["of"] == self.of else {}

    def add(self, name, result):
        self.cases[name] = result
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps({"of": self.of, "cases": self.cases}, indent=1))


def attempt(drivers, function, name, dtype):
    """A case's share and the entries that it ran; or why it failed."""
    try:
        share = function(drivers, name, dtype)
        return {"share": share, "entries": sorted(drivers.took())}
    except Exception as error:
        return {"failed": f"{error}"}


def run(arch, kept):
    """All cases of an architecture that are not kept yet."""
    for dtype in DTYPES:
        drivers = Drivers(arch)
        for name, function in cases(dtype):
            case = f"sm_{arch} {dtype} {name}"
            if "share" in kept.cases.get(case, {}):
                continue
            start = time.time()
            result = attempt(drivers, function, name, dtype)
            kept.add(case, {**result, "seconds": round(time.time() - start)})
            print(case, kept.cases[case], flush=True)
            if "failed" in result:
                drivers = Drivers(arch)
        drivers.close()


def shares_of(arch, kept):
    """(kind, entry) -> the shares of an architecture's cases that ran it."""
    found = defaultdict(list)
    for case, result in kept.cases.items():
        for kind, entry in result.get("entries", ()) if case.startswith(f"sm_{arch} ") else ():
            found[kind, entry].append(result["share"])
    return found


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
            shares = results[arch].get(place, [])
            cells += [str(len(shares)), f"{max(shares):.2f}" if shares else "-"]
        yield f"| {' | '.join(cells)} |"


def main():
    kept, results, absent = Kept(), {}, []
    for arch in ARCHS:
        run(arch, kept)
        results[arch] = shares_of(arch, kept)
        for kind in KINDS:
            for entry in Module(build.ptx(kind, arch)).names:
                if (kind, entry) not in results[arch]:
                    absent.append(f"sm_{arch} {short(kind, entry)} never ran")
    failed = [case for case, result in kept.cases.items() if "failed" in result]
    print("\n".join(absent + failed))
    head = re.split(re.escape(MARK), PAGE.read_text())[0]
    PAGE.write_text(head + MARK + "\n" + "\n".join(lines(results)) + "\n")
    return 1 if failed or absent else 0


if __name__ == "__main__":
    sys.exit(main())
