"""bf.AttentionPooling beside models of others: their layers, and their state_dicts."""

import pytest
import torch
from beside import as_exact
from torch import nn

import bahdanau_fast as bf

TK, D, H = 37, 6, 5


CLAM = "attention_a", "attention_b", "attention_c"  # Lu et al. 2021
DEEP_MIL = "attention_V", "attention_U", "attention_w"  # Ilse et al. 2018


class Bags(nn.Module):
    """The pooling of those models, under the names of their state_dicts."""

    def __init__(self, names, branches, gated=True):
        super().__init__()
        self.names = names
        for name, activation in zip(names[: 1 + gated], (nn.Tanh, nn.Sigmoid), strict=False):
            setattr(self, name, nn.Sequential(nn.Linear(D, H), activation()))
        setattr(self, names[2], nn.Linear(H, branches))

    def layers(self):
        return [getattr(self, name, None) for name in self.names]

    def forward(self, bag):
        inner, gate, outer = self.layers()
        hidden = inner(bag) if gate is None else inner(bag) * gate(bag)
        raw = outer(hidden).transpose(1, 0)
        return raw.softmax(1) @ bag, raw

    def ours(self):
        inner, gate, outer = self.layers()
        return bf.AttentionPooling.from_layers(inner[0], outer, None if gate is None else gate[0])


NAMES = {"attention_a.0": "V", "attention_b.0": "U", "attention_c": "w"}
NAMES |= {"attention_V.0": "V", "attention_U.0": "U", "attention_w": "w"}


def renamed(state, names):
    parts = ((*key.rpartition("."), value) for key, value in state.items())
    return {f"{names[layer]}.{kind}": value for layer, _, kind, value in parts}


@pytest.mark.parametrize(
    "theirs",
    [Bags(CLAM, 1), Bags(CLAM, 2), Bags(DEEP_MIL, 1, gated=False), Bags(DEEP_MIL, 3)],
    ids=["CLAM", "CLAM of two", "DeepMIL", "DeepMIL of three, gated"],
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
