"""The GPU model's table: writes modelled microseconds to benchmarks/results/gpu-model.csv.

``python -m gpu_model`` writes a row for each call on each GPU, with inputs in memory and, where it
holds them, in the L2: ours in a CUDA graph, what others take there, a copy of the same bytes, the
host's time for ours from Python. ``python -m gpu_model step-64`` prints the kernels of a shape.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY, Shape

from .counted import Problem, launches, works
from .gpus import ASSUMED, GPUS, Gpu
from .in_triton import counted
from .rivals import RIVALS
from .times import LANES, SCHEDULERS, Work, fits, in_graph, modelled

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gpu-model.csv"
SHAPES = (*LIST, *STEPS_ON_MEMORY)
PASSES = ("forward", "backward")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLUMNS = (
    "pass", "B,Tq,Tk,H", "dtype", "GPU", "inputs in", "MB", "CUDA C++", "Triton", "eager",
    "compiled", "expert", "copy", "host",
)  # fmt: skip


# ---- the least that eager code takes -------------------------------------------------------------
# What plain PyTorch launches and moves, by the formula, for projected queries and keys, as the
# kernels here are. Each kernel reads its inputs and writes its output once; F is a tensor of
# (B,Tq,Tk,H), S one of (B,Tq,Tk).


@dataclass(frozen=True)
class Eager:
    """What a call launches and moves.

    Attributes:
        launches: kernels.
        moved: bytes read and written.
        tanh: evaluations, each 20 instructions of the CUDA library.
    """

    launches: int
    moved: int
    tanh: int

    def floor(self, gpu: Gpu, in_l2: bool = False) -> float:
        """Seconds that it takes at least: its bytes or its tanh at full speed, and its launches."""
        tanh = self.tanh * 20 / (SCHEDULERS * LANES * gpu.multiprocessors * gpu.clock * 1e9)
        in_l2 = in_l2 and self.moved <= gpu.l2_mb * 1e6
        moved = self.moved / (gpu.l2 if in_l2 else gpu.dram * ASSUMED.dram_share) * 1e-12
        return max(tanh, moved) + self.launches * ASSUMED.launch * 1e-6


def _elements(p: Problem) -> tuple[int, int, int, int]:
    """Of F, of S, of queries and keys together, and of values and context together."""
    scores = p.batch * p.queries * p.keys
    projected = p.batch * (p.queries + p.keys) * p.hidden
    return scores * p.hidden, scores, projected, p.batch * (p.queries + p.keys) * p.value_size


def eager(p: Problem, backward: bool = False) -> Eager:
    """The d2l module.

    Forward: sum, tanh, product with w_v, softmax, product with the values; four more kernels on S
    make and apply a mask. Backward: two products with the values, softmax, two products with w_v,
    tanh, and the sums over queries and over keys.
    """
    f, s, projected, valued = _elements(p)
    size = p.dtype.itemsize
    if backward:
        moved = 2 * valued + 3 * s + projected + 3 * s + 7 * f
        return Eager(8, moved * size, 0)
    masked = p.lens is not None
    moved = projected + 4 * f + 4 * s + valued + (6 * s if masked else 0)
    return Eager(9 if masked else 5, moved * size, f)


# ---- the table -----------------------------------------------------------------------------------


def problem(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """A shape's call of projected queries and keys."""
    lens = None
    if shape.lens == "drawn":
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1, shape.keys + 1, (shape.batch,), generator=generator)
        lens = tuple(drawn.tolist())
    sizes = shape.batch, shape.queries, shape.keys, shape.hidden, shape.value_size
    return Problem(*sizes, dtype=dtype, lens=lens)


def ours(call: Problem, gpu: Gpu, backward: bool) -> dict[str, list[Work]]:
    """The launches of each backend that serves a call."""
    found = {"Triton": works(counted(call, gpu, backward))}
    if call.queries <= GPU_STEP_QUERIES:
        found["CUDA C++"] = works(launches(call, gpu, backward))
    return found


def rows(call: Problem, backward: bool) -> Iterator[dict[str, str]]:
    """COLUMNS of a call, from the fourth on, for every GPU."""
    for name, gpu in GPUS.items():
        found = ours(call, gpu, backward)
        best = found.get("CUDA C++", found["Triton"])
        least = min(sum(work.cold for work in x) + _results(call, backward) for x in found.values())
        found |= {who: works(counted(call, gpu, backward, of)) for who, of in RIVALS.items()}
        for in_l2 in (False, True)[: 1 + fits(gpu, best)]:
            us = {who: in_graph(gpu, of, in_l2) for who, of in found.items()}
            us["eager"] = eager(call, backward).floor(gpu, in_l2)
            us["copy"] = least / (gpu.l2 if in_l2 else gpu.dram * ASSUMED.dram_share) * 1e-12
            us["copy"] += ASSUMED.launch * 1e-6
            us["host"] = (ASSUMED.call + len(best) * ASSUMED.host_launch) * 1e-6
            where = {"GPU": name, "inputs in": "L2" if in_l2 else "memory"}
            yield (
                where | {"MB": f"{least / 1e6:.3g}"} | {k: f"{1e6 * x:.3g}" for k, x in us.items()}
            )


def _results(p: Problem, backward: bool) -> int:
    """Bytes that a call has to write: context and weights, or the gradients."""
    _, s, projected, valued = _elements(p)
    rows_of_values = valued - p.batch * p.queries * p.value_size
    if backward:
        return (projected + rows_of_values + p.hidden) * p.dtype.itemsize
    return p.batch * p.queries * p.value_size * p.dtype.itemsize + 4 * s


def kernels(shape: Shape) -> Iterator[tuple[str, ...]]:
    """What is printed of a shape: every launch of ours."""
    yield "pass", "dtype", "GPU", "backend", "kernel", "blocks", "MB", "us", "in L2", "bound", "%"
    for way, dtype, (name, gpu) in product(PASSES, DTYPES, GPUS.items()):
        found = ours(problem(shape, DTYPES[dtype]), gpu, way == "backward")
        for backend, of in found.items():
            for work in of:
                time, warm = (modelled(gpu, work, in_l2) for in_l2 in (False, fits(gpu, of)))
                us = (f"{1e6 * each.seconds:.3g}" for each in (time, warm))
                cut = work.name, str(work.blocks), f"{work.moved / 1e6:.3g}"
                near = f"{100 * time.roof / time.seconds:.0f}"
                yield way, dtype, name, backend, *cut, *us, time.bound, near


def _written(asked: tuple[str, Shape, str]) -> list[dict[str, str]]:
    """The rows of a pass, a shape and a dtype."""
    way, shape, dtype = asked
    call = {"pass": way, "B,Tq,Tk,H": str(shape), "dtype": dtype}
    found = [call | row for row in rows(problem(shape, DTYPES[dtype]), way == "backward")]
    print(way, shape, dtype, file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Write all rows, or print the kernels of a shape."""
    torch.set_num_threads(1)
    if sys.argv[1:]:
        (shape,) = (shape for shape in SHAPES if shape.name == sys.argv[1])
        for row in kernels(shape):
            print(*row, sep="\t", flush=True)
        return 0
    with ProcessPoolExecutor() as pool, RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for found in pool.map(_written, product(PASSES, SHAPES, DTYPES)):
            writer.writerows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
