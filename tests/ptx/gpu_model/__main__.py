"""``make gpu-model``: prints modelled times and writes them to benchmarks/results/gpu-model.csv.

``python -m gpu_model forward`` prints those of one pass alone. A row for each kernel on each GPU,
then what the whole call takes on an H200: ours in a CUDA graph, ours for the host from Python, what
others take (rivals.py), or the least that they take.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY, Shape

from .counted import Problem, launches, works
from .gpus import ASSUMED, GPUS, Gpu
from .rivals import compiled, expert
from .times import LANES, SCHEDULERS, fits, in_graph, modelled

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gpu-model.csv"
SHAPES = (*LIST, *STEPS_ON_MEMORY)
PASSES = ("forward", "backward")
COLUMNS = (
    "pass", "B,Tq,Tk,H", "modelled", "GPU", "launches", "blocks", "MB", "us", "us in L2", "bound",
    "% of roof",
)  # fmt: skip
OF_CALLS = "H200"
OTHERS = {"torch.compile": compiled, "tanh.approx in Triton": expert}


# ---- the least that others take ------------------------------------------------------------------
# What plain PyTorch and, backward, torch.compile launch and move, by the formula, for projected
# queries and keys, as the kernels here are. Each kernel reads its inputs and writes its output
# once; F is a tensor of (B,Tq,Tk,H), S one of (B,Tq,Tk).


@dataclass(frozen=True)
class Rival:
    """What a call launches and moves.

    Attributes:
        name: of who does.
        launches: kernels.
        moved: bytes read and written.
        tanh: evaluations, each 20 instructions of the CUDA library.
    """

    name: str
    launches: int
    moved: int
    tanh: int

    def floor(self, gpu: Gpu) -> float:
        """Seconds that it takes at least: its bytes or its tanh at full speed, and its launches."""
        tanh = self.tanh * 20 / (SCHEDULERS * LANES * gpu.multiprocessors * gpu.clock * 1e9)
        moved = self.moved / (gpu.dram * 1e12 * ASSUMED.dram_share)
        return max(tanh, moved) + self.launches * ASSUMED.launch * 1e-6


def _elements(p: Problem) -> tuple[int, int, int, int]:
    """Of F, of S, of queries and keys together, and of values and context together."""
    scores = p.batch * p.queries * p.keys
    projected = p.batch * (p.queries + p.keys) * p.hidden
    return scores * p.hidden, scores, projected, p.batch * (p.queries + p.keys) * p.value_size


def eager(p: Problem, backward: bool = False) -> Rival:
    """The d2l module.

    Forward: sum, tanh, product with w_v, softmax, product with the values; four more kernels on S
    make and apply a mask. Backward: two products with the values, softmax, two products with w_v,
    tanh, and the sums over queries and over keys.
    """
    f, s, projected, valued = _elements(p)
    size = p.dtype.itemsize
    if backward:
        moved = 2 * valued + 3 * s + projected + 3 * s + 7 * f
        return Rival("eager", 8, moved * size, 0)
    masked = p.lens is not None
    moved = projected + 4 * f + 4 * s + valued + (6 * s if masked else 0)
    return Rival("eager", 9 if masked else 5, moved * size, f)


def compiled_backward(p: Problem) -> Rival:
    """Two products with the values, softmax, tanh once more with two gradients of F written, and
    three sums that read them."""
    f, s, projected, valued = _elements(p)
    moved = 2 * valued + 3 * s + 3 * s + 2 * projected + 5 * f
    return Rival("torch.compile", 7, moved * p.dtype.itemsize, f)


# ---- the table -----------------------------------------------------------------------------------


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
        found = works(launches(call, gpu, backward))
        for work in found:
            time, warm = (modelled(gpu, work, in_l2) for in_l2 in (False, fits(gpu, found)))
            near = f"{100 * time.roof / time.seconds:.0f}"
            us, hot = f"{time.seconds * 1e6:.3g}", f"{warm.seconds * 1e6:.3g}"
            yield (
                work.name,
                name,
                1,
                work.blocks,
                f"{work.moved / 1e6:.3g}",
                us,
                hot,
                time.bound,
                near,
            )
        if name != OF_CALLS:
            continue
        count, moved = len(found), f"{sum(work.moved for work in found) / 1e6:.3g}"
        us, hot = (f"{in_graph(gpu, found, in_l2) * 1e6:.3g}" for in_l2 in (False, True))
        host = ASSUMED.call + count * ASSUMED.host_launch
        yield "call in a CUDA graph", name, count, "", moved, us, hot, "", ""
        yield "call, the host's time", name, count, "", "", f"{host:.3g}", "", "", ""
        for rival in (eager(call, backward), *([compiled_backward(call)] if backward else [])):
            moved, least = f"{rival.moved / 1e6:.3g}", f"{rival.floor(gpu) * 1e6:.3g}"
            yield f"{rival.name}, at least", name, rival.launches, "", moved, least, "", "", ""
        for of, made in {} if backward else OTHERS.items():
            theirs = made(call)
            us, hot = (f"{in_graph(gpu, theirs, in_l2) * 1e6:.3g}" for in_l2 in (False, True))
            moved = f"{sum(work.moved for work in theirs) / 1e6:.3g}"
            yield of, name, len(theirs), "", moved, us, hot, "", ""


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
