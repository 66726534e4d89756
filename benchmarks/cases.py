"""Shapes of real uses, the tensors of a shape, and the rows of the tables.

The tensors are drawn once and given to every provider and to the oracle.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, named after where it comes from.

    Of lengths, "none" passes none, "full" Tk everywhere (a mask without padding to skip), and
    "drawn" numbers from 1 to Tk.
    """

    name: str
    batch: int
    queries: int
    keys: int
    hidden: int
    query_size: int = 0
    key_size: int = 0
    value_size: int = 0
    lens: Literal["none", "full", "drawn"] = "none"

    def __post_init__(self) -> None:
        for size in ("query_size", "key_size", "value_size"):
            if getattr(self, size) == 0:  # D = H unless a use has other sizes
                object.__setattr__(self, size, self.hidden)

    @property
    def features(self) -> int:
        """Elements of the (B,Tq,Tk,H) tensor that unfused code allocates."""
        return self.batch * self.queries * self.keys * self.hidden

    @property
    def projection_flops(self) -> int:
        """Operations of both projections, one forward."""
        rows = self.queries * self.query_size + self.keys * self.key_size
        return 2 * self.batch * self.hidden * rows

    @property
    def memory_bytes(self) -> int:
        """Bytes that one fp32 step on a memory has to read: the table and the values, once."""
        return 4 * self.batch * self.keys * (self.hidden + self.value_size)

    def __str__(self) -> str:
        return f"{self.name} ({self.batch},{self.queries},{self.keys},{self.hidden})"


TOY = Shape("d2l-toy", 2, 1, 10, 8, query_size=20, key_size=2, value_size=4, lens="drawn")

SCAN = Shape("gnmt-train", 256, 1, 75, 1024)

MANY_QUERIES = (Shape("parallel-4", 4, 128, 128, 512), Shape("parallel-32", 32, 33, 34, 1024))

LIST = (
    TOY,
    Shape("d2l-nmt", 128, 1, 9, 256, lens="drawn"),
    SCAN,
    Shape("gnmt-infer", 1280, 1, 66, 1024),
    Shape("tacotron2", 64, 1, 160, 128, query_size=1024, key_size=512, value_size=512),
    Shape("speech", 30, 1, 600, 1024),
    Shape("ocr", 192, 1, 26, 256),
    Shape("captioning", 32, 1, 196, 512, key_size=2048, value_size=2048),
    Shape("pointer-generator", 8, 1, 400, 512),
    Shape("tsp", 512, 1, 100, 128),
    *MANY_QUERIES,
    Shape("parallel-128", 128, 10, 128, 1024),
    Shape("parallel-16", 16, 512, 512, 512),
    Shape("pooling", 1, 1, 40000, 512),
)

# Steps of a decoder loop: a sentence.
DECODE_STEPS = 50

# One decoder step on a memory.
STEPS_ON_MEMORY = (
    Shape("step-64", 64, 1, 50, 512),
    Shape("step-16", 16, 1, 400, 512),
    Shape("step-1", 1, 1, 1000, 512),
    Shape("step-small", 64, 1, 10, 32),
)

# The course decoder always passes lengths; full ones, so that there is no padding to skip.
LOOP = Shape("loop-64", 64, 1, 50, 512, lens="full")


@dataclass(frozen=True)
class Inputs:
    """The inputs of all tasks; ``values`` is ``keys`` where the sizes allow it, as in d2l."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    valid_lens: Tensor | None
    projected_queries: Tensor
    projected_keys: Tensor
    grad_context: Tensor

    def leaves(self, task: str) -> tuple[Tensor, ...]:
        """The tensors whose gradients a training step of this task computes."""
        if task in ("projected", "scan"):
            return (self.projected_queries, self.projected_keys, self.values, self.w_v)
        sources = (self.keys,) if self.values is self.keys else (self.keys, self.values)
        return (self.queries, *sources, self.w_q, self.w_k, self.w_v)

    def require_grad(self, required: bool) -> None:
        for name, tensor in vars(self).items():
            if tensor is not None and tensor.is_floating_point() and name != "grad_context":
                tensor.requires_grad_(required)


def draw(shape: Shape, seed: int = 0) -> Inputs:
    """Normal inputs and weights of the size that nn.Linear starts from, fp32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def linear(rows: int, columns: int) -> Tensor:
        return (torch.rand(rows, columns, generator=generator) * 2 - 1) / math.sqrt(columns)

    queries = normal(shape.batch, shape.queries, shape.query_size)
    keys = normal(shape.batch, shape.keys, shape.key_size)
    shared = shape.key_size == shape.value_size
    values = keys if shared else normal(shape.batch, shape.keys, shape.value_size)
    w_q = linear(shape.hidden, shape.query_size)
    w_k = linear(shape.hidden, shape.key_size)
    lens = None
    if shape.lens == "full":
        lens = torch.full((shape.batch,), shape.keys)
    elif shape.lens == "drawn":
        lens = torch.randint(1, shape.keys + 1, (shape.batch,), generator=generator)
    given = queries, keys, values, w_q, w_k, linear(1, shape.hidden), lens
    projected = F.linear(queries, w_q), F.linear(keys, w_k)
    return Inputs(*given, *projected, normal(shape.batch, shape.queries, shape.value_size))


# --- the tables of ``bench`` and their rows -------------------------------------------------------

Mode = Literal["forward", "train"]
MODES: dict[Mode, str] = {"forward": "forward", "train": "forward + backward"}

# Above this, the projections take nearly all of a full call's time. They are the same BLAS calls in
# all providers, so these shapes are compared on projected queries and keys.
PROJECTION_FLOPS = 10**10
# Compiling takes about ten seconds a row, so training is compared on a few shapes.
TRAINED = ("d2l-toy", "d2l-nmt", "tacotron2", "tsp")

# Our provider that is compared with the baselines in each task.
SUBJECT = {"full": "ours module", "loop": "ours module", "step": "ours memory"}
SUBJECT |= {"projected": "ours op", "scan": "ours op"}


@dataclass(frozen=True)
class Case:
    """One row: a task on a shape, as forward without gradients or as training."""

    table: str
    shape: Shape
    task: str
    mode: Mode = "forward"
    extra: tuple[str, ...] = ()  # providers, or groups of them, that run in this row alone
    share: float = 1.0  # of the time that a row usually gets


def _cases() -> Iterator[Case]:
    many = MANY_QUERIES[0]
    # Tuning takes long, so one row has it.
    yield Case("step", STEPS_ON_MEMORY[0], "step", extra=("compiled max-autotune",))
    yield from (Case("step", shape, "step") for shape in STEPS_ON_MEMORY[1:])
    yield from (Case("loop", LOOP, "loop", mode) for mode in MODES)
    for task, mode in product(("projected", "full"), MODES):
        yield Case("many-queries", many, task, mode)
    yield Case("bandwidth", SCAN, "scan")
    for shape in LIST:
        task = "full" if shape.projection_flops <= PROJECTION_FLOPS else "projected"
        for mode in MODES if shape.name in TRAINED else ("forward",):
            # Matrix products are most of some rows: a few percent decide who is the faster.
            yield Case("shapes", shape, task, mode, share=10.0)
    yield from (Case("overhead", TOY, "full", mode) for mode in MODES)
    for shape, task in ((LIST[1], "projected"), (many, "projected"), (STEPS_ON_MEMORY[0], "step")):
        yield Case("peers", shape, task, extra=("peer",))


def cases(only: str = "") -> list[Case]:
    """The rows in the order of the tables; with ``only`` those whose table or shape contains it."""
    return [case for case in _cases() if only in case.table or only in case.shape.name]
