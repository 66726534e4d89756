"""All steps of a decoder through the Triton kernels; test_decoder_on_gpu.py has the rest."""

import cells
import pytest
import torch
from decoders import CELLS, by_steps, given, layer, results

import bahdanau_fast as bf
from bahdanau_fast.modules import decoder_loop


@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("cls", CELLS)
def test_the_same_as_steps(cls, dropped, monkeypatch):
    module = layer(cls, 2, torch.float32, attention_dropout=dropped)
    tensors = given(cls, 2, torch.float32, T=3, B=2, Tk=5)
    lens = torch.tensor([5, 2])

    def run():
        torch.manual_seed(0)
        return results(module, tensors, lens)

    assert "triton" in bf.backends.available()  # loads it
    monkeypatch.setattr(decoder_loop, "_backend", lambda *_: "triton")
    with cells.on_the_cpu():
        got = run()
    if dropped:  # by other numbers than step by step; the same from the same seed
        with cells.on_the_cpu():
            torch.testing.assert_close(run(), got, rtol=0, atol=0)
        return
    torch.testing.assert_close(got, by_steps(run), rtol=1e-4, atol=1e-5)
