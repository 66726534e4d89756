"""bf.AttentionPooling beside models of others: their layers, and their state_dicts."""

import pytest
import torch
from beside import as_exact
from torch import nn

import bahdanau_fast as bf

TK, D, H = 37, 6, 5


class ClamGate(nn.Module):
    """The gated scores of CLAM (Lu et al. 2021), under the names of its state_dict."""

    def __init__(self, size, hidden, branches):
        super().__init__()
        self.attention_a = nn.Sequential(nn.Linear(size, hidden), nn.Tanh())
        self.attention_b = nn.Sequential(nn.Linear(size, hidden), nn.Sigmoid())
        self.attention_c = nn.Linear(hidden, branches)

    def forward(self, bag):
        raw = self.attention_c(self.attention_a(bag).mul(self.attention_b(bag))).t()
        return raw.softmax(1) @ bag, raw

    def ours(self):
        layers = self.attention_a[0], self.attention_c, self.attention_b[0]
        return bf.AttentionPooling.from_layers(*layers)


class DeepMil(nn.Module):
    """The pooling of AttentionDeepMIL (Ilse et al. 2018), under the names of its state_dict."""

    def __init__(self, size, hidden, branches, gated):
        super().__init__()
        self.attention_V = nn.Sequential(nn.Linear(size, hidden), nn.Tanh())
        if gated:
            self.attention_U = nn.Sequential(nn.Linear(size, hidden), nn.Sigmoid())
        self.attention_w = nn.Linear(hidden, branches)

    def forward(self, bag):
        hidden = self.attention_V(bag)
        if hasattr(self, "attention_U"):
            hidden = hidden * self.attention_U(bag)
        raw = self.attention_w(hidden).transpose(1, 0)
        return torch.softmax(raw, 1) @ bag, raw

    def ours(self):
        gate = self.attention_U[0] if hasattr(self, "attention_U") else None
        return bf.AttentionPooling.from_layers(self.attention_V[0], self.attention_w, gate)


NAMES = {"attention_a.0": "V", "attention_b.0": "U", "attention_c": "w"}
NAMES |= {"attention_V.0": "V", "attention_U.0": "U", "attention_w": "w"}


def renamed(state, names):
    parts = ((*key.rpartition("."), value) for key, value in state.items())
    return {f"{names[layer]}.{kind}": value for layer, _, kind, value in parts}


@pytest.mark.parametrize(
    "theirs",
    [ClamGate(D, H, 1), ClamGate(D, H, 2), DeepMil(D, H, 1, False), DeepMil(D, H, 3, True)],
    ids=lambda theirs: f"{type(theirs).__name__} {theirs.ours().heads}",
)
def test_models_of_others(theirs):
    bag, ours = torch.randn(TK, D), theirs.ours()
    pooled, raw = theirs(bag)
    got, weights, scores = ours(bag, return_scores=True)
    want = [pooled, raw, raw.softmax(1)]
    as_exact([got.view_as(pooled), scores, weights], want, want, torch.float32)
    other = bf.AttentionPooling(D, H, ours.heads, ours.U is not None)
    other.load_state_dict(renamed(theirs.state_dict(), NAMES))
    assert torch.equal(other(bag), got)
    back = {ours: their for their, ours in NAMES.items() if f"{their}.bias" in theirs.state_dict()}
    theirs.load_state_dict(renamed(other.state_dict(), back))
    assert torch.equal(theirs(bag)[0], pooled)
    ours.V.weight.data.zero_()  # copies
    assert torch.equal(theirs(bag)[0], pooled)
