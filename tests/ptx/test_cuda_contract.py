"""The machine code of csrc/cuda meets the contract: every row, drawn cases, both sides of every
magnitude at which it changes path, NaN, padding and dropout. Decoders: test_persistent.py, and
test_check_in_machine.py, whose modules take their steps one by one, too.

In the suite fp32 runs as compiled for sm_80 and bf16 for sm_90a, and rows take the two in turn.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from beside import as_exact
from contract import LARGE, lens, operands
from drawing import cases, drawn
from driven import CudaPtx, needs_nvcc
from entry_points import attention as attention_of
from entry_points import attention_backward as attention_backward_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from near import FACTORS, near
from parity import Case
from projected import PROJECTIONS, case_of
from targets import DTYPES, FEW, ROWS, STEPS, every, on

from bahdanau_fast import reference
from bahdanau_fast.ops.attention import INPUTS
from bahdanau_fast.ops.dropout import dropout_factors
from ptx_machine import Order, needs_compiler

pytestmark = [needs_compiler, needs_nvcc, pytest.mark.thorough]

FP32, BF16, FP16 = DTYPES["fp32"], DTYPES["bf16"], DTYPES["fp16"]
STEP, BEAMS, MANY = 1, 3, 16  # queries, which decide the kernel


@functools.cache
def compiled_for(arch):
    return CudaPtx(arch)


def kernels(dtype):
    return compiled_for("80" if dtype == FP32 else "90a")


IN_FP32, IN_BF16 = ("fp32", "80"), ("bf16", "90a")
QUICK = {(row, *which) for row, which in zip(ROWS, itertools.cycle((IN_FP32, IN_BF16)))}
QUICK |= {(step, *IN_BF16) for step in STEPS}
# In bf16, FEW is for test_cuda.py.
QUICK = {case for case in QUICK if case[0] not in FEW} | {(name, *IN_FP32) for name in FEW}
# The other dtype of every row that is no step of many elements.
QUICK_INSIDE = {
    (row, *(IN_BF16 if (row, *IN_FP32) in QUICK else IN_FP32)) for row in ROWS
    if not row.startswith(("large step", "long step", "wide", "whole"))
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "arch"), every(("80", "90a"), QUICK))
def test_every_case(name, dtype, arch):
    compiled_for(arch).check(name, dtype)


def inside(kernels, multiprocessors=4):
    """The function :func:`parity.check` tests: all of it by the operator."""

    def function(inputs, valid_lens, **given):
        context, weights = kernels.inside(multiprocessors, inputs, valid_lens, **given)
        return context, weights.to(context.dtype)

    return function


@pytest.mark.parametrize(("name", "dtype", "arch"), every(("80", "90a"), QUICK_INSIDE, ROWS))
def test_every_case_with_its_products(name, dtype, arch):
    compiled_for(arch).check(name, dtype, inside)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_magnitudes(queries, scale):
    # bf16 takes the factored, clamped and direct forms in turn, fp32 the accurate ones.
    sizes = {**LARGE, "Tq": queries, "Tk": 67, "H": 67, "B": 2}
    for name in ("queries", "keys", "w_v"):
        case = Case(**sizes, scale={name: scale}, lens=lens(7, 53))
        kernels(BF16).check(case, BF16)
        if name == "keys" and queries == 16:
            kernels(FP32).check(Case(**{**sizes, "B": 3}, scale={name: scale}), FP32)


@pytest.mark.parametrize("size", [1e14, 1e20, 3e37, 3.3e38])
@pytest.mark.parametrize("queries", [1, 6, 16])
def test_the_largest_w_v(queries, size):
    """Where tanh is one: the scores of the three keys are 8, -8 and 0 times w_v, or once that."""
    keys = torch.tensor([30.0, -30.0, 0.0]).reshape(1, 3, 1).repeat(1, 1, 8).bfloat16()
    if size > 1e38:
        keys[..., 1:] = 0.0
    a, w_v = torch.zeros(1, queries, 8).bfloat16(), torch.full((1, 8), size).bfloat16()
    values = torch.tensor([2.0, 3.0, 5.0]).reshape(1, 3, 1).bfloat16()
    context, weights = kernels(BF16).attend(4, a, keys, values, w_v, None)
    assert weights.tolist() == [[[1.0, 0.0, 0.0]] * queries]
    assert context.tolist() == [[[2.0]] * queries]
    least, _ = kernels(BF16).attend(4, a, keys[:, 1:2], values[:, 1:2], w_v, None)
    assert least.tolist() == [[[3.0]] * queries]
    if queries > 4:
        return
    eye = torch.eye(8).bfloat16()
    raw = kernels(BF16).step(4, a, eye, keys, values, w_v, None, w_k=eye)
    assert raw[1].tolist() == [[[1.0, 0.0, 0.0]] * queries]


@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP16, marks=pytest.mark.deep)], ids=str)
@settings(drawn, max_examples=40)
@given(data=st.data())
def test_drawn_cases(dtype, data):
    case = kernels(dtype).case(data.draw(cases(dtype, most=30_000)))
    if dtype == FP16:  # the products of the context's gradient with the values, which torch takes
        given = case.draw(dtype)
        products = given["context"] @ given["keys" if case.tied else "values"].mT
        assume(not (products.abs() > 3e4).any())
    kernels(dtype).check(case, dtype, data.draw(st.sampled_from([on, inside])))


# Queries and keys, kernels and dtypes: where the exponential of a query is too large for that of a
# sum to be taken from it, and of a key; where tanh is 1 to a 16-bit sum, or a product of four would
# overflow; where the cube of tanh near zero is taken; where fp32's tanh is a polynomial.
HALF = (BF16, FP16)
PLACES = {
    "four share": (4.75, 4.75, (MANY,), (FP32, *HALF)),
    "near zero in 16 bits": (0.015, 0.015, (STEP, MANY), HALF),
    "large queries": (-15.0, 15.0, (BEAMS, MANY), HALF),
    "large keys": (-14.0, 25.0, (BEAMS, MANY), HALF),
    "saturated": (5.4, 5.4, (STEP, BEAMS, MANY), HALF),
    "saturated, a fourth not": (5.4, 5.4, (STEP, BEAMS, MANY), HALF),
    "polynomial": (0.3, 0.3, (STEP, BEAMS, MANY), (FP32,)),
}
CASES = [
    pytest.param(*(place, queries, dtype, a, c), marks=pytest.mark.deep if dtype == FP16 else ())
    for place, (a, c, of_queries, dtypes) in PLACES.items()
    for queries, dtype in itertools.product(of_queries, dtypes)
]


def near_of(queries, **more):
    return near({"B": 2, "Tq": queries, "Tk": 6, "Dv": 5}, 16, **more)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("place", "queries", "dtype", "a", "c"), CASES, ids=str)
def test_near(place, queries, dtype, a, c, factor):
    # So large that fp16 has the gradients in full.
    scale = {"context": 1e3, "weights": 1e3} if dtype == FP16 else {}
    of_query = a if place == "large keys" else factor * a
    sized = {"of_query": of_query, "of_key": factor * c, "fourth": 0.05 if "fourth" in place else 1}
    kernels(dtype).check(near_of(queries, scale=scale, **sized), dtype)


# Numerators are w_v times three denominators, in fp32 four, that are as large as can be.
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("dtype", "w_v", "place"), [(FP32, 4e4, 4.35), (BF16, 1e8, 7.0)], ids=str)
def test_large_w_v(dtype, w_v, place, factor):
    case = near_of(MANY, scale={"w_v": factor * w_v}, of_query=place, of_key=place)
    kernels(dtype).check(case, dtype)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.deep)], ids=str)
@pytest.mark.parametrize("queries", [STEP, BEAMS])
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_projections(kind, queries, dtype):
    kernels(dtype).check(case_of(kind, dtype, Tq=queries, Tk=20), dtype)


# ---- results without a rule ----


def problem(tq, tk, h, dv, dtype, b=2):
    return operands(dtype, b, tq, tk, h, dv)[0]


def results(inputs, valid_lens=None, *dropout, of=None):
    """Context, weights and the four gradients."""
    outputs = (of or kernels(inputs[0].dtype)).attend(4, *inputs, valid_lens, *dropout)
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds_of(outputs))]


def seeds_of(outputs):
    """Gradients of the outputs, the same at each call."""
    torch.manual_seed(2)
    return [torch.randn(x.shape).to(x) for x in outputs]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("queries", [3, 16])
def test_products_are_those_of_plain_code(queries, dtype):
    """Raw rows of any layout; only what is needed is given, and what is missing made again."""
    torch.manual_seed(1)
    shapes = (2, queries, 9), (150, 2, 16), (2, 150, 5), (40,), (40, 7), (40, 16), (40,)
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    inputs = dict(zip(INPUTS, drawn, strict=False))
    inputs |= {"queries": drawn[0][..., 2:], "keys": drawn[1].transpose(0, 1)}
    of, plain = kernels(dtype), {name: inputs[name] for name in ("values", "w_v")}
    of.begin(4, dtype)
    context, weights, _, queries_of, _ = attention_of(of.operator, **inputs, recorded=True)
    given = {"weights": weights, "grad_context": context, "grad_weights": None}
    every = {**given, **inputs, "projected_queries": queries_of}
    found = attention_backward_of(of.operator, **every, needs=127)[:7]
    again = attention_backward_of(of.operator, **given, **inputs, needs=127)[:7]
    assert all(map(torch.equal, found, again))
    for bit, grad in enumerate(found):
        alone = attention_backward_of(of.operator, **every, needs=1 << bit)
        assert [x.numel() > 0 for x in alone] == [i == bit for i in range(9)]
        torch.testing.assert_close(alone[bit], grad)  # threads add up w_v's in another order
    raw = {name: inputs[name] for name in ("queries", "w_q", "keys", "w_k", "bias")}
    plain["queries"], plain["keys"] = products(**raw)
    through = attention_backward_of(of.operator, **given, **plain, needs=3)[:2]

    def gradients(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in raw.values()]
        return torch.autograd.grad(products(*leaves), leaves, [x.to(dtype) for x in through])

    ours = map(dict(zip(INPUTS, found, strict=False)).get, raw)
    as_exact(ours, gradients(dtype), gradients(torch.float64), dtype)


def products(queries, w_q, keys, w_k, bias):
    # Of keys that lie together torch adds the bias before it rounds.
    return F.linear(queries, w_q), F.linear(keys.contiguous(), w_k, bias)


@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_bits_in_any_order_of_warps_and_blocks(queries, dtype):
    inputs, arch = problem(queries, 150, 40, 33, dtype), kernels(dtype).arch
    want = results(inputs, lens(150, 70))
    for order in (Order.BACKWARDS, Order.RANDOM):
        got = results(inputs, lens(150, 70), of=CudaPtx(arch, order=order))
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_dropout_drops_what_every_backend_drops(queries):
    inputs, seed, p = problem(queries, 150, 12, 20, FP32), torch.tensor([1234567890123]), 0.4
    got = results(inputs, lens(150, 70), seed, p)
    factors = dropout_factors(seed, got[1].shape, p)

    def plain(dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        _, weights = reference.attend(*given, lens(150, 70))
        outputs = weights * factors.to(dtype) @ given[2], weights
        seeds = [x.to(dtype) for x in seeds_of(got[:2])]
        return [*outputs, *torch.autograd.grad(outputs, given, seeds)]

    as_exact(got, plain(FP32), plain(torch.float64), FP32)
    kept = results(inputs, lens(150, 70))[0]
    assert float((got[0] - kept).detach().abs().max()) > 0.01


def test_dropout_of_a_step_that_projects():
    *inputs, w_v = (x.detach() for x in problem(3, 150, 16, 20, FP32))
    given = {"w_q": torch.eye(16), "seed": torch.tensor([7]), "dropout_p": 0.4}
    of = kernels(FP32)
    of.begin(4, FP32)
    inside, in_front = (
        [x.clone() for x in attention_of(of.operator, *inputs, w_v, **given, recorded=recorded)[:2]]
        for recorded in (False, True)
    )
    torch.testing.assert_close(inside, in_front)
    kept = attention_of(of.operator, *inputs, w_v, w_q=given["w_q"])[0]
    assert float((inside[0] - kept).abs().max()) > 0.01


INF, NAN = float("inf"), float("nan")
LENGTHS = {
    torch.float64: [5e-324, 2.0, 2.0 + 2**-51, 4.5, -0.0, -1.0, -INF, INF, NAN, 2.0**52, 1e300],
    torch.float32: [1e-45, 2.0, 2.0 + 2**-22, 4.5, -0.0, -1.0, -INF, INF, NAN, 2.0**63],
    torch.float16: [6e-8, 2.0, 2.0 + 2**-9, -1.0, INF, NAN],
    torch.int64: [2, 0, -1, -(2**63), 2**63 - 1],
}


@pytest.mark.parametrize("dtype", LENGTHS, ids=str)
def test_lengths_of_any_size(dtype):
    given = torch.tensor(LENGTHS[dtype], dtype=dtype)
    inputs = problem(1, 7, 3, 2, FP32, b=len(given))
    seen = [sum(j < length for j in range(7)) for length in given.tolist()]
    got = (kernels(FP32).attend(4, *inputs, given)[1] > 0).sum(-1).flatten().tolist()
    assert got == [count or 7 for count in seen]  # of none, all are seen alike


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_padding_is_not_looked_at(queries):
    inputs = problem(queries, 150, 40, 33, BF16)
    clean = results(inputs, lens(9, 70))
    with torch.no_grad():
        for row, length in ((0, 9), (1, 70)):
            inputs[1][row, length:] = float("inf")
            inputs[2][row, length:] = float("nan")
    for got, want in zip(results(inputs, lens(9, 70)), clean, strict=True):
        assert torch.isfinite(got).all()
        # The range of a tile's keys picks the form, hence not bitwise.
        torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_nan_is_not_lost(queries, where):
    inputs = problem(queries, 70, 40, 33, BF16)
    with torch.no_grad():
        inputs[where][0, 0, 3] = float("nan")
    context, weights = kernels(BF16).attend(4, *inputs, None)
    assert torch.isnan(weights[0, 0]).all()
    assert torch.isnan(context[0, 0]).all()
    assert torch.isfinite(context[1]).all()
