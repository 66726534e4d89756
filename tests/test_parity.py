"""Context, weights and every gradient keep the parity rule (tests/parity.py) on any input."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import (
    DTYPES,
    INPUTS,
    LAYOUTS,
    Case,
    attended,
    called,
    check,
    eager,
    fused,
    long_double,
    overflows,
    run,
)

import bahdanau_fast as bf
from bahdanau_fast.ops import SMALL

WAYS = {"function": fused, "module": called, "memory": attended}

# Big enough that fp32 is computed by the fp32 kernels.
LARGE = {"B": 3, "Tq": 17, "Tk": 53, "H": 211, "Dq": 19, "Dk": 23, "Dv": 29}
assert LARGE["B"] * LARGE["Tq"] * LARGE["Tk"] * LARGE["H"] > SMALL


def lens(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


per_query = torch.arange(-3, 48).reshape(3, 17) * 1.3

EVERY = (*INPUTS, "context", "weights")
# So small that projections and attention are one operator (bahdanau_fast/small.py).
SMALLEST = {"B": 2, "Tq": 2, "Tk": 7, "H": 5, "Dq": 3, "Dk": 9, "Dv": 2}

# One entry per row, and per way to get that row wrong, of the contract table.
CONTRACT = {
    "no lens": {},
    "lens per row": {"lens": lens(1, 26, 53)},
    "lens per query": {"lens": per_query.long()},
    "lens fractional": {"lens": lens(0.5, 2.5, 8.0001, dtype=torch.float64)},
    "lens fractional per query": {"lens": per_query},
    "lens just below a number": {"lens": lens(2.9999, 3.0, 3.0001, dtype=torch.float32)},
    "lens int32": {"lens": lens(3, 4, 5, dtype=torch.int32)},
    "lens uint8": {"lens": lens(0, 200, 52, dtype=torch.uint8)},
    "lens int8": {"lens": lens(-7, 1, 52, dtype=torch.int8)},
    "lens int16": {"lens": lens(-30000, 1, 52, dtype=torch.int16)},
    "lens bf16": {"lens": lens(1.5, 4, 52, dtype=torch.bfloat16)},
    "lens fp16": {"lens": lens(0.5, 4, 52, dtype=torch.float16)},
    "lens of odd strides": {"lens": per_query.t().contiguous().t()},
    "lens expanded": {"lens": lens(5).expand(3)},
    "longer than Tk": {"lens": lens(54, 10**12, 53)},
    "infinite lens": {"lens": lens(float("inf"), float("-inf"), 7.0, dtype=torch.float32)},
    "whole row masked": {"lens": lens(0, -5, 7)},
    "all rows masked": {"lens": lens(0, 0, 0)},
    "B = 0": {"B": 0},
    "B = 0 with lens": {"B": 0, "lens": torch.zeros(0, dtype=torch.int64)},
    "Tq = 0": {"Tq": 0},
    "Tq = 0 with lens": {"Tq": 0, "lens": torch.zeros(3, 0)},
    "Tk = 0": {"Tk": 0},
    "Tk = 0 with lens": {"Tk": 0, "lens": lens(0, 1, 2)},
    "Dv = 0": {"Dv": 0},
    "values is keys": {"tied": True},
    "values is keys with lens": {"tied": True, "lens": lens(3, 0, 99)},
    "one of each": {"B": 1, "Tq": 1, "Tk": 1, "H": 1, "Dq": 1, "Dk": 1, "Dv": 1},
    "H = 1": {"H": 1, "Tq": 100, "Tk": 500},
    "whole vectors": {"H": 64, "Dv": 64, "Tk": 64, "Tq": 16},
    "one past whole vectors": {"H": 65, "Dv": 65, "Tk": 65, "Tq": 17},
    "one short of whole vectors": {"H": 63, "Dv": 63, "Tk": 63, "Tq": 15},
    "no bias": {"bias": False},
    "through the weights alone": {"grads": "weights"},
    "through the context alone": {"grads": "context"},
    "wide values": {"Dv": 1100, "Tq": 9, "B": 1},  # past the 1024 columns of one tile
    "many batch rows": {"B": 19, "Tq": 2},  # one task per row
    "decoder step": {"B": 16, "Tq": 1, "Tk": 50, "H": 96, "lens": torch.arange(16) * 3},
    "split keys": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131},
    "split keys, lens inside a chunk": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131, "lens": lens(65)},
    "split keys, lens at a chunk": {"B": 2, "Tq": 1, "Tk": 1033, "H": 131, "lens": lens(64, 128)},
    "split keys, whole row masked": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131, "lens": lens(0)},
    "fp32 in small": {"B": 1, "Tq": 2, "Tk": 8, "H": 5},
    "all in one operator": SMALLEST,
    "all in one operator, lens": {**SMALLEST, "lens": lens(0, 2)},
    "all in one operator, lens per query": {**SMALLEST, "lens": torch.tensor([[1, 7], [3.5, -1]])},
    "all in one operator, no bias": {**SMALLEST, "bias": False},
    "all in one operator, values is keys": {**SMALLEST, "tied": True},
    "all in one operator, weights alone": {**SMALLEST, "grads": "weights"},
    "all in one operator, context alone": {**SMALLEST, "grads": "context"},
    "all in one operator, strided": {**SMALLEST, "layout": dict.fromkeys(EVERY, "strided")},
    "all in one operator, transposed": {**SMALLEST, "layout": dict.fromkeys(EVERY, "transposed")},
    "all in one operator, large inputs": {**SMALLEST, "scale": {"queries": 60.0, "keys": 60.0}},
    "table of the other precision": {"B": 1, "Tq": 80, "Tk": 41, "H": 43},
}
CONTRACT |= {
    f"{name} inputs": {
        "layout": dict.fromkeys(("queries", "keys", "values", "w_q", "w_k", "w_v", "bias"), name)
    }
    for name in ("sliced", "strided")
}
CONTRACT |= {
    f"{name} inputs": {"layout": dict.fromkeys(("queries", "keys", "values"), name)}
    for name in ("transposed", "batch_last", "expanded")
}
CONTRACT |= {
    f"{name} output gradients": {"layout": {"context": name, "weights": name}}
    for name in ("sliced", "strided", "transposed", "batch_last", "expanded")
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", CONTRACT)
def test_contract(row, dtype):
    check(Case(**{**LARGE, **CONTRACT[row]}), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["module", "memory"])
@pytest.mark.parametrize(
    "row",
    [
        "no lens",
        "lens per query",
        "whole row masked",
        "Tk = 0",
        "values is keys",
        "no bias",
        "batch_last inputs",
        "expanded inputs",
        "split keys, lens inside a chunk",
        "table of the other precision",
        "fp32 in small",
        "all in one operator, lens",
        "all in one operator, values is keys",
    ],
)
def test_contract_of_the_module(row, way, dtype):
    check(Case(**{**LARGE, **CONTRACT[row]}), dtype, WAYS[way])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_very_long_source(dtype):
    case = Case(B=1, Tq=1, Tk=120_000, H=3, Dq=2, Dk=2, Dv=2, lens=lens(119_999), grads="context")
    check(case, dtype)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_magnitudes(scale, dtype):
    for name in ("queries", "keys", "values", "w_q", "w_k", "w_v"):
        check(Case(**LARGE, scale={name: scale}, lens=lens(7, 53, 0)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_positions_are_not_looked_at(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 7), torch.randn(2, 70, 7), torch.randn(2, 70, 90)
    w_q, w_k, w_v = torch.randn(91, 7), torch.randn(91, 7), torch.randn(91)
    args = [x.to(dtype) for x in (q, k, v, w_q, w_k, w_v)]
    clean = bf.additive_attention(*args, lens(9, 41), backend="cpu")
    for row, length in ((0, 9), (1, 41)):
        args[1][row, length:] = 1e4
        args[2][row, length:] = float("nan")
    for got, want in zip(
        bf.additive_attention(*args, lens(9, 41), backend="cpu"), clean, strict=True
    ):
        assert torch.isfinite(got).all()
        # The range of the keys picks the path of the whole row, hence not bitwise.
        torch.testing.assert_close(got, want, rtol=8 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart_and_shifted_alike(dtype):
    # w_v of length 1000: a softmax that is one at a single key. A bias of the scores shifts all.
    case = Case(**LARGE, scale={"w_v": 100.0}, lens=per_query)
    check(case, dtype)


SCALES = st.sampled_from([1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4])
SIZES = st.one_of(st.integers(1, 130), st.sampled_from([1, 2, 3, 7, 8, 16, 31, 32, 64, 67, 127]))


@st.composite
def cases(draw, dtype, most=None):
    """A case from the whole contract; ``most`` bounds B*Tq*Tk*H."""
    size = {
        "B": draw(st.integers(0, 5)),
        "Tq": draw(st.integers(0, 33)),
        "Tk": draw(st.one_of(st.integers(0, 130), st.sampled_from([1, 2, 61, 113, 127]))),
    }
    size |= {name: draw(SIZES) for name in ("H", "Dq", "Dk", "Dv")}
    while most and size["B"] * size["Tq"] * size["Tk"] * size["H"] > most:
        largest = max(("Tq", "Tk", "H"), key=size.get)
        size[largest] = (size[largest] + 1) // 2
    kind = draw(st.sampled_from(["none", "rows", "queries"]))
    length = None
    if kind != "none":
        shape = (size["B"],) if kind == "rows" else (size["B"], size["Tq"])
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        length = torch.rand(shape, generator=generator) * (size["Tk"] + 8) - 4
        length = length.to(draw(st.sampled_from([torch.int64, torch.int32, torch.float32])))
    scaled = ("queries", "keys", "values", "w_q", "w_k", "w_v", "bias", "context", "weights")
    some = draw(st.lists(st.sampled_from(scaled), max_size=4, unique=True))
    laid = draw(st.lists(st.sampled_from(scaled), max_size=4, unique=True))
    case = Case(
        **size,
        lens=length,
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        grads=draw(st.sampled_from(["both", "both", "context", "weights"])),
        scale={name: draw(SCALES) for name in some},
        layout={name: draw(st.sampled_from(sorted(LAYOUTS))) for name in laid},
        seed=draw(st.integers(0, 2**31)),
    )
    # In fp16 a projection past 65504 is infinite before attention is asked: make it fit.
    while dtype == torch.float16 and overflows(case, case.draw(dtype), dtype):
        case.scale = {name: scale**0.5 for name, scale in case.scale.items()}
    return case


drawn = settings(
    max_examples=110,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@drawn
@given(cases(torch.float32), st.sampled_from(sorted(WAYS)))
def test_drawn_cases_fp32(case, way):
    check(case, torch.float32, WAYS[way])


@drawn
@given(cases(torch.float64, most=60_000), st.sampled_from(sorted(WAYS)))
def test_drawn_cases_fp64(case, way):
    check(case, torch.float64, WAYS[way])


@drawn
@given(cases(torch.bfloat16), st.sampled_from(sorted(WAYS)))
def test_drawn_cases_bf16(case, way):
    check(case, torch.bfloat16, WAYS[way])


@drawn
@given(cases(torch.float16), st.sampled_from(sorted(WAYS)))
def test_drawn_cases_fp16(case, way):
    check(case, torch.float16, WAYS[way])


@pytest.mark.parametrize(
    "row",
    [
        "no lens",
        "lens per query",
        "whole row masked",
        "Tk = 0",
        "values is keys",
        "through the weights alone",
    ],
)
def test_the_oracle_agrees_with_the_reference(row):
    case = Case(**{**LARGE, "H": 11, **CONTRACT[row]})
    inputs = case.draw(torch.float64)
    exact = long_double(case, inputs)
    plain = run(eager, case, inputs, torch.float64)
    assert exact.keys() == plain.keys()
    for name in exact:
        assert exact[name].shape == plain[name].shape
        if exact[name].size:
            largest = float(np.abs(exact[name]).max())
            assert float(np.abs(exact[name] - plain[name]).max()) <= 1e-13 * largest, name


def test_no_result_of_torch_is_left_unwritten():
    # torch then fills what it allocates with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.isnan(torch.empty(100)).all()
        for row in CONTRACT:
            check(Case(**{**LARGE, **CONTRACT[row]}), torch.float32, attended)
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_workspace_is_read_before_it_is_written():
    # glibc then fills what it hands out with 0x7f: 3e38, or NaN in fp16.
    tunables = {"MALLOC_PERTURB_": "128", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    code = "import test_parity as t; t.check_every_row()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        text=True,
        env={**os.environ, **tunables},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def check_every_row():
    for dtype in (torch.float32, torch.bfloat16):
        for row in CONTRACT:
            check(Case(**{**LARGE, **CONTRACT[row]}), dtype)
