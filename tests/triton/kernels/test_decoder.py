"""All steps of a decoder through the Triton kernels; test_recurrent.py has the rest."""

import parity
import pytest
import torch
from decoders import CELLS, by_steps, given, layer, operator_of, results

from bahdanau_fast.modules import decoder_loop


@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("cls", CELLS)
def test_the_same_as_steps(cls, dropped, monkeypatch):
    where = {"device": parity.DEVICE}
    module = layer(cls, 2, torch.float32, attention_dropout=dropped, **where)
    tensors = given(cls, 2, torch.float32, T=3, B=2, Tk=5, **where)
    lens = torch.tensor([5, 2], **where)

    def run():
        torch.manual_seed(0)
        return results(module, tensors, lens)

    monkeypatch.setattr(decoder_loop, "_operator", operator_of("triton"))
    got = run()
    if dropped:  # by other numbers than step by step; the same from the same seed
        torch.testing.assert_close(run(), got, rtol=0, atol=0)
        return
    torch.testing.assert_close(got, by_steps(run), rtol=1e-4, atol=1e-5)
