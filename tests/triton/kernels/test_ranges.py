"""Projections of every size, and both sides of every magnitude at which the kernels change path.

Gradients of many queries in 16 bits are Fourier sums, or one by one: the kernel decides from the
largest projections, and from what comes of the gradients, in each tile. Those of few queries and of
short sequences, which take tanh itself, are judged beside them. Drawn normal numbers never put four
neighbours at a magnitude at once: in ``test_near`` all projections have one sign and nearly one
size.
"""

import itertools
import math

import parity
import pytest
import torch
from near import Near, of_saturated
from projected import PROJECTIONS, case_of

import bahdanau_fast as bf
from bahdanau_fast.kernels import elementary, plans

HALF = (torch.bfloat16, torch.float16)
EVERY = (torch.float32, *HALF)
CASES = [(*case, dtype) for case in itertools.product(PROJECTIONS, (2, 37)) for dtype in EVERY]
# 1.004 times what is allowed: eager's slopes are one there, without a rounding.
CASES.remove(("opposite 0.01 0.01", 37, torch.float32))


def check(case, dtype, *least):
    parity.check(case, dtype, lambda *given: parity.fused(*given, backend="triton"), *least)


@pytest.fixture(params=[True, False], ids=["fourier", "tanh"])
def by_fourier(request, monkeypatch):
    monkeypatch.setattr(plans, "pays_by_fourier", lambda *_: request.param)


@pytest.mark.parametrize(("kind", "queries", "dtype"), CASES, ids=str)
def test_projections(kind, queries, dtype, monkeypatch):
    monkeypatch.setattr(plans, "pays_by_fourier", lambda *_: True)
    check(case_of(kind, dtype, Tq=queries), dtype)


# Kind, hidden units, w_v of the far one: an offset of all scores, which a softmax does not see;
# units past the last, whose slopes are one; and saturated units, of which one outweighs all others.
SEEM_RIGHT = [("far 6.0 0.1", 8, 64.0), *(("all 8.0", n, 0.0) for n in (1, 2, 3, 5))]
SEEM_RIGHT += [("far 6.0 0.1", 4, 10.0), ("keys 8.0", 8, 1000.0)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("kind", "hidden", "weight"), SEEM_RIGHT)
def test_tiles_that_seem_right(kind, hidden, weight, dtype, by_fourier):
    sizes = {"B": 1, "Tq": 18, "Tk": 20, "H": hidden, "Dq": hidden, "Dk": hidden, "Dv": 3}
    check(case_of(kind, dtype, **sizes, far_weight=weight), dtype)


@pytest.mark.parametrize("size", [1e-25, 1e30])
def test_tiles_that_seem_right_of_gradients_of_any_size(size, monkeypatch):
    monkeypatch.setattr(plans, "pays_by_fourier", lambda *_: True)
    sizes = {"B": 1, "Tq": 18, "Tk": 20, "H": 3, "Dq": 3, "Dk": 3, "Dv": 3}
    case = case_of("all 8.0", torch.bfloat16, **sizes)
    case.scale = {**case.scale, "context": size, "weights": size}
    check(case, torch.bfloat16)


# |a + c| where: four denominators are multiplied, or two; 2^(2 z / log 2) is held; fp32's tanh near
# zero is a polynomial; and the table of queries overflows.
FOUR, TWO, HELD, POLYNOMIAL, TABLE = 10.7, 21.4, 31 * math.log(2) / 2, 0.6, 128 * math.log(2) / 2
TERMS = 28 * math.log(2) / 8  # four units of opposite signs whose denominator fp16 still has
SMALL = 1.0  # |c| up to which fp32 adds up tanh


# Units enough for four neighbours in one program, and queries enough for the tables, or a step.
SIZES = {"B": 2, "Tk": 3, "H": 64, "Dq": 64, "Dk": 64, "Dv": 16, "bias": False}
PLACES = [
    *(("four", 17, dtype, FOUR / 2, FOUR / 2) for dtype in EVERY),
    *(("two", 17, dtype, TWO / 2, TWO / 2) for dtype in EVERY),
    # Keys of the other sign: the interpreter turns fp32's subnormal slopes into wrong bf16 ones.
    *(("table", 17, dtype, TABLE, -12.0) for dtype in EVERY),
    ("small keys", 17, torch.float32, 0.3, SMALL),
    ("small keys, large queries", 17, torch.float32, 30.0, SMALL),
    ("polynomial", 2, torch.float32, POLYNOMIAL / 2, POLYNOMIAL / 2),
    # Denominators of terms shrink where signs differ, and scores with what is left of them.
    *(("terms", 17, dtype, x, -x) for dtype in HALF for x in (0.1, TERMS, 1e4)),
    *(("held", 2, dtype, HELD / 2, HELD / 2) for dtype in HALF),
]


def test_these_are_the_places():
    values = (elementary.NEAR_FOUR, elementary.NEAR_TWO, elementary.SMALL)
    assert tuple(constant.value for constant in values) == (FOUR, TWO, SMALL)
    assert elementary.LARGEST.value * math.log(2) / 2 == HELD


@pytest.mark.parametrize("size", [1e12, 3e38])
@pytest.mark.parametrize(("queries", "dtype"), [(17, torch.float32), (2, torch.bfloat16)], ids=str)
def test_the_largest_w_v(queries, dtype, size):
    # Of the first key four denominators are nearly as large as they can be.
    inputs = torch.full((1, queries, 64), FOUR / 2 - 0.01), torch.empty(1, 3, 64), torch.zeros(64)
    a, keys, w_v = (x.to(parity.DEVICE, dtype) for x in inputs)
    keys.copy_(a[0, :1] * torch.tensor([[1.0], [-1.0], [0.0]], device=parity.DEVICE))
    w_v[0] = size
    _, weights = bf.additive_attention(a, keys, keys, None, None, w_v, backend="triton")
    assert weights.tolist() == [[[1.0, 0.0, 0.0]] * queries]


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize(("place", "queries", "dtype", "of_query", "of_key"), PLACES, ids=str)
def test_near(place, queries, dtype, of_query, of_key, factor, monkeypatch):
    # Judged by slopes that fp64 calls zero.
    monkeypatch.setattr(parity, "oracle", lambda case, drawn, _: parity.long_double(case, drawn))
    sizes = (of_query if "large" in place else factor * of_query, factor * of_key)
    # So large that fp16 has the gradients in full.
    large = {"context": 1e3, "weights": 1e3} if dtype == torch.float16 else {}
    case = Near(**SIZES, Tq=queries, scale=large, of_query=sizes[0], of_key=sizes[1])
    least = of_saturated(case, dtype) if "large" in place else {}
    check(case, dtype, least)
