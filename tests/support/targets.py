"""The targets that the contract table is run on, and how it is run on each.

``CPU``, ``REFERENCE``, ``INTERPRETER`` (Triton's) and ``GPU`` (CUDA C++ there) are called as users
call them; machine code, as ``CudaPtx`` and ``TritonPtx`` of tests/ptx run it, as operators are.
"""

import dataclasses
import itertools
import math
from functools import partial

import entry_points
import parity
import pytest
import torch
import torch.nn.functional as F
from contract import CONTRACT, LARGE, MASKED, lens, scattered
from parity import OUTPUTS, Case, keep_the_rule, measure

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.checks import ACTIVATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TABLE = CONTRACT | MASKED


class Target:
    """What computes calls, by ``way(name, how)``: the function that :func:`parity.check` tests.

    It has a table of rows, sizes of what a row says nothing of, and the most queries of a call.
    """

    table, sizes, most_queries = TABLE, LARGE, math.inf

    def case(self, row, **changed):
        """A row of the table by its name, with other sizes where it says nothing; or a Case."""
        if isinstance(row, str):
            row = Case(**{**self.sizes, **changed, **self.table[row]})
        return row.of_at_most(self.most_queries)

    def shares(self, row, dtype, how=None, **changed):
        """The shares of what the parity rule allows that a row, a step or a Case takes, by result.

        Rows are run forward and backward, steps (names of STEPS) forward; ``dtype`` may be a key of
        DTYPES, ``how`` it is called the target says.
        """
        dtype = DTYPES.get(dtype, dtype)
        if isinstance(row, str) and row in STEPS:
            found = measure(STEPS[row], dtype, STEPS[row].way(self))
            return {name: found[name] for name in OUTPUTS}
        return measure(self.case(row, **changed), dtype, self.way(row, how))

    def check(self, row, dtype, how=None, **changed):
        """Assert the parity rule on what :meth:`shares` takes."""
        keep_the_rule(self.shares(row, dtype, how, **changed), f"{row}, {dtype}, {changed}")


class Backend(Target):
    """A backend, called as users do: by a function of parity, ``fused`` unless another is given."""

    def __init__(self, name, dtypes, most_queries=math.inf):
        self.name, self.dtypes, self.most_queries = name, dtypes, most_queries

    def way(self, _row=None, how=None):
        return partial(how or parity.fused, backend=self.name)


class Interpreter(Backend):
    """Triton's, which takes seconds for a small case: two rows, two blocks of queries and of keys,
    the last of each cut off.
    """

    sizes = LARGE | {"B": 2, "Tk": 35, "H": 21}

    def case(self, row, **changed):
        """A row at sizes that it gets through; with ``Tq=2`` two queries that see something."""
        if not isinstance(row, str):
            return row
        sizes = {**self.sizes, **changed, **self.table[row]}
        sizes |= {"Tq": min(sizes["Tq"], 18), "Tk": min(sizes["Tk"], 70)}
        lens, mask = sizes.get("lens"), sizes.get("mask")
        if lens is not None:
            of_all = lens.shape[1:] == (self.sizes["Tq"],) and sizes["Tq"] == 2
            sizes["lens"] = lens[: sizes["B"], 5:7] if of_all else lens[: sizes["B"]]
        if mask is not None:
            of_all = mask.dim() == 3 and mask.shape[1] == self.sizes["Tq"] and sizes["Tq"] == 2
            sizes["Tk"] = min(sizes["Tk"], mask.shape[-1])
            mask = mask[: sizes["B"], ..., : sizes["Tk"]]
            sizes["mask"] = mask[:, 2:4] if of_all else mask
        return Case(**sizes)


class Gpu(Backend):
    """CUDA C++ on the GPU that is here."""

    def step(self, _, queries, w_q, keys, *rest, w_k=None, bias=None, mask=None):
        given = queries, w_q, keys, w_k, bias, *rest, mask
        return entry_points.step(entry_points.dispatched, *given)


CPU, REFERENCE = Backend("cpu", parity.DTYPES), Backend("reference", parity.DTYPES)
NARROW = tuple(DTYPES.values())
INTERPRETER, GPU = Interpreter("triton", NARROW), Gpu("cuda", NARROW, GPU_STEP_QUERIES)

