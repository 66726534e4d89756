"""``make gpu-model``: prints modelled times and writes them to benchmarks/results/gpu-model.csv.

``python -m gpu_model forward`` prints those of one pass alone. A row for each kernel on each GPU,
then what the whole call takes on an H200: ours in a CUDA graph, ours for the host from Python, and
the least that others take.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY, Shape

from .counted import Problem, launches, works
from .gpus import ASSUMED, GPUS
from .rivals import compiled, eager
from .times import modelled

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gpu-model.csv"
SHAPES = (*LIST, *STEPS_ON_MEMORY)
PASSES = ("forward", "backward")
COLUMNS = (
    "pass", "B,Tq,Tk,H", "modelled", "GPU", "launches", "blocks", "MB", "us", "bound", "% of roof",
)  # fmt: skip
OF_CALLS = "H200"


def problem(shape: Shape) -> Problem:
    """A shape's call of projected queries and keys in bf16."""
    lens = None
    if shape.lens == "drawn":
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1, shape.keys + 1, (shape.batch,), generator=generator)
        lens = tuple(drawn.tolist())
    sizes = shape.batch, shape.queries, shape.keys, shape.hidden, shape.value_size
    return Problem(*sizes, lens=lens)


def rows(shape: Shape, backward: bool) -> Iterator[tuple[str | int, ...]]:
    """COLUMNS of a shape, from the third on."""
    call = problem(shape)
    for name, gpu in GPUS.items():
        found = [(work, modelled(gpu, work)) for work in works(launches(call, gpu, backward), gpu)]
        for work, time in found:
            near = f"{100 * time.roof / time.seconds:.0f}"
            us, moved = f"{time.seconds * 1e6:.3g}", f"{work.moved / 1e6:.3g}"
            yield work.name, name, 1, work.blocks, moved, us, time.bound, near
        if name != OF_CALLS:
            continue
        count, moved = len(found), f"{sum(work.moved for work, _ in found) / 1e6:.3g}"
        in_graph = sum(time.seconds * 1e6 + ASSUMED.launch for _, time in found)
        host = ASSUMED.call + count * ASSUMED.host_launch
        yield "call in a CUDA graph", name, count, "", moved, f"{in_graph:.3g}", "", ""
        yield "call, the host's time", name, count, "", "", f"{host:.3g}", "", ""
        for rival in (eager(call, backward), compiled(call, backward)):
            moved, least = f"{rival.moved / 1e6:.3g}", f"{rival.floor(gpu) * 1e6:.3g}"
            yield f"{rival.name}, at least", name, rival.launches, "", moved, least, "", ""


def main() -> int:
    """Print all rows; they are written when both passes are asked for."""
    passes = sys.argv[1:] or PASSES
    found: list[tuple[str | int, ...]] = [COLUMNS]
    print(*COLUMNS, sep="\t")
    for name in passes:
        for shape in SHAPES:
            for row in rows(shape, name == "backward"):
                found.append((name, str(shape), *row))
                print(*found[-1], sep="\t", flush=True)
    if set(passes) == set(PASSES):
        with RESULTS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
