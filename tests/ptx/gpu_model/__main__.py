"""``make gpu-model``: prints the model's times and writes them into docs/gpu-model.md.

``python -m gpu_model forward`` does so for one pass alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY, Shape

from . import hand
from .counted import Problem, launches, works
from .gpus import ASSUMED, GPUS, SOURCES, Assumed
from .rivals import Rival, compiled, eager
from .times import Time, Work, modelled

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu-model.md"
MARK = "<!-- make gpu-model writes what follows -->\n"
SAID = "Modelled, not measured."
SHAPES = (*LIST, *STEPS_ON_MEMORY)
Call = dict[str, list[tuple[Work, Time]]]  # by GPU


def problem(shape: Shape) -> Problem:
    """A shape's call of projected queries and keys in bf16."""
    lens = None
    if shape.lens == "drawn":
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1, shape.keys + 1, (shape.batch,), generator=generator)
        lens = tuple(drawn.tolist())
    sizes = shape.batch, shape.queries, shape.keys, shape.hidden, shape.value_size
    return Problem(*sizes, lens=lens)


def model(call: Problem, backward: bool) -> Call:
    """The launches of a call on every GPU, with their times."""
    found: Call = {}
    for name, gpu in GPUS.items():
        cut = works(launches(call, gpu, backward), gpu)
        found[name] = [(work, modelled(gpu, work)) for work in cut]
    return found


def in_graph(launched: list[tuple[Work, Time]]) -> float:
    """Microseconds of the launches in a CUDA graph."""
    return sum(time.seconds * 1e6 + ASSUMED.launch for _, time in launched)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def kernel_rows(shape: Shape, found: Call) -> Iterator[list[str]]:
    """A row for each kernel: microseconds, what bounds it, how near the roof it is."""
    for at, (work, _) in enumerate(found["H200"]):
        cells = []
        for launched in found.values():
            time = launched[at][1]
            near = 100 * time.roof / time.seconds
            cells.append(f"{time.seconds * 1e6:.3g}, {time.bound}, {near:.0f} %")
        yield [str(shape) if at == 0 else "", f"{work.name} ({work.blocks})", *cells]


def call_row(shape: Shape, found: Call, rivals: list[Rival]) -> list[str]:
    """A row for a call: ours, then each rival's launches, bytes and floor on an H200."""
    launched = found["H200"]
    moved = sum(work.moved for work, _ in launched) / 1e6
    host = ASSUMED.call + len(launched) * ASSUMED.host_launch
    cells = [
        str(shape),
        f"{len(launched)}, {moved:.3g}",
        f"{in_graph(launched):.3g}",
        f"{host:.0f}",
    ]
    for rival in rivals:
        floor = rival.floor(GPUS["H200"]) * 1e6
        cells += [f"{rival.launches}, {rival.moved / 1e6:.3g}", f"{floor:.3g}"]
    return cells


def constants() -> Iterator[str]:
    """The tables of constants with their sources."""
    rows = []
    for field, source in SOURCES.items():
        rows.append([f"`{field}`", *(str(getattr(gpu, field)) for gpu in GPUS.values()), source])
    yield from table(["", *GPUS, "from"], rows)
    yield ""
    described = re.findall(
        r"^        (\w+): (.*?)(?=^        \w+: |\Z)", str(Assumed.__doc__), re.M | re.S
    )
    rows = [[f"`{k}`", str(getattr(ASSUMED, k)), " ".join(text.split())] for k, text in described]
    yield from table(["of every GPU, estimated", "", ""], rows)


def results(passes: list[str]) -> Iterator[str]:
    """The tables of all shapes, forward or backward or both."""
    for name in passes:
        backward = name == "Backward"
        kernels, calls = [], []
        for shape in SHAPES:
            call = problem(shape)
            found = model(call, backward)
            kernels += kernel_rows(shape, found)
            rivals = [eager(call, backward), compiled(call, backward)]
            calls.append(call_row(shape, found, rivals))
            print(f"{SAID} {name} of {shape} done", file=sys.stderr, flush=True)
        yield f"### {name}, kernel by kernel\n"
        yield f"{SAID} Microseconds, what bounds the kernel, the share of its roof that it reaches."
        yield "In brackets: blocks on an H200.\n"
        yield from table(["B,Tq,Tk,H", "kernel (blocks)", *GPUS], kernels)
        yield f"\n### {name}, a call on an H200\n"
        yield f"{SAID} Launches and MB; microseconds in a CUDA graph; microseconds of the host from"
        yield "Python. Of the others the least that their bytes, tanh and launches take.\n"
        head = ["B,Tq,Tk,H", "ours: launches, MB", "graph", "host"]
        for rival in ("eager", "compiled"):
            head += [f"{rival}: launches, MB", "at least"]
        yield from table(head, calls)
        yield ""


def by_hand() -> Iterator[str]:
    """What was worked out by hand beside the model."""
    yield "### By hand\n"
    yield f"{SAID} Microseconds on an H200, without the launch.\n"
    head = ["kernel", "by hand", "model", "apart", "bound", "trips"]
    head.append("with the trips by hand")
    yield from table(head, list(hand.rows()))
    yield ""


def main() -> int:
    passes = [name.capitalize() for name in sys.argv[1:]] or ["Forward", "Backward"]
    lines = [
        f"### Constants\n\n{SAID} bf16, projected queries and keys, nothing in the caches.\n",
        *constants(),
        "",
    ]
    text = "\n".join([*lines, *by_hand(), *results(passes)]).rstrip() + "\n"
    print(text)
    PAGE.write_text(PAGE.read_text().split(MARK)[0] + MARK + "\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