# Odd, as LARGE, with fewer units: the PTX machine takes its time for each.
SIZES = {**LARGE, "H": 67}
SPLIT = CONTRACT["split keys"]
# Rows of the contract that differ in what these kernels see, with a number of multiprocessors; how
# keys are cut for other numbers; and steps of many elements.
ROWS = {
    **{row: (case, 4) for row, case in CONTRACT.items() if not row.startswith("all in one")},
    **{row: (case, 4) for row, case in MASKED.items() if "all in one" not in row},
    "mask, split keys, 1000 processors": (MASKED["mask, split keys, chunks without any"], 1000),
    "mask, split keys, nothing, 1000 processors": (MASKED["mask, split keys, nothing"], 1000),
    "split keys, 1 processor": (SPLIT, 1),
    "split keys, 1000 processors": (SPLIT, 1000),
    "split keys, 1000 processors, weights alone": ({**SPLIT, "Tq": 3, "grads": "weights"}, 1000),
    "split keys, lens at a chunk, 1000 processors": (CONTRACT["split keys, lens at a chunk"], 1000),
    "decoder step, 1 processor": (CONTRACT["decoder step"], 1),
    "decoder step, 1000 processors": (CONTRACT["decoder step"], 1000),
    "beams, whole row masked": ({"Tq": 3, "lens": lens(0, -5, 7)}, 1000),
    "large step": ({"B": 8, "Tq": 1, "Tk": 150, "H": 512, "Dv": 40}, 4),
    "large step, beams": ({"B": 2, "Tq": 4, "Tk": 150, "H": 512, "lens": lens(150, 70)}, 4),
    "large step, 16 beams": ({"B": 2, "Tq": 16, "Tk": 150, "H": 131}, 4),
    "decoder step, whole vectors": (
        {"B": 9, "Tq": 1, "Tk": 50, "H": 96, "Dv": 32, "lens": torch.arange(9) * 6}, 4,
    ),
    "whole vectors, beams": ({"B": 2, "Tq": 3, "Tk": 100, "H": 264, "Dv": 40}, 2),
    "wide values, whole vectors": ({"B": 2, "Tq": 1, "Tk": 40, "H": 64, "Dv": 1040}, 4),
    "long step, whole vectors": ({"B": 1, "Tq": 1, "Tk": 4200, "H": 136, "Dv": 8}, 16),
    "long step": ({"B": 1, "Tq": 1, "Tk": 4200, "H": 136, "Dv": 5}, 16),
    "long step of few units": ({"B": 1, "Tq": 1, "Tk": 4200, "H": 100, "Dv": 5}, 16),
    "eight splits": ({"B": 2, "Tq": 1, "Tk": 120, "H": 72, "Dv": 24, "lens": lens(120, 50)}, 99),
}  # fmt: skip


def without_gradients(way):
    """The function that :func:`parity.check` tests for what a way gives without gradients."""

    def function(inputs, *seen, **options):
        with torch.no_grad():
            found = way(dict(inputs), *seen, **options)
        # Our values in the graph of eager's, whose gradients are not what is tested.
        outputs = parity.eager(inputs, *seen, **options)
        return [ours + (x - x.detach()) for ours, x in zip(found, outputs, strict=True)]

    return function


@dataclasses.dataclass
class Step(Case):
    """A step that projects its queries, and its keys if it is given ``Dk``, in the same launch."""

    B: int = 2
    Tq: int = 1
    Tk: int = 70
    H: int = 40
    Dq: int = 64
    Dk: int = 0
    Dv: int = 32
    seen: float | None = None  # share of keys that a mask shows; the last row sees none
    multiprocessors: int = 4

    def __post_init__(self):
        self.bias, self.Dk = self.Dk > 0, self.Dk or self.H
        self.scale = {"w_v": self.H**-0.5}
        if self.seen is not None:
            self.mask = scattered(self.B, 1, self.Tk, share=self.seen)
            self.mask[-1] = False

    def draw(self, dtype):
        """As for any case; keys that are projected already are their own projection."""
        drawn = super().draw(dtype)
        if not self.bias:
            drawn["w_k"] = torch.eye(self.H, dtype=torch.float64)
        return drawn

    def way(self, target):
        """The function :func:`parity.check` tests."""

        def function(inputs, valid_lens, mask=None):
            names = "queries", "w_q", "keys", "values", "w_v"
            given = [*map(inputs.get, names), valid_lens]
            raw = {name: inputs[name] for name in ("w_k", "bias") if self.bias}
            return target.step(self.multiprocessors, *given, **raw, mask=mask)

        return without_gradients(function)


