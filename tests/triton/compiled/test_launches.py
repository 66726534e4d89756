"""Compiled code has Triton's launches in it, forward and backward, and is compiled once."""

import re
from unittest.mock import Mock, patch

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from triton_target import target_is
from tritoned import TritonPtx

import bahdanau_fast as bf

pytestmark = pytest.mark.usefixtures("nothing_compiled")
# (B,Tq,Tk): few queries, which are a step where their number does not change, and many.
SIZES = {1: [(4, 1, 50), (3, 1, 700), (2, 1, 5), (200, 1, 129)]}
SIZES[20] = [(4, 20, 50), (5, 17, 33), (3, 70, 129), (2, 5, 400), (150, 19, 31)]
SIZES[128] = [(4, 128, 192), (5, 17, 33), (3, 200, 129)]
MANY = {"rational_terms", "rational_scores", "softmax", "grad_weights", "grad_softmax", "step_sums"}
KERNELS = {
    1: {"decode", "step_values", "step_keys", "step_sums"},
    20: {*MANY, "tables", "grad_tanh"},
    128: {*MANY, "grad_fourier"},
}


def drawn(batch, queries, keys, dtype=torch.bfloat16):
    """Queries, keys and values that vary in B, Tq and Tk; lengths."""
    shapes = (batch, queries, 24), (batch, keys, 24), (batch, keys, 32)
    generator = torch.Generator().manual_seed(keys)
    made = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    for x in made:
        for dim in range(1 if queries == 1 and x is made[0] else 2):
            torch._dynamo.mark_dynamic(x, dim)
    lens = torch.randint(1, keys + 1, (batch,), generator=generator)
    torch._dynamo.mark_dynamic(lens, 0)
    return [*made, lens]


def module(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return bf.AdditiveAttention(24, 24, 16).to(dtype)


def results(function, inputs, leaves):
    context = function(*inputs)
    grads = torch.autograd.grad(context.float().sin().sum(), leaves)
    return [context.detach(), *grads]


@pytest.fixture
def graphs():
    """Of compiled code, each once: forward, then backward."""
    return []


def compiled(function, graphs):
    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("queries", SIZES)
def test_inductor_launches_them(queries):
    function, code, load = module(), [], PyCodeCache.load_by_key_path.__func__

    def read(cls, key, path, *rest, **more):
        with open(path) as file:
            code.append(file.read())
        return load(cls, key, path, *rest, **more)

    call = torch.compile(function, fullgraph=True)
    with (
        target_is("sm_90"),
        patch.object(PyCodeCache, "load_by_key_path", classmethod(read)),
        patch.object(AsyncCompile, "triton", lambda *_, **__: Mock()),  # for a GPU
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for sizes in SIZES[queries]:
            inputs = drawn(*sizes)
            results(call, inputs, [*inputs[:3], *function.parameters()])
    code = "\n".join(code)
    launched = re.findall(r"^ +(\w+)_kernel_\d+\.run\(", code, re.MULTILINE)
    assert set(launched) == KERNELS[queries]
    assert "ops.bahdanau_fast" not in code


@pytest.mark.parametrize("queries", [1, 20])
def test_they_compute_what_eager_code_does(queries, graphs):
    """Compiled for some sizes and called with others: by the machine code, in fp32."""
    function, machine = module(torch.float32), TritonPtx("90")
    machine.begin(4, torch.float32)
    call = compiled(function, graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in [(2, queries, 300), (3, queries, 30), (2, queries, 450)][
            : 3 if queries == 1 else 2
        ]:
            inputs = drawn(*sizes, dtype=torch.float32)
            leaves = [*inputs[:3], *function.parameters()]
            with machine.here():
                got = results(call, inputs, leaves)
            with bf.backends.use("reference"):
                want = results(function, inputs, leaves)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2


def test_an_export_has_the_operator():
    function = module()
    inputs = [x.detach() for x in drawn(2, 3, 5)]
    program = torch.export.export(function, tuple(inputs))
    names = [str(node.target) for node in program.graph.nodes]
    assert [name for name in names if "bahdanau_fast" in name] == [
        "bahdanau_fast.attention.default"
    ]
