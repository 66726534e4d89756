"""The CUDA kernels meet the contract: their own source, compiled for the host (cuda_on_host).

What only the host proves: the whole contract table and drawn cases in seconds, under
AddressSanitizer and UBSan, which fail on the first thing they see. Machine code is for tests/ptx.
"""

import re
import shutil
from contextlib import closing
from functools import partial

import entry_points
import pytest
import torch
from built import needs_compiler
from cases import DTYPES, ROWS, STEPS, measured
from contract import LARGE, lens
from cuda_on_host import KERNELS, Drivers, Host, on
from drawing import cases, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Case, check

pytestmark = needs_compiler

# fp64 and fp16 are compiled from the same templates: they are for the deep run.
QUICK, DEEP = ("bf16", "fp32"), ("fp64", "fp16")


@pytest.fixture(scope="module")
def drivers():
    with closing(Drivers(partial(Host, sanitizer="address"))) as running:
        yield running


IN_TURN = [
    pytest.param(row, dtypes[number % 2], marks=pytest.mark.deep if dtypes is DEEP else ())
    for dtypes in (QUICK, DEEP)
    for number, row in enumerate(ROWS)
]


@pytest.mark.parametrize(("row", "dtype"), IN_TURN)
def test_contract(drivers, row, dtype):
    assert measured(drivers, row, dtype) <= 1


@pytest.mark.parametrize("step", [name for name in STEPS if not name.startswith("fp32")])
def test_a_step_that_projects(drivers, step):
    assert measured(drivers, step, "bf16") <= 1


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("queries", [1, 3, 17])
def test_magnitudes(drivers, queries, scale):
    # bf16 takes the factored, clamped and direct forms in turn, fp32 the accurate ones.
    sizes = {**LARGE, "Tq": queries, "Tk": 67, "H": 67 if queries < 17 else 211, "B": 2}
    for name in ("queries", "keys", "w_v"):
        case = Case(**sizes, scale={name: scale}, lens=lens(7, 53))
        check(case, torch.bfloat16, on(drivers))
        if name == "keys" and queries == 17:
            check(Case(**{**sizes, "B": 3}, scale={name: scale}), torch.float32, on(drivers))


@pytest.mark.parametrize("size", [1e14, 1e20, 3e37])
@pytest.mark.parametrize("queries", [1, 6, 20])
def test_the_largest_w_v(drivers, queries, size):
    """Where tanh is one: the scores of the three keys are 8, -8 and 0 times w_v."""
    keys = torch.tensor([30.0, -30.0, 0.0]).reshape(1, 3, 1).expand(1, 3, 8).bfloat16()
    a, w_v = torch.zeros(1, queries, 8).bfloat16(), torch.full((1, 8), size).bfloat16()
    values = torch.tensor([2.0, 3.0, 5.0]).reshape(1, 3, 1).bfloat16()
    context, weights = drivers.attend(4, a, keys, values, w_v, None)
    assert weights.tolist() == [[[1.0, 0.0, 0.0]] * queries]
    assert context.tolist() == [[[2.0]] * queries]
    if queries > 4:
        return
    eye = torch.eye(8).bfloat16()
    raw = drivers.step(4, a, eye, keys, values, w_v, None, w_k=eye)
    assert raw[1].tolist() == [[[1.0, 0.0, 0.0]] * queries]


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.deep if d in DEEP else ()) for d in DTYPES]
)
@settings(drawn, max_examples=40)
@given(data=st.data())
def test_drawn_cases(drivers, dtype, data):
    dtype = DTYPES[dtype]
    case = data.draw(cases(dtype, most=60_000) if dtype == torch.float64 else cases(dtype))
    check(case, dtype, on(drivers))


def problem(tq, tk, h, dv, dtype, b=2):
    torch.manual_seed(1)
    shapes = (b, tq, h), (b, tk, h), (b, tk, dv), (1, h)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(drivers, inputs, valid_lens=None, *dropout):
    """Context, weights and the four gradients."""
    outputs = drivers.attend(4, *inputs, valid_lens, *dropout)
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds_of(outputs))]


def seeds_of(outputs):
    """Gradients of the outputs, the same at each call."""
    torch.manual_seed(2)
    return [torch.randn(x.shape).to(x) for x in outputs]


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_in_any_order_of_threads_and_blocks(drivers, queries, dtype):
    # The host runs every other launch backwards, blocks and threads.
    inputs = problem(queries, 150, 40, 33, dtype)
    first = results(drivers, inputs, lens(150, 70))
    drivers.attend(4, *inputs, None)  # turns the order round
    for got, want in zip(results(drivers, inputs, lens(150, 70)), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_dropout_drops_what_the_cpu_drops(drivers, queries):
    inputs = problem(queries, 150, 12, 20, torch.float32)
    got = results(drivers, inputs, lens(150, 70), 1234567890123, 0.4)
    seed = torch.tensor([1234567890123])
    of_cpu = entry_points.on_gpu  # the operator of any device
    context, weights = entry_points.attend(of_cpu, *inputs, lens(150, 70), seed, 0.4)
    seeds = seeds_of((context, weights))
    want = [context, weights, *torch.autograd.grad((context, weights), inputs, seeds)]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    kept = results(drivers, inputs, lens(150, 70))[0]
    assert float((got[0] - kept).detach().abs().max()) > 0.01


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_padding_is_not_looked_at(drivers, queries):
    inputs = problem(queries, 150, 40, 33, torch.bfloat16)
    clean = results(drivers, inputs, lens(9, 70))
    with torch.no_grad():
        for row, length in ((0, 9), (1, 70)):
            inputs[1][row, length:] = float("inf")
            inputs[2][row, length:] = float("nan")
    for got, want in zip(results(drivers, inputs, lens(9, 70)), clean, strict=True):
        assert torch.isfinite(got).all()
        # The range of a tile's keys picks the form, hence not bitwise.
        torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_nan_is_not_lost(drivers, queries, where):
    inputs = problem(queries, 70, 40, 33, torch.bfloat16)
    with torch.no_grad():
        inputs[where][0, 0, 3] = float("nan")
    context, weights = drivers.attend(4, *inputs, None)
    assert torch.isnan(weights[0, 0]).all()
    assert torch.isnan(context[0, 0]).all()
    assert torch.isfinite(context[1]).all()


def changed(tmp_path, file, old, new):
    """A copy of the kernels' sources with one thing wrong."""
    shutil.copytree(KERNELS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "cuda" / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has changed: plant the mistake elsewhere"
    path.write_text(text.replace(old, new))
    return tmp_path


# Each is one line that somebody could get wrong.
PLANTED = {
    "a row read past its end": (
        "address", "problem.h", "first + k < end ?", "first + k <= end ?", "heap-buffer-overflow",
    ),
    "shared memory too small": (
        "address", "decode_plan.h", "    last = from.take<int>(1);\n    bytes = from.used;",
        "    last = from.take<int>(1);\n    bytes = from.used - 16;",
        "heap-buffer-overflow",
    ),
    "a barrier not all reach": (
        "plain", "decode.h", "  __device__ void combine() {\n",
        "  __device__ void combine() {\n    if (threadIdx.x < 32) return;\n", "a barrier that not",
    ),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_caught(tmp_path, mistake):
    sanitizer, file, old, new, message = PLANTED[mistake]
    sources = changed(tmp_path, file, old, new)
    broken = Drivers(partial(Host, sanitizer=sanitizer, sources=sources))
    with pytest.raises(AssertionError, match=re.escape(message)):
        results(broken, problem(1, 66, 12, 9, torch.bfloat16, b=1))
