"""What ``fuse`` does to models without additive attention: nothing, and quickly."""

import copy
import time

import plain_models
import pytest
import torch
from beside import same
from torch import nn

import bahdanau_fast as bf

CALLS = 3  # sizes of one may hide scores, from the first calls of what has a softmax
HOOKS = sorted(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def seen(model):
    """Class, hooks and the names of attributes, of each module."""
    return [
        (type(part), {name: dict(vars(part)[name]) for name in HOOKS}, set(vars(part)))
        for part in model.modules()
    ]


@pytest.mark.filterwarnings("ignore")  # of torch, of what is deprecated
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
    twin, before, start = copy.deepcopy(model), seen(model), time.perf_counter()
    report = bf.fuse(model)
    assert time.perf_counter() - start < 1.0
    if by == "example":
        report = bf.fuse(model, inputs)
        twin(*inputs)
    for _ in range(CALLS):
        same(model(*inputs), twin(*inputs), 0.0)
    assert seen(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    same(dict(model.state_dict()), dict(twin.state_dict()), 0.0)
    assert report.fused == ()
    assert bf.unfuse(model) == []


def test_modules_of_this_package_compute_inside_what_is_looked_at():
    torch.manual_seed(0)
    model, inputs = plain_models.Ours(), [torch.randn(2, n, 6) for n in (3, 7)]
    want, kinds = model(*inputs), [type(part) for part in model.modules()]
    report = bf.fuse(model)
    for _ in range(CALLS):
        same(model(*inputs), want, 0.0)
    assert [type(part) for part in model.modules()] == kinds
    assert [(entry.name, report.fused) for entry in report.left] == [("attention", ())]
