"""All steps of a decoder by the CUDA kernels on the host; test_decoder_on_gpu.py has the rest."""

from contextlib import closing
from functools import partial

import cells
import pytest
import torch
from built import needs_compiler
from decoders import CELLS, by_steps, given, layer, operator_of, results
from on_host import OnHost

from bahdanau_fast.modules import decoder_loop
from bahdanau_fast.ops.attend import attend, attend_backward

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def kernels():
    with closing(OnHost()) as running:
        running.begin(4, torch.float32)
        yield running


@pytest.mark.parametrize("lens", [None, torch.tensor([5, 2])], ids=["none", "lens"])
@pytest.mark.parametrize("cls", CELLS)
def test_the_same_as_steps(kernels, cls, lens, monkeypatch):
    module = layer(cls, 2, torch.float32)
    tensors = given(cls, 2, torch.float32, T=18, B=2, Tk=5)
    want = by_steps(lambda: results(module, tensors, lens))
    for operator in (attend, attend_backward):
        monkeypatch.setitem(operator.in_python, "cuda", partial(kernels.operator, operator.name))
    monkeypatch.setattr(decoder_loop, "_operator", operator_of("cuda"))
    with cells.on_the_cpu():
        got = results(module, tensors, lens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
