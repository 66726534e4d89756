"""Sums of as many numbers as a call has: their roundings do not grow with it.

In fp32, where nothing hides them. Eager is as on a GPU, whose softmax passes back ``p g - p m``
with ``m = sum p g``. On the CPU it is ``p (g - m)``, a difference that is rounded to the same side
for all keys of a size: an error of its own that would excuse ours.
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driven import CudaPtx, needs_nvcc
from parity import judged, moved
from tritoned import TritonPtx

from bahdanau_fast import parity as rule
from bahdanau_fast import reference
from benchmarks.contestants.parity import GRANTED, rounded_products
from ptx_machine import needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

INPUTS = ("queries", "keys", "values", "w_v")


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


def draw(batch, queries_len, keys_len, hidden, features):
    """Inputs and the gradient of the context, of numbers that fp32 holds."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "queries": (batch, queries_len, hidden),
        "keys": (batch, keys_len, hidden),
        "values": (batch, keys_len, features),
        "w_v": (1, hidden),
        "context": (batch, queries_len, features),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    drawn["w_v"] *= hidden**-0.5
    drawn["context"] *= 16.0
    return {name: x.double() for name, x in drawn.items()}


def results(attend, drawn, dtype):
    """Context, weights and gradients by name, in long double."""
    given = {name: x.to(dtype) for name, x in drawn.items()}
    inputs = [given[name].requires_grad_() for name in INPUTS]
    context, weights = attend(*inputs, None)
    grads = torch.autograd.grad(context, inputs, given["context"])
    found = {"context": context, "weights": weights}
    found |= {f"d {name}": grad for name, grad in zip(INPUTS, grads, strict=True)}
    return {n: x.detach().double().numpy().astype(np.longdouble) for n, x in found.items()}


@pytest.fixture
def plain(monkeypatch):
    """Eager code as on a GPU."""

    def attend(*inputs):
        with monkeypatch.context() as patched:
            patched.setattr(F, "softmax", lambda scores, dim: Softmax.apply(scores))
            return reference.attend(*inputs)

    return functools.partial(results, attend)


def shares(ours, plain, drawn):
    def near(seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: moved(x, torch.float32, generator) for name, x in drawn.items()}

    return judged(ours, plain, drawn, near, torch.float32)


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
def test_many_keys(kernels, arch, multiprocessors, sizes, plain):
    drawn = draw(*sizes)
    attend = functools.partial(kernels(arch).attend, multiprocessors)
    found = shares(results(attend, drawn, torch.float32), plain, drawn)
    assert {name: share for name, share in found.items() if not share <= 1} == {}


def test_one_long_sum_breaks_the_rule(plain):
    """Gradients as eager has them, but that of a query added up key after key."""
    drawn = draw(*LONG[1])
    chained = plain(drawn, torch.float32)
    of_keys = chained["d keys"][0].astype(np.float32)  # what that of the only query is the sum of
    chained["d queries"] = np.add.accumulate(of_keys)[-1].reshape(1, 1, -1).astype(np.longdouble)
    assert shares(chained, plain, drawn)["d queries"] > 2

    def rounded(queries, keys, values, w_v, lens):
        return reference.attend(queries, keys, values, rounded_products(w_v, torch.float32))

    exact, eager = (plain(drawn, dtype)["d queries"] for dtype in (torch.float64, torch.float32))
    once = np.abs(results(rounded, drawn, torch.float64)["d queries"] - exact).max()
    largest, error = np.abs(exact).max(), np.abs(eager - exact).max()
    assert 2**-25 * largest < once < 2**-21 * largest
    most = rule.allowed(error, largest, torch.float32) + GRANTED * once
    assert np.abs(chained["d queries"] - exact).max() > 2 * most
