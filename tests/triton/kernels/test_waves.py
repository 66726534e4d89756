"""Gradients of many queries in 16 bits, whatever the projections are: by waves, or one by one.

The kernel decides from the largest projections, and from what comes of the gradients, in each tile.
Those of few queries, which take tanh itself, are judged beside them.
"""

import parity
import pytest
import torch
from projected import PROJECTIONS, case_of

HALF = (torch.bfloat16, torch.float16)
CALLS = [(2, torch.float32), *((queries, dtype) for queries in (2, 37) for dtype in HALF)]


@pytest.mark.parametrize(("queries", "dtype"), CALLS, ids=str)
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_projections(kind, queries, dtype):
    case = case_of(kind, dtype, Tq=queries)
    parity.check(case, dtype, lambda *given: parity.fused(*given, backend="triton"))
