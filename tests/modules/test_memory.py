"""A memory: some of its rows, elsewhere, detached, copied; whose it is, and how old."""

import copy
import gc
import sys

import pytest
import torch
from torch import nn

import bahdanau_fast as bf

B, TK, D, H, DV = 5, 53, 17, 19, 7
LENS = torch.tensor([3, TK, 20, 1, 40])


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return bf.AdditiveAttention(D, D, H, bias=True)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, n, d, generator=generator) for n, d in ((2, D), (TK, D), (TK, DV))]


close = torch.testing.assert_close


def test_nothing_is_copied_without_need(attention, inputs):
    memory = attention.memory(inputs[1])
    assert memory.values is inputs[1]
    assert memory.to(torch.float32) is memory


def test_detached(attention, inputs):
    queries, keys, values = inputs
    memory = attention.memory(keys.requires_grad_(), values, LENS)
    detached = memory.detach()
    attention.attend(queries, detached).sum().backward()
    assert keys.grad is None
    assert attention.W_k.weight.grad is None
    assert attention.W_q.weight.grad is not None
    close(attention.attend(queries, detached), attention.attend(queries, memory))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_made_under_autocast(attention, inputs, dtype):
    """Its projected keys are rounded; what is made of them is as exact as outside."""
    queries, keys, values = inputs
    with torch.autocast("cpu", dtype):
        memory = attention.memory(keys, values, LENS)
        inside = attention.attend(queries, memory)
    assert (memory.projected.keys.dtype, inside.dtype) == (dtype, dtype)
    outside = attention.attend(queries, memory)
    given = attention.W_q(queries), memory.projected.keys.float(), values, attention.w_v.weight
    torch.testing.assert_close(outside, bf.reference.attend(*given, LENS)[0])
    outside.sum().backward()
    assert attention.W_k.weight.grad is not None


KINDS = {
    "additive": lambda: bf.AdditiveAttention(D, D, H, bias=True),
    "location": lambda: bf.LocationAttention(D, D, H, channels=3, kernel_size=5),
}


@pytest.fixture(params=KINDS)
def either(request):
    torch.manual_seed(0)
    return KINDS[request.param]()


def attended(module, queries, memory):
    """The context of a step, for LocationAttention one that looked at all keys alike before."""
    if isinstance(module, bf.LocationAttention):
        return module.attend(queries[:, :1], memory, torch.full((B, 1, TK), 1 / TK))
    return module.attend(queries, memory)


def test_another_modules_memory(either, inputs):
    other = copy.deepcopy(either)
    memory = other.memory(inputs[1])
    need = "memory must come from memory\\(\\) of this module, got one made by another "
    with pytest.raises(ValueError, match=need + type(either).__name__):
        attended(either, inputs[0], memory)


@pytest.mark.filterwarnings("ignore")  # of sizes that become constants, and of trace itself
def test_traced_with_a_memory_from_outside(either, inputs):
    memory, queries = either.requires_grad_(False).memory(*inputs[1:]), inputs[0]
    traced = torch.jit.trace(lambda x: attended(either, x, memory), queries)
    close(traced(queries + 1), attended(either, queries + 1, memory))


def test_a_memory_copied_together_with_its_module(either, inputs):
    memory = either.memory(inputs[1])
    other, copied = copy.deepcopy((either, memory))
    assert torch.equal(attended(other, inputs[0], copied), attended(either, inputs[0], memory))


CHANGES = {
    "in place": lambda m: m.W_k.weight.mul_(1.5),
    "one element": lambda m: m.W_k.weight[-1, -1].add_(1.0),
    "data": lambda m: m.W_k.weight.data.mul_(1.5),
    "bias": lambda m: m.bias.add_(1.0),
    "loaded": lambda m: m.load_state_dict({n: x + 1 for n, x in m.state_dict().items()}),
    "assigned": lambda m: setattr(m.W_k, "weight", nn.Parameter(torch.ones(H, D))),
    "another layer": lambda m: setattr(m, "W_k", nn.Linear(D, H, bias=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_older_than_a_change_of_the_key_layer(either, inputs, change):
    with torch.no_grad():
        memory = either.memory(inputs[1])
        attended(either, inputs[0], memory)
        CHANGES[change](either)
        with pytest.raises(ValueError, match="must be made after the last change of the key layer"):
            attended(either, inputs[0], memory)
        attended(either, inputs[0], either.memory(inputs[1]))


@pytest.mark.parametrize("order", [{}, {"attention_first": False}])
def test_a_decoder_takes_no_older_one(order):
    decoder = bf.AttentionGRU(D, H, **order)
    memory = decoder.attention.memory(torch.ones(B, TK, H))
    with torch.no_grad():
        decoder.attention.W_k.weight.mul_(1.5)
    with pytest.raises(ValueError, match="must be made after the last change of the key layer"):
        decoder(torch.ones(3, B, D), memory=memory)


def test_the_same_bytes_are_no_change(attention, inputs):
    memory = attention.memory(inputs[1])
    want = attention.attend(inputs[0], memory)
    attention.load_state_dict({n: x.clone() for n, x in attention.state_dict().items()})
    assert torch.equal(attention.attend(inputs[0], memory), want)
    attention.W_k.weight = nn.Parameter(attention.W_k.weight.detach().clone())
    assert torch.equal(attention.attend(inputs[0], memory), want)


def test_nothing_is_said_when_a_compiled_memory_is_freed(attention, inputs, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    queries, keys, _ = inputs
    torch.compile(
        lambda: attention.attend(queries, attention.memory(keys)), fullgraph=True, backend="eager"
    )()
    torch.compiler.reset()
    gc.collect()
    assert said == []
