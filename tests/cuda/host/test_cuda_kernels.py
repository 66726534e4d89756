"""The CUDA kernels meet the contract: their own source, compiled for the host (on_host.py).

What only the host proves: the whole contract table and drawn cases in seconds, under
AddressSanitizer and UBSan, which fail on the first thing they see. Machine code is for tests/ptx.
"""

import itertools
from contextlib import closing

import pytest
import torch
from built import needs_compiler
from cases import DTYPES, ROWS, STEPS, measured, on
from contract import LARGE, lens
from drawing import cases, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from on_host import OnHost
from parity import Case, check

from bahdanau_fast import reference
from bahdanau_fast.ops.dropout import dropout_factors
from bahdanau_fast.parity import allowed, error

pytestmark = needs_compiler

QUICK = "bf16", "fp32"  # the others are compiled from the same templates; make ptx runs all of them


@pytest.fixture(scope="module")
def kernels():
    with closing(OnHost()) as running:
        yield running


@pytest.mark.parametrize(("row", "dtype"), list(zip(ROWS, itertools.cycle(QUICK), strict=False)))
def test_contract(kernels, row, dtype):
    assert measured(kernels, row, dtype) <= 1


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_projects(kernels, step):
    for dtype in QUICK if STEPS[step].Dk is None else QUICK[:1]:
        assert measured(kernels, step, dtype) <= 1


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_magnitudes(kernels, queries, scale):
    # bf16 takes the factored, clamped and direct forms in turn, fp32 the accurate ones.
    sizes = {**LARGE, "Tq": queries, "Tk": 67, "H": 67 if queries < 16 else 211, "B": 2}
    for name in ("queries", "keys", "w_v"):
        case = Case(**sizes, scale={name: scale}, lens=lens(7, 53))
        check(case, torch.bfloat16, on(kernels))
        if name == "keys" and queries == 16:
            check(Case(**{**sizes, "B": 3}, scale={name: scale}), torch.float32, on(kernels))


@pytest.mark.parametrize("size", [1e14, 1e20, 3e37])
@pytest.mark.parametrize("queries", [1, 6, 16])
def test_the_largest_w_v(kernels, queries, size):
    """Where tanh is one: the scores of the three keys are 8, -8 and 0 times w_v."""
    keys = torch.tensor([30.0, -30.0, 0.0]).reshape(1, 3, 1).expand(1, 3, 8).bfloat16()
    a, w_v = torch.zeros(1, queries, 8).bfloat16(), torch.full((1, 8), size).bfloat16()
    values = torch.tensor([2.0, 3.0, 5.0]).reshape(1, 3, 1).bfloat16()
    context, weights = kernels.attend(4, a, keys, values, w_v, None)
    assert weights.tolist() == [[[1.0, 0.0, 0.0]] * queries]
    assert context.tolist() == [[[2.0]] * queries]
    if queries > 4:
        return
    eye = torch.eye(8).bfloat16()
    raw = kernels.step(4, a, eye, keys, values, w_v, None, w_k=eye)
    assert raw[1].tolist() == [[[1.0, 0.0, 0.0]] * queries]


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d in QUICK else pytest.mark.deep) for d in DTYPES]
)
@settings(drawn, max_examples=40)
@given(data=st.data())
def test_drawn_cases(kernels, dtype, data):
    dtype = DTYPES[dtype]
    case = data.draw(cases(dtype)).of_at_most(kernels.most_queries)
    check(case, dtype, on(kernels))


def problem(tq, tk, h, dv, dtype, b=2):
    torch.manual_seed(1)
    shapes = (b, tq, h), (b, tk, h), (b, tk, dv), (1, h)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(kernels, inputs, valid_lens=None, *dropout):
    """Context, weights and the four gradients."""
    outputs = kernels.attend(4, *inputs, valid_lens, *dropout)
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds_of(outputs))]


