"""Context, weights and every gradient keep the parity rule (bahdanau_fast.parity) on any input."""

from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from contract import LARGE, lens, per_query
from drawing import cases, drawn
from fresh import python
from hypothesis import given
from hypothesis import strategies as st
from parity import (
    DTYPES,
    Case,
    attended,
    called,
    check,
    eager,
    fused,
    long_double,
    module_of,
    run,
)
from targets import CPU, TABLE

import bahdanau_fast as bf


def stepped(inputs, lens, backend="cpu", mask=None, remembered=True, **options):
    """The module with a call for each query, on a memory or on the same keys."""
    module, found = module_of(inputs, **options), []
    source = inputs["keys"], inputs["values"], lens
    with bf.backends.use(backend):
        memory = module.memory(*source, mask=mask) if remembered else None
        for query in inputs["queries"].split(1, 1):
            if remembered:
                context = module.attend(query, memory)
            else:
                context = module(query, *source, mask=mask)
            found.append((context, module.attention_weights))
    return [torch.cat(of_steps, 1) for of_steps in zip(*found, strict=True)]


WAYS = {
    "function": fused,
    "module": called,
    "memory": attended,
    "steps on a memory": stepped,
    "a loop": partial(stepped, remembered=False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", TABLE)
def test_contract(row, dtype):
    CPU.check(row, dtype)


ROWS_OF_THE_MODULE = (
    "no lens", "lens per query", "whole row masked", "Tk = 0", "values is keys", "no bias",
    "batch_last inputs", "expanded inputs", "split keys, lens inside a chunk",
    "table of the other precision", "fp32 in small", "all in one operator, lens",
    "all in one operator, values is keys", "mask per row", "mask per query and lens",
    "mask, split keys", "mask, all in one operator",
)  # fmt: skip
# What a step leaves to the node that its keys share; lengths and masks are of a row, else.
ROWS_OF_STEPS = (
    *(row for row in ROWS_OF_THE_MODULE if "per query" not in row and "Tk = 0" not in row),
    *("through the weights alone", "through the context alone", "values is keys with lens"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("way", "row"),
    [
        *product(["module", "memory"], ROWS_OF_THE_MODULE),
        *product(["steps on a memory", "a loop"], ROWS_OF_STEPS),
    ],
)
def test_contract_of_the_module(way, row, dtype):
    CPU.check(row, dtype, WAYS[way])


def test_no_result_of_torch_is_left_unwritten():
    # torch then fills what it allocates with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.isnan(torch.empty(100)).all()
        for row in TABLE:
            CPU.check(row, torch.float32, attended)
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_workspace_is_read_before_it_is_written():
    # glibc then fills what it hands out with 0x7f: 3e38, or NaN in fp16.
    tunables = {"MALLOC_PERTURB_": "128", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    # What pytest puts in front of the path: this folder, and that of the helpers.
    helpers = str(Path(parity.__file__).parent)
    code = f"import sys; sys.path.append({helpers!r}); import test_parity as t; t.check_every_row()"
    python("-c", code, cwd=Path(__file__).parent, **tunables)


def check_every_row():
    for dtype in (torch.float32, torch.bfloat16):
        for row in TABLE:
            CPU.check(row, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_very_long_source(dtype):
    case = Case(B=1, Tq=1, Tk=120_000, H=3, Dq=2, Dk=2, Dv=2, lens=lens(119_999), grads="context")
    CPU.check(case, dtype)


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
    CPU.check(case, dtype)


def most(dtype):
    """The oracle of fp64 is slow."""
    return 60_000 if dtype == torch.float64 else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@drawn
@given(data=st.data())
def test_drawn_cases(dtype, data):
    case = data.draw(cases(dtype, most(dtype), masks=True))
    check(case, dtype, WAYS[data.draw(st.sampled_from(sorted(WAYS)[1:4]))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@drawn
@given(data=st.data())
def test_drawn_cases_with_features(dtype, data):
    check(data.draw(cases(dtype, most(dtype), masks=True, inside=True)), dtype)


ROWS_OF_THE_ORACLE = (
    "no lens", "lens per query", "whole row masked", "Tk = 0", "values is keys",
    "through the weights alone", "mask per query and lens",
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS_OF_THE_ORACLE)
def test_the_oracle_agrees_with_the_reference(row):
    case = CPU.case(row, H=11)
    inputs = case.draw(torch.float64)
    exact = long_double(case, inputs)
    plain = run(eager, case, inputs, torch.float64)
    assert exact.keys() == plain.keys()
    for name in exact:
        assert exact[name].shape == plain[name].shape
        if exact[name].size:
            largest = float(np.abs(exact[name]).max())
            assert float(np.abs(exact[name] - plain[name]).max()) <= 1e-13 * largest, name
