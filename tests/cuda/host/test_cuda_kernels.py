"""The CUDA kernels meet the contract: their own source, compiled for the host (cuda_on_host).

Every parity test runs under AddressSanitizer and UBSan, and fails on the first thing they see.
"""

import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from contract import CONTRACT, LARGE, lens
from cuda_on_host import KERNELS, KINDS, Drivers, Gpu, attend, attend_step, build, on
from drawing import cases, drawn
from hypothesis import given, settings
from parity import DTYPES, Case, check

from bahdanau_fast import reference

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="the kernels are run on the host by fibers for x86-64, compiled by g++",
)


@pytest.fixture(scope="module")
def drivers(request):
    if len(request.session.items) > len(CONTRACT):  # fewer may not need all the kinds
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda kind: build(kind, "address"), KINDS))
    running = Drivers("address")
    yield running
    running.close()


# Rows of the contract that differ in what these kernels see.
ROWS = [row for row in CONTRACT if not row.startswith("all in one operator")]


@pytest.mark.parametrize("row", ROWS)
def test_contract(drivers, row):
    case = {**LARGE, **CONTRACT[row]}
    # Each row in one dtype of the four, in turn; the drawn cases meet them all.
    check(Case(**case), DTYPES[ROWS.index(row) % 4], on(drivers))


@pytest.mark.parametrize("gpu", [Gpu(1, 8), Gpu(1000, 8), Gpu(1000, 1)], ids=str)
@pytest.mark.parametrize(
    "row", ["decoder step", "split keys", "split keys, lens inside a chunk", "whole row masked"]
)
def test_keys_are_cut_for_any_gpu(drivers, row, gpu):
    case = {**LARGE, "Tq": 3, **CONTRACT[row]}
    check(Case(**case), torch.bfloat16, on(drivers, gpu))
    check(Case(**case, grads="weights"), torch.float32, on(drivers, gpu))


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
    context, weights = attend(drivers.__getitem__, a, keys, values, w_v, None)
    assert weights.tolist() == [[[1.0, 0.0, 0.0]] * queries]
    assert context.tolist() == [[[2.0]] * queries]
    if queries > 4:
        return
    eye = torch.eye(8).bfloat16()
    raw = attend_step(drivers.__getitem__, a, eye, keys, values, w_v, None, w_k=eye)
    assert raw[1].tolist() == [[[1.0, 0.0, 0.0]] * queries]


@settings(drawn, max_examples=30)
@given(cases(torch.float32))
def test_drawn_cases_fp32(drivers, case):
    check(case, torch.float32, on(drivers))


@settings(drawn, max_examples=30)
@given(cases(torch.float64, most=60_000))
def test_drawn_cases_fp64(drivers, case):
    check(case, torch.float64, on(drivers))


@settings(drawn, max_examples=40)
@given(cases(torch.bfloat16))
def test_drawn_cases_bf16(drivers, case):
    check(case, torch.bfloat16, on(drivers))


@settings(drawn, max_examples=40)
@given(cases(torch.float16))
def test_drawn_cases_fp16(drivers, case):
    check(case, torch.float16, on(drivers))


