"""Both sides of every magnitude at which the CUDA kernels change path, or cut a number off."""

from contextlib import closing

import pytest
import torch
from built import needs_compiler
from cases import on
from near import FACTORS, near
from on_host import OnHost
from parity import check

pytestmark = needs_compiler

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HALF = (BF16, FP16)
STEP, BEAMS, MANY = 1, 3, 16  # queries, which decide the kernel
# Queries and keys, kernels and dtypes: where the exponential of a query is too large for that of a
# sum to be taken from it, and of a key; where tanh is 1 to a 16-bit sum, or a product of four would
# overflow; where the cube of tanh near zero is taken; where fp32's tanh is a polynomial.
PLACES = {
    "four share": (4.75, 4.75, (MANY,), (FP32, *HALF)),
    "near zero in 16 bits": (0.015, 0.015, (STEP, MANY), HALF),
    "large queries": (-15.0, 15.0, (BEAMS, MANY), HALF),
    "large keys": (-14.0, 25.0, (BEAMS, MANY), HALF),
    "saturated": (5.4, 5.4, (STEP, BEAMS, MANY), HALF),
    "saturated, a fourth not": (5.4, 5.4, (STEP, BEAMS, MANY), HALF),
    "polynomial": (0.3, 0.3, (STEP, BEAMS, MANY), (FP32,)),
}
DEEP = (FP16,)  # compiled from the same templates
CASES = [
    pytest.param(
        place, queries, dtype, a, c, marks=pytest.mark.deep if dtype in DEEP else (),
        id=f"{place}-{queries}-{dtype}",
    )
    for place, (a, c, of_queries, dtypes) in PLACES.items()
    for queries in of_queries
    for dtype in dtypes
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    with closing(OnHost()) as running:
        yield running


def near_of(queries, **more):
    return near({"B": 2, "Tq": queries, "Tk": 6, "Dv": 5}, 16, **more)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("place", "queries", "dtype", "a", "c"), CASES)
def test_near(kernels, place, queries, dtype, a, c, factor):
    # So large that fp16 has the gradients in full.
    scale = {"context": 1e3, "weights": 1e3} if dtype == FP16 else {}
    of_query = a if place == "large keys" else factor * a
    sized = {"of_query": of_query, "of_key": factor * c, "fourth": 0.05 if "fourth" in place else 1}
    case = near_of(queries, scale=scale, **sized)
    check(case, dtype, on(kernels))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("dtype", "w_v", "place"), [(FP32, 4e4, 4.35), (BF16, 1e8, 7.0)], ids=str)
def test_large_w_v(kernels, dtype, w_v, place, factor):
    """Numerators are w_v times three denominators, in fp32 four, that are as large as can be."""
    scale = {"w_v": factor * w_v}
    check(near_of(MANY, scale=scale, of_query=place, of_key=place), dtype, on(kernels))
