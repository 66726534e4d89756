"""What public repositories write, and steps of theirs that take several ways."""

import copy

import pytest
import torch
from beside import ran, same
from torch import nn

import bahdanau_fast as bf


class Flat(nn.Module):
    """Time first outside; all queries at once, all in one axis."""

    def __init__(self):
        super().__init__()
        self.W, self.v = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, q, k):
        q, k = self.W(q.transpose(0, 1)), k.transpose(0, 1)
        (b, t, h), n = k.shape, q.size(1)
        both = q.unsqueeze(2).expand(b, n, t, h) + k.unsqueeze(1).expand(b, n, t, h)
        return self.v(torch.tanh(both.view(b * n * t, h))).view(b, n, t).softmax(2) @ k


class Heads(Flat):
    """One addend for all heads, which are in the batch; it is made here, and large."""

    heads = 2

    def forward(self, q, k, where):
        also = torch.tanh(self.W(where)).unsqueeze(1).repeat(1, self.heads, 1, 1).view(k.shape)
        w = self.v(torch.tanh(k + q.unsqueeze(1) + also)).squeeze(2).softmax(-1)
        return torch.bmm(w.unsqueeze(1), k), w


class Kept(Flat):
    """Keys are projected in the first step, and kept; what is shown in training is not fused."""

    keys = None

    def forward(self, q, k):
        q = self.W(q)
        if self.keys is None:
            self.keys = self.W(k * (k[..., :1] < 9))
        e = torch.tanh(self.keys + q.unsqueeze(1))
        self.shown = e.mean(-1) if self.training else None
        return self.v(e).squeeze(-1).softmax(-1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Kept()

    def forward(self, q, k):
        self.attention.keys = None
        return [self.attention(each, k) for each in q]


def rand(*shapes):
    return [torch.randn(shape) for shape in shapes]


PUBLIC = {
    "flat": (Flat, rand((5, 8, 16), (6, 8, 16))),
    "many": (Flat, rand((40, 64, 16), (60, 64, 16))),
    "heads": (Heads, rand((8, 16), (8, 9, 16), (4, 9, 16))),
    "large": (Heads, rand((64, 16), (64, 1100, 16), (32, 1100, 16))),
    "ways": (Decoder, rand((3, 4, 16), (4, 7, 16))),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_how_public_repositories_write_it(name):
    kind, given = PUBLIC[name]
    module = kind().eval()
    own, report = copy.deepcopy(module), bf.fuse(module, always=True)
    with torch.no_grad():
        for _ in range(9):
            before = ran(report)
            same(module(*given), own(*given))
    assert ran(report) == before + (3 if kind is Decoder else 1)


def test_a_kind_that_is_left_leaves_the_others():
    module, (q, k) = Kept(), rand((4, 16), (4, 7, 16))
    report = bf.fuse(module, always=True)
    for training in (True, False):
        module.train(training)
        for _ in range(5):
            module.keys = None
            module(q, k)
    assert report.fused
    assert ran(report) > 0


COMPILED = []


def backend(graph, _):
    COMPILED.append(graph)
    return graph.forward


@torch.compile(backend=backend)
def compiled(x):
    return x * torch.sigmoid(x)


class Compiles(Kept):
    def forward(self, q, k):
        return self.show(super().forward(q, k))

    def show(self, x):
        return compiled(x)


def test_who_runs_compiled_code_is_left():
    report, given = bf.fuse(module := Compiles()), rand((4, 16), (4, 7, 16))
    for _ in range(3):
        module(*given)
    assert "compiled" in report.left[0].text
    assert len(COMPILED) == 1
