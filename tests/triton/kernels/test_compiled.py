"""torch.compile on every backend: one graph, the backend that was asked for, sizes that vary."""

import pytest
import torch
from opchecked import opcheck
from parity import DEVICE

import bahdanau_fast as bf
from bahdanau_fast import backends
from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.backends.triton import backward as triton_backward
from bahdanau_fast.backends.triton import forward as triton_forward

pytestmark = pytest.mark.usefixtures("nothing_compiled")
ops = torch.ops.bahdanau_fast
BACKENDS = [name for name in bf.backends.available() if DEVICE == "cuda" or name != "cuda"]
BACKENDS = [name for name in BACKENDS if DEVICE == "cpu" or name != "cpu"]


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def drawn(Tq=3, Tk=5, Dv=2):
    """Raw queries, keys and values; w_q, w_k, w_v."""
    shapes = (2, Tq, 4), (2, Tk, 3), (2, Tk, Dv), (6, 4), (6, 3), (1, 6)
    return [draw(*shape).requires_grad_() for shape in shapes]


def by_name(backend):
    def call(*inputs):
        return bf.additive_attention(*inputs, torch.tensor([2, 9], device=DEVICE), backend=backend)

    return call


def same_results(function, inputs, leaves):
    """Outputs and gradients, compiled and not; without a break, which fullgraph is an error of."""
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        outs = call(*inputs)
        grads = torch.autograd.grad(outs, leaves, [x.detach().cos() for x in outs])
        results.append([*outs, *grads])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.fixture
def ran(monkeypatch):
    """What of Triton is called, from eager or compiled code: "forward", "backward"."""
    calls = []
    for name, module in (("forward", triton_forward), ("backward", triton_backward)):
        call = lambda *given, of=module.KernelCall, name=name: calls.append(name) or of(*given)  # noqa: E731
        monkeypatch.setattr(module, "KernelCall", call)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_asked_for_by_name(backend, ran):
    inputs = drawn()
    same_results(by_name(backend), inputs, inputs)
    # Once in eager code, once in compiled code.
    expected = ["forward", "backward"] * 2
    assert ran == (expected if backend == "triton" else [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_module_in_a_block(backend, ran):
    module = bf.AdditiveAttention(3, 4, 6).to(DEVICE)
    q, k, v, *_ = drawn()

    def call(q, k, v):
        memory = module.memory(k, v)
        return module(q, k, v), module.attention_weights, module.attend(q[:, :1], memory)

    with bf.backends.use(backend):
        same_results(call, (q, k, v), (q, k, v, *module.parameters()))
    assert len(ran) == (8 if backend == "triton" else 0)


def test_a_block_inside_of_compiled_code():
    inputs = [x.detach() for x in drawn()]

    def call(*inputs):
        with bf.backends.use("triton"):
            return bf.additive_attention(*inputs)

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    for ours, eager in zip(got, call(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
    assert backends._forced is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_for_many_sizes(backend):
    function = by_name(backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        most = GPU_STEP_QUERIES if backend == "cuda" else 17
        for Tq, Tk, Dv in ((5, 7, 8), (most, 9, 10), (5, 13, 19)):
            inputs = drawn(Tq, Tk, Dv)
            for got, want in zip(compiled(*inputs), function(*inputs), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_serves_cuda_tensors_is_a_constant_of_compiled_code(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(TRITON, "device", "cuda")

    def count(x):
        return x + len(backends._available(gpu, None, False))

    got = torch.compile(count, fullgraph=True, backend="eager")(torch.zeros(()))
    assert int(got) == len(backends._available(gpu, None, False)) >= 2


def test_the_operators_tell_torch_the_truth():
    q, k, v, w = draw(2, 3, 5), draw(2, 4, 5), draw(2, 4, 6), draw(1, 5)
    tensors = (q, k, v, w)
    options = {"valid_lens": torch.tensor([2, 4], device=DEVICE), "backend": 1}
    context, weights = ops.attention.default(*tensors, **options)
    for x in tensors:
        x.requires_grad_()
    opcheck(ops.attention.default, tensors, options)
    tensors = [x.detach() for x in tensors]
    opcheck(ops.attention.recorded, tensors, options)
    for needs in (15, 2):
        given = (weights, None, None, context, weights, needs, *tensors)
        opcheck(ops.attention_backward.default, given, options, traced=needs == 15)
    raw = (draw(2, 3, 7), draw(2, 4, 6), draw(2, 4, 6), w, draw(5, 7), draw(5, 6), draw(5))
    opcheck(ops.attention.default, raw, options)
    opcheck(ops.attention.recorded, raw, options)
    given = (weights, None, None, context, None, 127, *raw)
    opcheck(ops.attention_backward.default, given, options)
    scored, inside = (q, k, w), {"activation": 1, "backend": 1}
    opcheck(ops.attend_scores.default, scored, inside)
    scored = [x.detach() for x in scored]
    given = (ops.attend_scores(*scored, **inside), 11, *scored)
    opcheck(ops.attend_scores_backward.default, given, inside)


@pytest.mark.parametrize("given", [("valid_lens",), (), ("valid_lens", "mask")])
def test_lengths_are_counted_without_a_mask(given):
    q, k, w = draw(2, 3, 5), draw(2, 4, 5), draw(1, 5)
    of = {"valid_lens": torch.tensor([2, 9]), "mask": torch.ones(2, 1, 4, dtype=torch.bool)}
    masked = {name: of[name].to(DEVICE) for name in given}
    counts = ops.attention.recorded(q, k, k, w, **masked, backend=1)[2]
    assert counts.dtype == torch.int32
    assert counts.tolist() == ([2, 4] if len(given) == 1 else [])


def test_a_backend_that_is_not_loaded():
    q, w = draw(1, 2, 3), draw(1, 3)
    with pytest.raises(RuntimeError, match=r"backend must be loaded: "):
        ops.attention.default(q, q, q, w, backend=2)