STEPS = {
    "queries projected": Step(lens=lens(70, 9)),
    "queries projected, beams": Step(Tq=6, Dq=8),
    "a cluster shares W_q": Step(B=3, H=264, Dq=56, Tk=40, Dv=8),
    "a cluster of several rows": Step(B=9, H=152, Dq=56, Tk=40, Dv=8),
    "queries projected, mask": Step(Tq=3, seen=0.3),
    "queries in rows of any alignment": Step(Tq=3, Dq=7, H=33, Dv=9),
    "keys projected": Step(Tk=150, Dk=64, H=300, lens=lens(150, 70), multiprocessors=1),
    "keys projected, cut": Step(Tk=150, Dk=104, H=32, lens=lens(150, 70)),
    "keys of many features": Step(Tk=150, Dk=256, H=64, lens=lens(150, 70)),
    "keys projected, beams": Step(Tq=3, Tk=150, Dk=8, H=33, lens=lens(150, 70)),
    "keys in rows of any alignment": Step(Tk=150, Dk=7, H=33, lens=lens(150, 70)),
    "keys are values": Step(
        B=3, Tk=150, Dk=104, tied=True, lens=lens(150, 70, 0), multiprocessors=16,
    ),
    "keys are values, beams": Step(B=3, Tq=3, Tk=150, Dk=24, tied=True, multiprocessors=1),
    "keys projected, mask": Step(B=3, Tk=150, Dk=64, H=300, lens=lens(150, 70, 9), seen=0.02),
    "keys are values, mask": Step(B=3, Tk=150, Dk=104, tied=True, seen=0.02, multiprocessors=1),
    "more shared memory than usual": Step(B=1, Tk=20, H=1504, Dq=8, tied=True),
}  # fmt: skip
# Those that take every kernel of csrc/cuda between them.
FEW = (
    "lens per query", "decoder step", "eight splits", "fp32 in small", "large step, 16 beams",
    "long step of few units", "split keys, lens inside a chunk", "keys projected, cut",
    "keys are values, beams", "a cluster shares W_q", "whole vectors", "whole vectors, beams",
    "decoder step, whole vectors", "long step, whole vectors", "wide values, whole vectors",
    "mask, decoder step", "mask, split keys, 1000 processors", "keys are values, mask",
)  # fmt: skip


def every(archs, quick=(), names=(*ROWS, *STEPS)):
    """Parameters (name, dtype, arch): each case in each dtype, but for those of ``quick`` deep."""
    for case in itertools.product(names, DTYPES, archs):
        yield pytest.param(*case, marks=() if case in quick else pytest.mark.deep)


class Kernels(Target):
    """Kernels run on tensors of the CPU by ``attend`` and ``step`` (see PtxCalls), as :func:`on`
    calls them unless another function is given.
    """

    table, sizes = {row: sizes for row, (sizes, _) in ROWS.items()}, SIZES

    def way(self, row, how=None):
        return (how or on)(self, ROWS[row][1] if isinstance(row, str) else 4)

    def worst(self, name, dtype, how=None):
        """The largest share of a row or a step."""
        return max(self.shares(name, dtype, how).values(), default=0.0)


def on(kernels, multiprocessors=4):
    """The function :func:`parity.check` tests: projections by torch, the rest by the kernels."""

    def function(inputs, valid_lens, activation="tanh", negative_slope=0.0, **given):
        if activation != "tanh":
            given["activation"] = ACTIVATIONS.index(activation)
            given["negative_slope"] = negative_slope
        a = F.linear(inputs["queries"], inputs["w_q"])
        c = F.linear(inputs["keys"], inputs["w_k"], inputs["bias"])
        rest = inputs["values"], inputs["w_v"], valid_lens
        context, weights = kernels.attend(multiprocessors, a, c, *rest, **given)
        return context, weights.to(context.dtype)

    return function
