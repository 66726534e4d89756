"""Both sides of every magnitude at which the CPU kernels change path, on each instruction set."""

import parity
import pytest
import torch
from near import FACTORS, check, near, of_saturated
from parity import DTYPES
from projected import PROJECTIONS, case_of
from targets import without_gradients
from test_instruction_sets import sets, using

# Queries and keys where: four denominators share a division, in fp32 and in fp64; exp(2c) is a
# normal number, in fp32 and in fp64; a table keeps expm1; a unit is saturated for every key;
# 1 - tanh^2 is a rounding error, for results in fp64 and in fp32, and from sums in fp64.
PLACES = {
    "four share": (9.0, 9.0),
    "four share, opposite": (-9.0, 9.0),
    "four share in fp64": (80.0, 80.0),
    "four share in fp64, opposite": (-80.0, 80.0),
    "table": (-43.0, 43.0),
    "table in fp64": (-354.0, 354.0),
    "least exponential": (-52.0, 1.0),
    "least exponential in fp64": (-372.5, 1.0),
    "shifted table": (0.5, 0.5),
    "shifted table, larger queries": (0.8, 0.25),
    "shifted table, opposite": (-0.5, 0.5),
    "saturated": (3.5, 2.0),
    "saturated, opposite": (-3.5, 2.0),
    "slope in fp64": (9.3, 9.3),
    "slope for fp32": (7.8, 7.8),
    "slope of a sum": (-381.4, 400.0),
    "tanh of a sum": (-399.2, 400.0),
}
SMALL = {"B": 2, "Tq": 3, "Tk": 6, "Dv": 5}
LARGE = {"B": 2, "Tq": 17, "Tk": 128, "Dv": 5}  # fp32 that is computed in fp32


def spread_of(place):
    """So little where a sum is looked at that it stays what it is."""
    return 1e-3 if "sum" in place else 0.08


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_around_each_switch(place, dtype, factor):
    query, key = (factor * size for size in PLACES[place])
    for name in sets():
        with using(name):
            check(near(SMALL, 64, of_query=query, of_key=key, spread=spread_of(place)), dtype)


@pytest.mark.parametrize("queries", [1, 37])
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_projections(kind, queries):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parity.check(case_of(kind, dtype, Tq=queries), dtype)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("place", PLACES)
def test_fp32_around_each_switch(place, factor, monkeypatch):
    """Forward only: next to saturation eager's 1 - tanh^2 has two roundings of fp32, ours more."""
    monkeypatch.setattr(parity, "NEIGHBOURS", 0)
    query, key = (factor * size for size in PLACES[place])
    case = near(LARGE, 128, of_query=query, of_key=key, spread=spread_of(place))
    least = of_saturated(case, torch.float32)
    parity.check(case, torch.float32, without_gradients(parity.fused), least)
