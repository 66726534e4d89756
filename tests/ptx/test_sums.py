"""Sums of as many numbers as a call has: their roundings do not grow with it.

In fp32, where nothing hides them. Eager is as on a GPU, whose softmax passes back ``p g - p m``
with ``m = sum p g``. On the CPU it is ``p (g - m)``, a difference that is rounded to the same side
for all keys of a size: an error of its own that would excuse ours.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driven import CudaPtx, needs_nvcc
from parity import check, eager, judged, neighbour, run
from projected import Projected
from targets import on
from tritoned import TritonPtx

from bahdanau_fast import parity as rule
from benchmarks.contestants.parity import GRANTED, rounded_products
from ptx_machine import needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]


class Softmax(torch.autograd.Function):
    """Over the last axis, differentiated as on a GPU."""

    @staticmethod
    def forward(ctx, scores):
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        weighed = weights * grad
        return weighed - weights * weighed.sum(-1, keepdim=True)


@pytest.fixture(autouse=True)
def softmax_of_a_gpu(monkeypatch):
    monkeypatch.setattr(F, "softmax", lambda scores, dim: Softmax.apply(scores))


def case_of(B, Tq, Tk, H, Dv):
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "Dq": H, "Dk": H, "Dv": Dv}
    scale = {"w_v": H**-0.5, "context": 16.0}
    return Projected(**sizes, bias=False, grads="context", scale=scale, kind="normal 1.0")


# Multiprocessors, and B, Tq, Tk, H, Dv: all of a GPU, or one, for one row; many queries.
LONG = (132, (1, 1, 40_000, 16, 8))
ALONE = (1, (1, 1, 16_000, 16, 8))
MANY = (132, (1, 18, 4096, 32, 8))


@pytest.mark.parametrize(
    ("kernels", "arch", "multiprocessors", "sizes"),
    [
        pytest.param(CudaPtx, "80", *LONG, id="cuda", marks=needs_nvcc),
        pytest.param(CudaPtx, "80", *ALONE, id="cuda, one processor", marks=needs_nvcc),
        pytest.param(TritonPtx, "90", *LONG, id="triton"),
        pytest.param(TritonPtx, "90", *ALONE, id="triton, one processor"),
        pytest.param(TritonPtx, "90", *MANY, id="triton, many queries"),
        pytest.param(TritonPtx, "75", *ALONE, id="triton, one processor of sm_75"),
    ],
)
def test_many_keys(kernels, arch, multiprocessors, sizes):
    check(case_of(*sizes), torch.float32, on(kernels(arch), multiprocessors))


def test_one_long_sum_breaks_the_rule():
    """Gradients as eager has them, but that of a query added up key after key."""
    case = case_of(*LONG[1])
    drawn = case.draw(torch.float32)

    def plain(x, dtype, function=eager):
        return run(function, case, x, dtype)

    def rounded(inputs, lens):
        return eager(inputs | {"w_v": rounded_products(inputs["w_v"], torch.float32)}, lens)

    chained = plain(drawn, torch.float32)
    of_keys = chained["d keys"][0].astype(np.float32)  # what that of the only query is the sum of
    chained["d queries"] = np.add.accumulate(of_keys)[-1].reshape(1, 1, -1).astype(np.longdouble)
    near = partial(neighbour, case, drawn, torch.float32)
    assert judged(chained, plain, drawn, near, torch.float32)["d queries"] > 2
    exact, by_eager = (plain(drawn, dtype)["d queries"] for dtype in (torch.float64, torch.float32))
    once = np.abs(plain(drawn, torch.float64, rounded)["d queries"] - exact).max()
    largest, error = np.abs(exact).max(), np.abs(by_eager - exact).max()
    assert 2**-25 * largest < once < 2**-21 * largest
    most = rule.allowed(error, largest, torch.float32) + GRANTED * once
    assert np.abs(chained["d queries"] - exact).max() > 2 * most
