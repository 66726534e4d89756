"""Every style of additive attention computes the same fused, on its first calls and after them.

On a GPU where there is one.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from beside import ran, results, same
from styles import STYLES
from thorough import one_of_each
from torch import nn

import bahdanau_fast as bf

CALLS = 4  # the first show it, the last is fused
GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def device():
    """Where modules, masks and lengths are made, too."""
    with torch.device("cuda") if GPU else nullcontext():
        yield


def has_dropout(module):
    return any(isinstance(layer, nn.Dropout) for layer in module.modules())


# Without dropout both modes are the same.
GROUPS = (
    [(name, dtype, mode) for dtype in (torch.float64, torch.float32) for mode in modes]
    for name, style in STYLES.items()
    for modes in ((["train"], ["eval"]) if has_dropout(style.make()) else (["train", "eval"],))
)


@pytest.mark.parametrize(("name", "dtype", "mode"), one_of_each(GROUPS))
def test_a_style_computes_the_same(name, dtype, mode):
    style = STYLES[name]
    torch.manual_seed(0)
    module = style.make().to(dtype).train(mode == "train")
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    inputs, leaves = style.drawn(dtype)
    kind, other = type(module), copy.deepcopy(module)
    want = results(partial(other, *inputs), leaves, other)
    report = bf.fuse(module, always=True)
    for _ in range(CALLS):
        same(results(partial(module, *inputs), leaves, module), want, 2.0**-13 if GPU else None)
    assert bool(report.fused) == (ran(report) > 0) == (style.reason == ""), str(report)
    assert style.reason in str(report)
    assert report.waiting == ()
    bf.unfuse(module)
    assert type(module) is kind
