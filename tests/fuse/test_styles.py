"""Every style of additive attention computes the same fused, on its first calls and after them."""

import copy
from functools import partial

import pytest
import torch
from beside import ran, results, same
from styles import STYLES
from thorough import one_of_each
from torch import nn

import bahdanau_fast as bf

CALLS = 4  # the first show it, the last is fused


DTYPES = ([(name, dtype) for dtype in (torch.float64, torch.float32)] for name in STYLES)


@pytest.mark.parametrize(("name", "dtype"), one_of_each(DTYPES))
def test_a_style_computes_the_same(name, dtype):
    style = STYLES[name]
    torch.manual_seed(0)
    plain = style.make().to(dtype)
    for layer in plain.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    for training in (True, False):
        (inputs, leaves), module = style.drawn(dtype), copy.deepcopy(plain).train(training)
        kind, other = type(module), copy.deepcopy(module)
        want = results(partial(other, *inputs), leaves, other)
        report = bf.fuse(module, always=True)
        for _ in range(CALLS):
            same(results(partial(module, *inputs), leaves, module), want)
        assert bool(report.fused) == (ran(report) > 0) == (style.reason == ""), str(report)
        assert style.reason in str(report)
        assert report.waiting == ()
        bf.unfuse(module)
        assert type(module) is kind
