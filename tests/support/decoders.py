"""Layers and inputs for the tests of decoders that attend at every step."""

import pytest
import torch
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast import backends, checks
from bahdanau_fast.modules import decoder_loop

B, T, TK, E, H, DK, DV, F = 5, 6, 11, 3, 9, 7, 4, 6
LENS = torch.tensor([3, 0, TK, 5, 1])
CELLS = (bf.AttentionGRU, bf.AttentionLSTM)
# In fp64: some hundred roundings of each step are passed on by the next ones and by what sums them.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def layer(cls, layers=1, dtype=torch.float64, E=E, **options):
    torch.manual_seed(0)
    sizes = {"key_size": DK, "value_size": DV, "num_hiddens": F, **options}
    made = cls(E, H, layers, dtype=dtype, **sizes)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def given(cls, layers=1, dtype=torch.float64, T=T, B=B, Tk=TK, E=E, seed=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "inputs": (T, B, E),
        "keys": (B, Tk, DK),
        "values": (B, Tk, DV),
        "hidden": (layers, B, H),
        "cell": (layers, B, H),
    }
    if cls is bf.AttentionGRU:
        del shapes["cell"]
    drawn = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    return {n: x.to(device, dtype).requires_grad_() for n, x in drawn.items()}


def call(module, tensors, lens=LENS):
    hidden = tensors["hidden"]
    if "cell" in tensors:
        hidden = (hidden, tensors["cell"])
    outputs, last = module(tensors["inputs"], hidden, tensors["keys"], tensors["values"], lens)
    return [outputs, *(last if isinstance(last, tuple) else (last,)), module.attention_weights]


def results(module, tensors, lens=LENS, which=slice(None)):
    """Outputs and the gradients of a sum of some of them that tells every element apart."""
    outputs = call(module, tensors, lens)
    generator = torch.Generator().manual_seed(7)
    factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    loss = sum((x * f.to(x)).sum() for x, f in list(zip(outputs, factors, strict=True))[which])
    of = [*tensors.values(), *module.parameters()]
    return [*outputs, *torch.autograd.grad(loss, of, allow_unused=True)]


class Low(nn.Module):
    """A layer with more than one weight."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.more(x)


def hook(module, *_):
    return None


def operator_of(loop):
    """What decides over a decoder, where its steps are a loop of a backend, or one operator."""

    def decide(_attention, _rnn, dtype, *_):
        dtype = checks.autocast_dtype(torch.device("cpu")) or dtype
        if loop is None:
            return backends.DecoderRoute("one operator", "cpu", dtype, "")
        return backends.DecoderRoute("a loop of launches", loop, dtype, "")

    return decide


STEP_BY_STEP = backends.DecoderRoute("step by step", "cpu", None, "")


def by_steps(function):
    """What a function gives without the operator over all decoder_loop.

    In full precision: on a GPU torch's recurrent layers would take TF32.
    """
    cudnn = torch.backends.cudnn
    with pytest.MonkeyPatch.context() as patch, cudnn.flags(cudnn.enabled, allow_tf32=False):
        patch.setattr(decoder_loop, "_decoder_route", lambda *_: STEP_BY_STEP)
        return function()
