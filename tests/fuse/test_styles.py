"""Every style of additive attention computes the same fused, on its first calls and after them."""

import copy

import pytest
import torch
from styles import STYLES
from torch import nn
from torch.utils._pytree import tree_leaves

import bahdanau_fast as bf

CALLS = 3  # the first shows it, the others are fused
# Of the largest value of a tensor; none sums more than some thousand products.
ALLOWED = {torch.float64: 2.0**-36, torch.float32: 2.0**-13}


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def run(module, inputs, leaves):
    """Outputs, and gradients of inputs and parameters, None where there is none."""
    outputs = [x for x in tree_leaves(module(*inputs)) if isinstance(x, torch.Tensor)]
    recorded = [x for x in outputs if x.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad]
    seeds = [torch.cos(torch.arange(x.numel())).to(x).view(x.shape) for x in recorded]
    grads = torch.autograd.grad(recorded, [*leaves, *parameters], seeds, allow_unused=True)
    return [x.detach() for x in outputs], list(grads)


def same(ours, theirs, dtype):
    assert len(ours) == len(theirs)
    for x, exact in zip(ours, theirs, strict=True):
        assert (x is None) == (exact is None)
        if exact is None:
            continue
        assert (x.shape, x.dtype) == (exact.shape, exact.dtype)
        size = max(1.0, float(exact.nan_to_num().abs().max())) if exact.numel() else 1.0
        torch.testing.assert_close(x, exact, rtol=0, atol=ALLOWED[dtype] * size, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", STYLES)
def test_a_style_computes_the_same(name, dtype):
    style = STYLES[name]
    torch.manual_seed(0)
    plain = style.make().to(dtype)
    for layer in plain.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    for training in (True, False):
        leaves, generator = [], torch.Generator().manual_seed(1)

        def draw(*shape, leaves=leaves, generator=generator):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            leaves.append(drawn.requires_grad_())
            return leaves[-1]

        inputs, module = style.inputs(draw), copy.deepcopy(plain).train(training)
        kind = type(module)
        want = run(copy.deepcopy(module), inputs, leaves)
        report = bf.fuse(module, always=True)
        for _ in range(CALLS):
            outputs, grads = run(module, inputs, leaves)
            same(outputs, want[0], dtype)
            same(grads, want[1], dtype)
        assert bool(report.fused) == (style.reason == ""), str(report)
        assert report.waiting == ()
        bf.unfuse(module)
        assert type(module) is kind
