"""What the kernels of both GPU backends are run on, on a GPU and as machine code."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import CONTRACT, LARGE, MASKED, lens, scattered
from parity import OUTPUTS, Case, errors, long_double, measure, shares

from bahdanau_fast import reference
from bahdanau_fast.checks import ACTIVATIONS

__all__ = ["DTYPES", "FEW", "ROWS", "STEPS", "Step", "every", "measured", "on"]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

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


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that projects its queries, and its keys if it has ``Dk``, in the same launch."""

    B: int = 2
    Tq: int = 1
    Tk: int = 70
    H: int = 40
    Dq: int = 64
    Dv: int = 32
    Dk: int | None = None
    tied: bool = False  # values is keys
    lens: tuple[int, ...] | None = None
    seen: float | None = None  # share of keys that a mask shows; the last row sees none
    multiprocessors: int = 4


STEPS = {
    "queries projected": Step(lens=(70, 9)),
    "queries projected, beams": Step(Tq=6, Dq=8),
    "a cluster shares W_q": Step(B=3, H=264, Dq=56, Tk=40, Dv=8),
    "a cluster of several rows": Step(B=9, H=152, Dq=56, Tk=40, Dv=8),
    "queries projected, mask": Step(Tq=3, seen=0.3),
    "queries in rows of any alignment": Step(Tq=3, Dq=7, H=33, Dv=9),
    "keys projected": Step(Tk=150, Dk=64, H=300, lens=(150, 70), multiprocessors=1),
    "keys projected, cut": Step(Tk=150, Dk=104, H=32, lens=(150, 70)),
    "keys of many features": Step(Tk=150, Dk=256, H=64, lens=(150, 70)),
    "keys projected, beams": Step(Tq=3, Tk=150, Dk=8, H=33, lens=(150, 70)),
    "keys in rows of any alignment": Step(Tk=150, Dk=7, H=33, lens=(150, 70)),
    "keys are values": Step(B=3, Tk=150, Dk=104, tied=True, lens=(150, 70, 0), multiprocessors=16),
    "keys are values, beams": Step(B=3, Tq=3, Tk=150, Dk=24, tied=True, multiprocessors=1),
    "keys projected, mask": Step(B=3, Tk=150, Dk=64, H=300, lens=(150, 70, 9), seen=0.02),
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


def measured(kernels, name, dtype, way=None):
    """The share of the parity rule that a case of ROWS or STEPS takes at worst.

    Args:
        kernels: what runs them, see PtxCalls.
        name: of the case. Rows are run forward and backward, steps forward.
        dtype: a key of DTYPES.
        way: to call them for a row; :func:`on` unless given.
    """
    if name in ROWS:
        return _row(kernels, name, dtype, way or on)
    return _step(kernels, name, dtype)


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


def _row(kernels, name, dtype, way):
    sizes, multiprocessors = ROWS[name]
    case = Case(**{**SIZES, **sizes}).of_at_most(kernels.most_queries)
    shares = measure(case, DTYPES[dtype], way(kernels, multiprocessors))
    return max(shares.values(), default=0.0)


def _step(kernels, name, dtype):
    step, kind = STEPS[name], DTYPES[dtype]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(kind)

    features = step.H if step.Dk is None else step.Dk
    queries, keys = draw(step.B, step.Tq, step.Dq), draw(step.B, step.Tk, features)
    values = keys if step.tied else draw(step.B, step.Tk, step.Dv)
    w_q, w_v = draw(step.H, step.Dq, scale=step.Dq**-0.5), draw(1, step.H, scale=step.H**-0.5)
    raw = {}
    if step.Dk is not None:
        raw = {"w_k": draw(step.H, step.Dk, scale=step.Dk**-0.5), "bias": draw(step.H)}
    valid_lens = None if step.lens is None else lens(*step.lens)
    masked = {}
    if step.seen is not None:
        masked["mask"] = scattered(step.B, 1, step.Tk, share=step.seen)
        masked["mask"][-1] = False

    k = F.linear(keys, *raw.values()) if raw else keys
    eager = reference.attend(F.linear(queries, w_q), k, values, w_v, valid_lens, **masked)
    got = kernels.step(
        step.multiprocessors, queries, w_q, keys, values, w_v, valid_lens, **raw, **masked
    )
    sizes = {name: getattr(step, name) for name in ("B", "Tq", "Tk", "H", "Dq", "Dv", "tied")}
    case = Case(**sizes, Dk=features, lens=valid_lens, bias=bool(raw), **masked)
    given = {"queries": queries, "keys": keys, "values": values, "w_q": w_q, "w_v": w_v}
    given |= raw or {"w_k": torch.eye(step.H)}
    given |= {name: torch.zeros_like(x) for name, x in zip(OUTPUTS, eager, strict=True)}
    exact = long_double(case, {name: x.double() for name, x in given.items()})
    exact = {name: exact[name] for name in OUTPUTS}
    ours, theirs = (
        {n: x.double().numpy().astype(np.longdouble) for n, x in zip(OUTPUTS, found, strict=True)}
        for found in (got, eager)
    )
    return max(shares(ours, errors(theirs, exact, kind), exact, kind).values())