def seeds_of(outputs):
    """Gradients of the outputs, the same at each call."""
    torch.manual_seed(2)
    return [torch.randn(x.shape).to(x) for x in outputs]


@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_in_any_order_of_threads_and_blocks(kernels, queries, dtype):
    # The host runs every other launch backwards, blocks and threads.
    inputs = problem(queries, 150, 40, 33, dtype)
    first = results(kernels, inputs, lens(150, 70))
    kernels.attend(4, *inputs, None)  # turns the order round
    for got, want in zip(results(kernels, inputs, lens(150, 70)), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_dropout_drops_what_every_backend_drops(kernels, queries):
    inputs, seed, p = (
        problem(queries, 150, 12, 20, torch.float32),
        torch.tensor([1234567890123]),
        0.4,
    )
    got = results(kernels, inputs, lens(150, 70), seed, p)
    factors = dropout_factors(seed, got[1].shape, p)

    def plain(dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        _, weights = reference.attend(*given, lens(150, 70))
        outputs = weights * factors.to(dtype) @ given[2], weights
        seeds = [x.to(dtype) for x in seeds_of(got[:2])]
        return [*outputs, *torch.autograd.grad(outputs, given, seeds)]

    for ours, eager, exact in zip(got, plain(torch.float32), plain(torch.float64), strict=True):
        most = allowed(error(eager, exact), float(exact.abs().max()), torch.float32)
        assert error(ours, exact) <= most
    kept = results(kernels, inputs, lens(150, 70))[0]
    assert float((got[0] - kept).detach().abs().max()) > 0.01


INF, NAN = float("inf"), float("nan")
LENGTHS = {
    torch.float64: [5e-324, 2.0, 2.0 + 2**-51, 4.5, -0.0, -1.0, -INF, INF, NAN, 2.0**52, 1e300],
    torch.float32: [1e-45, 2.0, 2.0 + 2**-22, 4.5, -0.0, -1.0, -INF, INF, NAN, 2.0**63],
    torch.float16: [6e-8, 2.0, 2.0 + 2**-9, -1.0, INF, NAN],
    torch.int64: [2, 0, -1, -(2**63), 2**63 - 1],
}


@pytest.mark.parametrize("dtype", LENGTHS, ids=str)
def test_lengths_of_any_size(kernels, dtype):
    given = torch.tensor(LENGTHS[dtype], dtype=dtype)
    inputs = problem(1, 7, 3, 2, torch.float32, b=len(given))
    seen = [sum(j < length for j in range(7)) for length in given.tolist()]
    got = (kernels.attend(4, *inputs, given)[1] > 0).sum(-1).flatten().tolist()
    assert got == [count or 7 for count in seen]  # of none, all are seen alike


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_padding_is_not_looked_at(kernels, queries):
    inputs = problem(queries, 150, 40, 33, torch.bfloat16)
    clean = results(kernels, inputs, lens(9, 70))
    with torch.no_grad():
        for row, length in ((0, 9), (1, 70)):
            inputs[1][row, length:] = float("inf")
            inputs[2][row, length:] = float("nan")
    for got, want in zip(results(kernels, inputs, lens(9, 70)), clean, strict=True):
        assert torch.isfinite(got).all()
        # The range of a tile's keys picks the form, hence not bitwise.
        torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_nan_is_not_lost(kernels, queries, where):
    inputs = problem(queries, 70, 40, 33, torch.bfloat16)
    with torch.no_grad():
        inputs[where][0, 0, 3] = float("nan")
    context, weights = kernels.attend(4, *inputs, None)
    assert torch.isnan(weights[0, 0]).all()
    assert torch.isnan(context[0, 0]).all()
    assert torch.isfinite(context[1]).all()


def test_shared_memory_that_is_too_small_is_seen():
    """The kernels are under the sanitizer, also on the stacks of fibers."""
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        results(OnHost(less_shared=16), problem(1, 66, 12, 9, torch.bfloat16))
