"""Runs every case on every kernel of both backends and writes the tables of docs/ptx.md.

``python tests/ptx/table.py [cuda] [triton]`` (``make ptx``) ends with 1 if a case fails or a kernel
never ran. What cases gave is kept in build/ptx/table.json: a run that was stopped goes on where it
was, until the sources change.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), *(str(HERE.parent / name) for name in ("ptx", "support", "cuda/host"))]

# ruff: noqa: E402
import torch
import triton
from cases import DTYPES, ROWS, STEPS, Drivers, measure_row, measure_step
from driven import ARCHS
from machine import build
from machine.parse import Module
from tritoned import TritonPtx, kernels

from benchmarks.machine_code.cuda import KINDS, Kernel

PAGE = ROOT / "docs" / "ptx.md"
KEPT = ROOT / "build" / "ptx" / "table.json"
PACKAGE = ROOT / "bahdanau_fast"
SUPPORT = HERE.parent / "support"


@dataclass(frozen=True)
class Backend:
    """Whose kernels are run.

    Attributes:
        archs: architectures.
        dtypes: keys of DTYPES.
        start: Drivers, or what does the same, for an architecture.
        places: (kind, entry) of all that an architecture has.
        sources: files that decide about the results, beside those of the machine and the cases.
    """

    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    start: Callable
    places: Callable
    sources: tuple[Path, ...]

    def cases(self, dtype):
        """(name, function) of every case that a dtype has."""
        for row in ROWS:
            yield row, measure_row
        for name, step in STEPS.items():
            if step.Dk is None or dtype in ("bf16", "fp16"):
                yield name, measure_step

    def version(self):
        """What tells these sources from others."""
        common = HERE / "machine", HERE / "cases.py", SUPPORT / "contract.py", SUPPORT / "parity.py"
        files = [
            file
            for path in (*common, *self.sources)
            for file in ([path] if path.is_file() else path.rglob("*.*"))
            if file.suffix in (".py", ".h", ".cpp", ".cu")
        ]
        read = b"".join(path.read_bytes() for path in sorted(files))
        return hashlib.sha256(triton.__version__.encode() + read).hexdigest()[:16]


def cuda_places(arch):
    return {(kind, entry) for kind in KINDS for entry in Module(build.ptx(kind, arch)).names}


def triton_places(_arch):
    """Every kernel for every kind but fp64; what sums in fp64 reads no tables."""
    kinds = [kind for kind in KINDS if kind != "f64"]
    places = {(kind, name) for kind in kinds for name in kernels()}
    return places - {("f32_in_f64", "tables_kernel")}


BACKENDS = {
    "cuda": Backend(
        tuple(ARCHS), tuple(DTYPES), Drivers, cuda_places,
        (build.SOURCES / "cuda", build.SOURCES / "common", HERE / "driven.py", HERE / "driver",
         HERE.parent / "cuda" / "host" / "cuda_on_host"),
    ),
    "triton": Backend(
        ("80", "90"), ("fp32", "bf16", "fp16"), TritonPtx, triton_places,
        (ROOT / "kernels", PACKAGE / "backends" / "triton", PACKAGE / "limits.py",
         HERE / "tritoned.py"),
    ),
}  # fmt: skip


class Kept:
    """Results of a backend's cases, by name, written after each."""

    def __init__(self, name, backend):
        self.name, self.of = name, backend.version()
        stored = self._stored().get(name, {})
        self.cases = stored["cases"] if stored.get("of") == self.of else {}

    @staticmethod
    def _stored():
        return json.loads(KEPT.read_text()) if KEPT.exists() else {}

    def add(self, case, result):
        self.cases[case] = result
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        stored = self._stored() | {self.name: {"of": self.of, "cases": self.cases}}
        KEPT.write_text(json.dumps(stored, indent=1))


def attempt(running, function, name, dtype):
    """A case's share and the entries that it ran; or why it failed."""
    try:
        share = function(running, name, dtype)
        return {"share": share, "entries": sorted(running.took())}
    except Exception as error:
        return {"failed": f"{error}"}


def run(backend, arch, kept):
    """All cases of an architecture that are not kept yet."""
    for dtype in backend.dtypes:
        running = backend.start(arch)
        for name, function in backend.cases(dtype):
            case = f"sm_{arch} {dtype} {name}"
            if "share" in kept.cases.get(case, {}):
                continue
            start = time.time()
            result = attempt(running, function, name, dtype)
            kept.add(case, {**result, "seconds": round(time.time() - start)})
            print(case, kept.cases[case], flush=True)
            if "failed" in result:
                running = backend.start(arch)
        running.close()


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
    yield "| entry | " + " | ".join(f"sm_{arch}: cases | worst share" for arch in results) + " |"
    yield "|---" * (1 + 2 * len(results)) + "|"
    entries = sorted(
        {place for found in results.values() for place in found}, key=lambda e: short(*e)
    )
    for place in entries:
        cells = [short(*place)]
        for found in results.values():
            shares = found.get(place, [])
            cells += [str(len(shares)), f"{max(shares):.2f}" if shares else "-"]
        yield f"| {' | '.join(cells)} |"


def write(name, results):
    """Put a backend's table where the page has its mark."""
    table = f"<!-- make ptx: {name} -->\n\n" + "".join(f"{line}\n" for line in lines(results))
    place = re.compile(rf"<!-- make ptx: {name} -->\n\n(\|.*\n)*")
    page, count = place.subn(lambda _: table, PAGE.read_text())
    assert count == 1, f"{PAGE} has {count} places for the table of {name}"
    PAGE.write_text(page)


def main(names):
    torch.set_num_threads(1)  # the machine has one, too
    wrong = []
    for name in names or BACKENDS:
        backend = BACKENDS[name]
        kept, results = Kept(name, backend), {}
        for arch in backend.archs:
            run(backend, arch, kept)
            results[arch] = shares_of(arch, kept)
            absent = backend.places(arch) - results[arch].keys()
            wrong += [f"sm_{arch} {short(*place)} never ran" for place in sorted(absent)]
        wrong += [case for case, result in kept.cases.items() if "failed" in result]
        write(name, results)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
