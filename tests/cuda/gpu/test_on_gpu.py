"""The CUDA backend on a GPU: the contract, streams, threads and devices.

Where there is none, test_cuda_contract.py runs the kernels' machine code. test_graphs.py captures
them.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import entry_points
import lengths
import parity
import pytest
import torch
from contract import CONTRACT, LARGE, MASKED, lens
from decoders import CELLS, by_steps
from drawing import cases, drawn
from entry_points import dispatched
from hypothesis import given
from parity import Case, attended, called, check, fused
from targets import CPU, GPU, STEPS

import bahdanau_fast as bf

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="there is no GPU")


@pytest.fixture(autouse=True)
def tested_on_gpu(monkeypatch):
    monkeypatch.setattr(parity, "DEVICE", "cuda")
    assert bf.backends.why_not("cuda") is None


SMALL = {"B": 2, "Tk": 150, "H": 40, "Dq": 40, "Dk": 40, "Dv": 33, "lens": lens(150, 75)}
CASES = {name: (name,) for name in (*CONTRACT, *STEPS)} | {
    # Every kernel once: it runs under compute-sanitizer, too.
    **{f"small, {n} queries": (Case(Tq=n, **SMALL),) for n in (1, 3, 6)},
    **{
        f"{way.__name__}, {row}": (row, way)
        for way in (called, attended)
        for row in ("no lens", "whole row masked", "decoder step", "split keys")
    },
    **{
        f"{name} of {scale}": (Case(**LARGE, scale={name: scale}, lens=lens(7, 53, 0)),)
        for name in ("queries", "keys", "w_v")
        for scale in (1e-6, 1e-3, 30.0, 1e4)
    },
}


@pytest.mark.parametrize("dtype", GPU.dtypes, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parity(case, dtype):
    case, *way = CASES[case]
    GPU.check(case, dtype, *way)


@pytest.mark.parametrize("row", MASKED)
def test_masks(row):
    check(CPU.case(row), torch.float32, functools.partial(fused, backend=None))
    GPU.check(row, torch.bfloat16)


@drawn
@given(cases(torch.bfloat16))
def test_drawn_cases(case):
    GPU.check(case, torch.bfloat16)


def problem(queries, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(queries)
    shapes = (4, queries, 64), (4, 300, 64), (4, 300, 48), (1, 64)
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def attend(inputs):
    """Context, weights and the four gradients."""
    context, weights = found = entry_points.attend(dispatched, *inputs)
    return *found, *entry_points.attend_backward(dispatched, *inputs, weights, context, weights)


@pytest.mark.parametrize("kind", lengths.LENGTHS)
@pytest.mark.parametrize("queries", [1, 6])
def test_lengths_of_a_recorded_call(queries, kind):
    assert lengths.operators_for("cuda", queries, kind) == {}
    lengths.check_changes("cuda", queries, kind)


@pytest.mark.parametrize(
    ("dtype", "what"),
    [(torch.float64, "torch.float64 tensors"), (torch.bfloat16, "more than steps of at most 16")],
)
def test_what_it_does_not_serve_others_do(dtype, what):
    check(Case(**LARGE), dtype, functools.partial(fused, backend=None))
    with pytest.raises(ValueError, match=f"backend must serve {what}"):
        check(Case(**LARGE), dtype, GPU.way())


def step_of(hidden):
    """A step that needs more than 48 KB of shared memory, as much as the units ask for."""
    generator = torch.Generator("cuda").manual_seed(hidden)
    shapes = (4, 1, 32), (hidden, 32), (4, 300, hidden), (1, hidden)
    drawn = [torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes]
    raw, w_q, keys, w_v = drawn
    return functools.partial(entry_points.step, dispatched, raw, w_q, keys, None, None, keys, w_v)


def check_beside_each_other(calls, times):
    """Each call, in a thread and on a stream of its own, gives the same again and again."""
    wanted = [call() for call in calls]
    torch.cuda.synchronize()

    def work(call, want):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [call() for _ in range(times)]
        stream.synchronize()
        return all(all(map(torch.equal, got, want)) for got in results)

    with ThreadPoolExecutor(len(calls)) as pool:
        assert all(pool.map(work, calls, wanted))


def test_threads_with_unlike_shared_memory_do_not_disturb_each_other():
    check_beside_each_other(2 * [step_of(1504), step_of(1536)], 200)


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_streams_and_threads_do_not_disturb_each_other(queries):
    check_beside_each_other(4 * [functools.partial(attend, problem(queries))], 20)


KINDS = [*((dtype, False) for dtype in GPU.dtypes), *((dtype, True) for dtype in GPU.dtypes[1:])]


@pytest.mark.parametrize(("dtype", "autocast"), KINDS, ids=str)
@pytest.mark.parametrize("cls", CELLS)
def test_all_steps_of_a_decoder(cls, dtype, autocast):
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.float32 if autocast else dtype}
    module = cls(16, 32, 2, **kind)
    inputs, keys = (torch.randn(s, **kind).requires_grad_() for s in ((7, 4, 16), (4, 50, 32)))

    def results():
        outputs, _ = module(inputs, None, keys)
        found = outputs, module.attention_weights
        loss = sum(x.float().square().sum() for x in found)
        return [*found, *torch.autograd.grad(loss, [inputs, keys, *module.parameters()])]

    with torch.autocast("cuda", dtype) if autocast else nullcontext():
        got, want = results(), by_steps(results)  # in dtypes, too
    near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(got, want, **near)


def test_a_tensor_elsewhere_is_named():
    queries, keys, values, w_v = problem(1)
    with pytest.raises(RuntimeError, match="values must be on the device of queries, cuda:0, got"):
        attend((queries, keys, values.cpu(), w_v))


@pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs")
def test_two_devices():
    want = attend(problem(1))
    got = attend(problem(1, device="cuda:1"))
    assert got[0].device.index == 1
    assert torch.isfinite(got[0]).all()
    assert all(map(torch.equal, attend(problem(1)), want))
