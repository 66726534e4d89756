"""What ``fuse`` does to models without additive attention: nothing, and quickly."""

import copy
import time

import plain_models
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import bahdanau_fast as bf

CALLS = 3  # sizes of one may hide scores, from the first calls of what has a softmax
HOOKS = sorted(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def seen(model):
    """Hooks and the names of attributes, of each module."""
    return [
        ({name: dict(vars(part)[name]) for name in HOOKS}, set(vars(part)))
        for part in model.modules()
    ]


def run(model, inputs):
    torch.manual_seed(1)
    return tree_leaves(model(*inputs))


def same(found, want):
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by", ["example", "first call"])
@pytest.mark.parametrize("name", plain_models.PLAIN)
def test_a_plain_model_is_left_alone(name, by):
    """The first call is one of training: what it changes, it changes once."""
    make, inputs = plain_models.PLAIN[name]
    torch.manual_seed(0)
    model, inputs = make().train(by == "first call"), inputs(torch.randn)
    for part in model.modules():
        if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
            part.register_forward_hook(lambda *_: None)
    twin = copy.deepcopy(model)
    kinds, before = [type(part) for part in model.modules()], seen(model)
    start = time.perf_counter()
    report = bf.fuse(model)
    assert time.perf_counter() - start < 1.0
    if by == "example":
        report = bf.fuse(model, inputs)
    for part, kind in zip(model.modules(), kinds, strict=True):
        assert isinstance(part, kind)
        assert type(part).__name__ == kind.__name__
    assert [hooks for hooks, _ in seen(model)] == [hooks for hooks, _ in before]
    for _ in range(CALLS):
        same(run(model, inputs), run(twin, inputs))
    assert [type(part) for part in model.modules()] == kinds
    assert seen(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    state, theirs = model.state_dict(), twin.state_dict()
    assert list(state) == list(theirs)
    same(list(state.values()), list(theirs.values()))
    assert report.fused == ()
    assert bf.unfuse(model) == []


class Two(nn.Module):
    """This package's attention, and some layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(5, 2)
        self.attention = bf.AdditiveAttention(6, 6, 8)

    def forward(self, queries, keys, values):
        return self.last(torch.tanh(self.attention(self.first(queries), keys, values)))


@pytest.mark.parametrize("by", ["example", "first call"])
def test_modules_of_this_package_are_said_to_be_so(by):
    torch.manual_seed(0)
    model = Two()
    inputs = torch.randn(2, 3, 6), torch.randn(2, 7, 6), torch.randn(2, 7, 5)
    want, kinds = model(*inputs), [type(part) for part in model.modules()]
    report = bf.fuse(model, inputs if by == "example" else None)
    for _ in range(CALLS):
        same([model(*inputs)], [want])
    assert [type(part) for part in model.modules()] == kinds
    assert report.fused == ()
    (entry,) = [entry for entry in report.left if entry.name == "attention"]
    assert entry.kind == "AdditiveAttention"
    assert "already" in entry.text
    assert "already" in str(report)
