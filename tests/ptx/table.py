"""``make ptx``: every case on every kernel of both GPU backends, as machine code.

``python tests/ptx/table.py [cuda] [triton]`` prints a row for each kernel with the worst share of
what the parity rule allows, and ends with 1 if a case fails or a kernel never ran. Those of both
backends are written to benchmarks/results/ptx.csv. What cases gave is kept in build/ptx: a run that
was stopped goes on where it was, until the sources change.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
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
from cases import DTYPES, ROWS, STEPS, measured
from driven import ARCHS, CudaPtx
from machine import build
from machine.parse import Module
from tritoned import TritonPtx, kernels

from benchmarks.machine_code.cuda import KINDS, Kernel

RESULTS = ROOT / "benchmarks" / "results" / "ptx.csv"
KEPT = ROOT / "build" / "ptx"
COLUMNS = ("backend", "arch", "kernel", "numbers", "cases", "worst share")
# What decides about the results of either backend.
SOURCES = (HERE, HERE.parent / "cuda" / "host", HERE.parent / "support")


@dataclass(frozen=True)
class Backend:
    """Whose kernels are run.

    Attributes:
        archs: architectures.
        dtypes: keys of DTYPES.
        start: gives what runs the kernels of an architecture.
        places: (kind, entry) of all that an architecture has.
        sources: folders that decide about the results.
    """

    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    start: Callable
    places: Callable
    sources: tuple[Path, ...]

    def cases(self):
        """(arch, dtype, name) of every case: steps that project keys have 16 bits."""
        for arch in self.archs:
            for dtype in self.dtypes:
                for name in (*ROWS, *STEPS):
                    step = STEPS.get(name)
                    if step is None or step.Dk is None or dtype in ("bf16", "fp16"):
                        yield arch, dtype, name

    def kept(self):
        """The file of what cases gave, for these sources."""
        folders = (*SOURCES, *self.sources)
        files = {file for folder in folders for file in folder.rglob("*.*")}
        code = (".py", ".h", ".cpp", ".cu")
        read = [file.read_bytes() for file in sorted(files) if file.suffix in code]
        known = hashlib.sha256(b"".join([triton.__version__.encode(), *read])).hexdigest()
        return KEPT / f"table-{known[:16]}.jsonl"


def cuda_places(arch):
    return {(kind, entry) for kind in KINDS for entry in Module(build.ptx(kind, arch)).names}


def triton_places(_arch):
    """Every kernel for every kind but fp64; what sums in fp64 reads no tables."""
    kinds = [kind for kind in KINDS if kind != "f64"]
    places = {(kind, name) for kind in kinds for name in kernels()}
    return places - {("f32_in_f64", "tables_kernel")}


BACKENDS = {
    "cuda": Backend(
        ARCHS, tuple(DTYPES), CudaPtx, cuda_places,
        (build.SOURCES / "cuda", build.SOURCES / "common"),
    ),
    "triton": Backend(
        ("80", "90"), ("fp32", "bf16", "fp16"), TritonPtx, triton_places,
        (ROOT / "kernels", ROOT / "bahdanau_fast"),
    ),
}  # fmt: skip


def run(backend):
    """(case, result) of every case: its share and the entries that it ran, or why it failed."""
    path, running, at = backend.kept(), None, None
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    known = {tuple(case): result for case, result in map(json.loads, lines)}
    for case in backend.cases():
        arch, dtype, name = case
        if "share" not in known.get(case, {}):
            if at != (arch, dtype):
                running, at = backend.start(arch), (arch, dtype)
            try:
                share = measured(running, name, dtype)
                known[case] = {"share": share, "entries": sorted(running.took())}
            except Exception as error:
                known[case], running, at = {"failed": f"{error}"}, None, None
            with path.open("a") as file:
                file.write(json.dumps([case, known[case]]) + "\n")
            print(*case, known[case].get("share", known[case]), file=sys.stderr, flush=True)
        yield case, known[case]


def name_of(kind, entry):
    """An entry as rows name it: function with template number, and kind of numbers."""
    return Kernel(entry, kind, "", 0, 0, 0).name, KINDS[kind]


def rows(name, wrong):
    """COLUMNS for every kernel of a backend; what went wrong is added to ``wrong``."""
    backend, shares = BACKENDS[name], defaultdict(list)
    for (arch, *case), result in run(backend):
        if "failed" in result:
            wrong.append(f"sm_{arch} {case}: {result['failed']}")
        for kind, entry in result.get("entries", ()):
            shares[arch, kind, entry].append(result["share"])
    for arch in backend.archs:
        for kind, entry in sorted(backend.places(arch), key=lambda place: name_of(*place)):
            found = shares[arch, kind, entry]
            if not found:
                wrong.append(f"sm_{arch} {name_of(kind, entry)} never ran")
            worst = f"{max(found, default=0):.2f}"
            yield name, f"sm_{arch}", *name_of(kind, entry), str(len(found)), worst


def main(names):
    torch.set_num_threads(1)  # the machine has one, too
    wrong, found = [], [COLUMNS]
    for name in BACKENDS:
        if name in names or not names:
            found += rows(name, wrong)
    print(*("\t".join(row) for row in found), sep="\n")
    print(*wrong, sep="\n", file=sys.stderr)
    if not names:
        with RESULTS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