def problem(tq, tk, h, dv, dtype, b=2):
    torch.manual_seed(1)
    shapes = (b, tq, h), (b, tk, h), (b, tk, dv), (1, h)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(drivers, inputs, valid_lens=None, **more):
    """Context, weights and the four gradients."""
    outputs = attend(drivers.__getitem__, *inputs, valid_lens, **more)
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
    attend(drivers.__getitem__, *inputs, None)  # turns the order round
    for got, want in zip(results(drivers, inputs, lens(150, 70)), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_dropout_drops_what_the_cpu_drops(drivers, queries):
    inputs = problem(queries, 150, 12, 20, torch.float32)
    got = results(drivers, inputs, lens(150, 70), seed=1234567890123, dropout_p=0.4)
    seed = torch.tensor([1234567890123])
    queries_, keys, values, w_v = inputs
    context, weights = torch.ops.bahdanau_fast.attend(
        queries_, keys, None, None, values, w_v, lens(150, 70), seed, 0.4, True
    )
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
    context, weights = attend(drivers.__getitem__, *inputs, None)
    assert torch.isnan(weights[0, 0]).all()
    assert torch.isnan(context[0, 0]).all()
    assert torch.isfinite(context[1]).all()


def check_step(drivers, args, keys, **more):
    """A step against the reference on keys that are projected exactly."""
    raw, w_q, _, values, w_v, valid_lens = args
    got = attend_step(drivers.__getitem__, *args, **more)
    exact = [x.double() for x in (raw, w_q, values, w_v)]
    want = reference.attend(exact[0] @ exact[1].T, keys, *exact[2:], valid_lens)
    # A score sums H terms of at most |w|, each off by a few roundings of the type sums are taken
    # in; the absolute error of a score is the relative one of a weight.
    summed = torch.finfo(torch.float64 if raw.dtype.itemsize > 2 else torch.float32).eps
    relative = 8 * summed * float(w_v.double().abs().sum())
    for ours, truth in zip(got, want, strict=True):
        allowed = (2 * torch.finfo(ours.dtype).eps + relative) * float(truth.abs().max())
        assert float((ours.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("features", [7, 64])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_projects_its_queries(drivers, dtype, queries, features):
    _, keys, values, w_v = (x.detach() for x in problem(1, 70, 40, 33, dtype))
    raw, w_q = torch.randn(2, queries, features).to(dtype), torch.randn(40, features).to(dtype)
    check_step(drivers, (raw, w_q, keys, values, w_v, lens(70, 9)), keys.double())


@pytest.mark.parametrize("batch", [1, 3, 9])  # a cluster with helpers, one of several rows, two
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cluster_shares_the_projection(drivers, dtype, queries, batch):
    hidden, features = (259, 64) if batch < 9 else (150, 61)
    _, keys, values, w_v = (x.detach() for x in problem(1, 40, hidden, 9, dtype, b=batch))
    w_v = w_v / hidden**0.5
    raw = torch.randn(batch, queries, features).to(dtype)
    w_q = (torch.randn(hidden, features) / features**0.5).to(dtype)
    for gpu in (Gpu(4, 8), Gpu(4, 1)):
        check_step(drivers, (raw, w_q, keys, values, w_v, None), keys.double(), gpu=gpu)


@pytest.mark.parametrize(("features", "hidden"), [(7, 33), (64, 300), (104, 32)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_projects_its_keys_too(drivers, dtype, queries, features, hidden):
    _, keys, values, _ = (x.detach() for x in problem(1, 150, features, 33, dtype))
    w_v, bias = torch.randn(1, hidden).to(dtype), torch.randn(hidden).to(dtype)
    raw, w_q = torch.randn(2, queries, 9).to(dtype), torch.randn(hidden, 9).to(dtype)
    w_k = (torch.randn(hidden, features) * features**-0.5).to(dtype)
    exact = F.linear(keys.double(), w_k.double(), bias.double())
    for gpu in (Gpu(1), Gpu(4)):  # a block takes three tiles of 64 keys, or one
        args = (raw, w_q, keys, values, w_v, lens(150, 70))
        check_step(drivers, args, exact, w_k=w_k, bias=bias, gpu=gpu)


@pytest.mark.parametrize(("features", "hidden"), [(7, 33), (104, 40)])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_takes_the_context_from_the_keys_it_projects(drivers, queries, features, hidden):
    keys = torch.randn(3, 150, features).bfloat16()
    raw, w_q = torch.randn(3, queries, 9).bfloat16(), torch.randn(hidden, 9).bfloat16()
    w_k = (3 * torch.randn(hidden, features) * features**-0.5).bfloat16()
    w_v = torch.randn(1, hidden).bfloat16()
    exact = F.linear(keys.double(), w_k.double())
    for gpu in (Gpu(1), Gpu(16)):  # three tiles of 64 keys to a block, or one
        for valid_lens in (lens(150, 70, 0), None):
            args = (raw, w_q, keys, keys, w_v, valid_lens)
            check_step(drivers, args, exact, w_k=w_k, gpu=gpu)
            copied = (raw, w_q, keys, keys.clone(), w_v, valid_lens)
            check_step(drivers, copied, exact, w_k=w_k, gpu=gpu)


# ---- mistakes (races: tests/ptx) -----------------------------------------------------------------


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


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_caught(tmp_path, mistake):
    sanitizer, file, old, new, message = PLANTED[mistake]
    broken = Drivers(sanitizer, changed(tmp_path, file, old, new))
    with pytest.raises(AssertionError, match=re.escape(message)):
        results(broken, problem(1, 66, 12, 9, torch.bfloat16, b=1))
