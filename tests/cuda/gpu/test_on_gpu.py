"""The CUDA backend on a GPU: the contract, streams, threads, graphs and devices."""

import functools
from concurrent.futures import ThreadPoolExecutor

import parity
import pytest
import torch
import torch.nn.functional as F
from contract import CONTRACT, LARGE, MASKED, lens
from drawing import cases, drawn
from hypothesis import given
from parity import DTYPES, Case, attended, called, check, fused

import bahdanau_fast as bf
from bahdanau_fast import reference

WAYS = {f.__name__: functools.partial(f, backend="cuda") for f in (fused, called, attended)}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    assert bf.backends.why_not("cuda") is None
    monkeypatch.setattr(parity, "DEVICE", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", CONTRACT)
def test_contract(row, dtype):
    check(Case(**{**LARGE, **CONTRACT[row]}), dtype, WAYS["fused"])


@pytest.mark.parametrize("row", MASKED)
def test_masks(row):
    auto = functools.partial(fused, backend=None)
    check(Case(**{**LARGE, **MASKED[row]}), torch.float32, auto)


@pytest.mark.parametrize("way", ["called", "attended"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_module(dtype, way):
    for row in ("no lens", "whole row masked", "decoder step", "split keys"):
        check(Case(**{**LARGE, **CONTRACT[row]}), dtype, WAYS[way])


@drawn
@given(cases(torch.bfloat16))
def test_drawn_cases(case):
    check(case, torch.bfloat16, WAYS["fused"])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes(dtype, scale):
    for name in ("queries", "keys", "w_v"):
        check(Case(**LARGE, scale={name: scale}, lens=lens(7, 53, 0)), dtype, WAYS["fused"])


def problem(queries, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(queries)
    shapes = (4, queries, 64), (4, 300, 64), (4, 300, 48), (1, 64)
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def attend(inputs, lens=None):
    """Context, weights and the four gradients."""
    queries, keys, values, w_v = inputs
    args = queries, keys, None, None, values, w_v, lens, None, 0.0
    kernels = torch.ops.bahdanau_fast
    context, weights = kernels.attend_cuda(*args, True)
    grads = kernels.attend_backward_cuda(*args, weights, context, weights, 15)
    return context, weights, *grads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 6, 40])
def test_every_kernel_once(queries, dtype):
    """Small: it runs under compute-sanitizer, too."""
    make = functools.partial(torch.randn, device="cuda")
    sizes = (2, queries, 40), (2, 150, 40), (2, 150, 33), (1, 40)
    inputs = [make(size).to(dtype) for size in sizes]
    few = lens(150, 70).cuda()
    exact = [x.double().requires_grad_() for x in inputs]
    got, want = attend(inputs, few), reference.attend(*exact, few)
    grads = got[0].double(), got[1].double()
    truth = [x.detach() for x in (*want, *torch.autograd.grad(want, exact, grads))]
    for ours, theirs in zip(got, truth, strict=True):
        largest = float(theirs.abs().max())
        assert (
            float((ours.double() - theirs).abs().max())
            <= 32 * max(torch.finfo(dtype).eps, 1e-13) * largest
        )
    if queries > 4:
        return
    raw, w_q, w_k = make(2, queries, 256), make(40, 256) / 16, make(40, 40) / 6
    step = raw, w_q, inputs[1], w_k, None, inputs[1], inputs[3]
    step = [x if x is None else x.to(dtype) for x in step]
    for own in (w_k.to(dtype), None):  # keys that are values, projected here or not
        args = (*step[:3], own, None, *step[5:], few, True)
        context, _ = torch.ops.bahdanau_fast.attend_step_cuda(*args)
        raw_, w_q_, keys, _, _, values, w_v = (x if x is None else x.double() for x in step)
        c = keys if own is None else F.linear(keys, own.double())
        theirs, _ = reference.attend(F.linear(raw_, w_q_), c, values, w_v, few)
        largest = float(theirs.abs().max())
        assert float((context.double() - theirs).abs().max()) <= (
            32 * max(torch.finfo(dtype).eps, 1e-13) * largest
        )


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_streams_and_threads_do_not_disturb_each_other(queries):
    inputs = problem(queries)
    want = attend(inputs)
    torch.cuda.synchronize()

    def work(_):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [attend(inputs) for _ in range(20)]
        stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for got in results:
                assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_graph_replays_on_new_data(queries):
    inputs = problem(queries)
    attend(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        want = attend(inputs)
        assert all(map(torch.equal, results, want))


@pytest.mark.parametrize("hidden", [33, 300])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_projects_queries_and_keys(dtype, queries, hidden):
    make = functools.partial(torch.randn, device="cuda")
    raw, keys, values = make(2, queries, 9), make(2, 150, 64), make(2, 150, 33)
    w_q, w_k, bias = make(hidden, 9), make(hidden, 64) / 8, make(hidden)
    w_v = make(1, hidden) / hidden**0.5
    raw, keys, values, w_q, w_k, bias, w_v = (
        x.to(dtype) for x in (raw, keys, values, w_q, w_k, bias, w_v)
    )
    args = raw, w_q, keys, w_k, bias, values, w_v, lens(150, 70).cuda(), True
    context, weights = torch.ops.bahdanau_fast.attend_step_cuda(*args)
    exact = [x.double() for x in (raw, w_q, keys, w_k, bias, values, w_v)]
    projected = F.linear(exact[0], exact[1]), F.linear(*exact[2:5])
    want = reference.attend(*projected, *exact[5:], lens(150, 70).cuda())
    # Where the kernel does not project, torch rounds projections to the dtype.
    allowed = 16 * torch.finfo(dtype).eps
    for got, truth in zip((context, weights), want, strict=True):
        assert float((got.double() - truth).abs().max()) <= allowed * float(truth.abs().max())


def test_a_tensor_elsewhere_is_named():
    queries, keys, values, w_v = problem(1)
    with pytest.raises(RuntimeError, match="values must be on the device of queries, cuda:0, got"):
        attend((queries, keys, values.cpu(), w_v))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_devices():
    want = attend(problem(1))
    got = attend(problem(1, device="cuda:1"))
    assert got[0].device.index == 1
    assert torch.isfinite(got[0]).all()
    queries, keys, values, w_v = problem(1)
    with pytest.raises(RuntimeError, match="keys must be on the device of queries, cuda:0, got"):
        attend((queries, keys.to("cuda:1"), values, w_v))
    assert all(map(torch.equal, attend(problem(1)), want))
