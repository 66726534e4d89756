"""``make ptx``: every case on every kernel of both GPU backends, as machine code.

``python tests/ptx/table.py [cuda] [triton]`` prints a row for each kernel with the worst share of
what the parity rule allows, and ends with 1 if a case fails or a kernel never ran.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), *(str(HERE.parent / name) for name in ("ptx", "support", "cuda"))]

# ruff: noqa: E402
import torch
from cases import ROWS, STEPS, measured
from driven import CudaPtx
from machine_code import KINDS, Kernel
from tritoned import TritonPtx

COLUMNS = ("backend", "arch", "kernel", "numbers", "cases", "worst share")
BACKENDS = {"cuda": CudaPtx, "triton": TritonPtx}


def name_of(place):
    """A (kind, entry) as rows name it: function with template number, and kind of numbers."""
    kind, entry = place
    return Kernel(entry, kind, "", 0, 0, 0).name, KINDS[kind]


def names_of_cases(dtype):
    """All, but that steps that project keys have 16 bits."""
    raw = [name for name, step in STEPS.items() if step.Dk is not None]
    return [n for n in (*ROWS, *STEPS) if n not in raw or dtype in ("bf16", "fp16")]


def rows(name, arch, wrong):
    """COLUMNS for every kernel of a backend; what went wrong is added to ``wrong``."""
    shares = defaultdict(list)
    for dtype in BACKENDS[name].dtypes:
        kernels = BACKENDS[name](arch)
        for case in names_of_cases(dtype):
            try:
                share = measured(kernels, case, dtype)
                if not share <= 1:
                    raise AssertionError(f"{share:.2f} of what the parity rule allows")
                for place in kernels.took():
                    shares[place].append(share)
                print(name, arch, dtype, case, f"{share:.2f}", file=sys.stderr, flush=True)
            except Exception as error:
                wrong.append(f"{name} sm_{arch} {dtype} {case}: {error}")
                kernels = BACKENDS[name](arch)
    for place in sorted(kernels.places(), key=name_of):
        found = shares[place]
        if not found:
            wrong.append(f"{name} sm_{arch} {name_of(place)} never ran")
        yield name, f"sm_{arch}", *name_of(place), str(len(found)), f"{max(found, default=0):.2f}"


def main(names):
    torch.set_num_threads(1)  # the machine has one, too
    wrong, found = [], [COLUMNS]
    for name in names or BACKENDS:
        for arch in BACKENDS[name].archs:
            found += rows(name, arch, wrong)
    print(*("\t".join(row) for row in found), sep="\n")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
