"""What ``fuse`` does to models without additive attention: nothing, and quickly.

``PLAIN`` gives for each name what makes the model, and its inputs from ``draw(*shape)``.
"""

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from beside import same
from torch import nn

import bahdanau_fast as bf

CALLS = 3  # sizes of one may hide scores, from the first calls of what has a softmax
HOOKS = sorted(name for name in vars(nn.Module()) if name.endswith("_hooks"))
B, T, D, WORDS = 4, 7, 12, 19


def rows(draw):
    return (draw(B, D),)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels, out):
        super().__init__()
        one = nn.Conv2d(channels, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.body = nn.Sequential(*one, nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out))
        self.short, self.relu = nn.Conv2d(channels, out, 1, 2), nn.ReLU(inplace=True)
        self.join, self.last = nn.Conv2d(2 * out, out, 3, 1, 1), nn.Conv2d(out, out, 1)

    def forward(self, x):
        out, short = self.body(x), self.short(x)
        out += short
        return self.last(F.relu(self.join(torch.cat([self.relu(out), short], 1))))


def resnet():
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(Residual(3, 8), Residual(8, 16), pool, nn.Linear(16, 10))


class Cache:
    k = v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 1)
        self.v = v if self.v is None else torch.cat([self.v, v], 1)
        return self.k, self.v


class Block(nn.Module):
    """Of a transformer by hand, with a soft cap, a mask, and a cache that grows at each call."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.up = (nn.Linear(D, D) for _ in range(4))
        self.scale, self.cache = nn.Parameter(torch.ones(D)), Cache()

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        k, v = self.cache.update(self.k(normed), self.v(normed))
        scores = 5 * torch.tanh(self.q(normed) @ k.transpose(1, 2) / 20)
        weights = F.softmax(scores + torch.full((T, k.size(1)), -1e9).triu(1), -1)
        return x + torch.relu(self.up(weights @ v + x))


class Transformer(nn.Module):
    """Positions are added to words."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(T, D))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(D, 1)

    def forward(self, x):
        x = self.blocks(self.words(x) + self.positions)
        return self.head(F.gelu(x)), x @ self.words.weight.t(), self.blocks[0].cache.k


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(D, 16)), nn.Tanh(), nn.Linear(16, 1))


def traced():
    inner = nn.Sequential(nn.Linear(D, 16), nn.ReLU())
    return nn.Sequential(torch.jit.trace(inner, torch.zeros(B, D)), nn.Linear(16, 1))


class Swish(nn.Module):
    """As detectors have it."""

    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)


class Tanh(nn.Module):
    forward = torch.tanh


def unbound():
    return nn.Sequential(nn.Linear(D, 16), Swish(), Tanh(), nn.Linear(16, 1))


class Ours(nn.Module):
    """This package's attention, inside."""

    def __init__(self):
        super().__init__()
        self.attention, self.pooling = bf.AdditiveAttention(6), bf.AttentionPooling(6, 5)

    def forward(self, queries, keys):
        return self.pooling(torch.tanh(self.attention(queries, keys, keys)))


PLAIN = {
    "resnet": (resnet, lambda draw: (draw(B, 3, 16, 16),)),
    "transformer": (Transformer, lambda _: (torch.arange(B * T).view(B, T) * 5 % WORDS,)),
    "scripted": (scripted, rows),
    "traced": (traced, rows),
    "unbound": (unbound, rows),
}


def seen(model):
    """Class, hooks and the names of attributes, of each module."""
    return [
        (type(part), {name: dict(vars(part)[name]) for name in HOOKS}, set(vars(part)))
        for part in model.modules()
    ]


@pytest.mark.filterwarnings("ignore")  # of torch, of what is deprecated
@pytest.mark.parametrize("by", ["example", "first call"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_is_left_alone(name, by):
    """The first call is one of training: what it changes, it changes once."""
    make, inputs = PLAIN[name]
    torch.manual_seed(0)
    model, inputs = make().train(by == "first call"), inputs(torch.randn)
    for part in model.modules():
        if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
            part.register_forward_hook(lambda *_: None)
    twin, before, start = copy.deepcopy(model), seen(model), time.perf_counter()
    report = bf.fuse(model)
    assert time.perf_counter() - start < 1.0
    if by == "example":
        report = bf.fuse(model, inputs)
        twin(*inputs)
    for _ in range(CALLS):
        same(model(*inputs), twin(*inputs), 0.0)
    assert seen(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    same(dict(model.state_dict()), dict(twin.state_dict()), 0.0)
    assert report.fused == ()
    assert bf.unfuse(model) == []


def test_modules_of_this_package_compute_inside_what_is_looked_at():
    torch.manual_seed(0)
    model, inputs = Ours(), [torch.randn(2, n, 6) for n in (3, 7)]
    want, kinds = model(*inputs), [type(part) for part in model.modules()]
    report = bf.fuse(model)
    for _ in range(CALLS):
        same(model(*inputs), want, 0.0)
    assert [type(part) for part in model.modules()] == kinds
    assert [entry.name for entry in report.left] == ["attention", "pooling"]
    assert report.fused == ()


class Gated(nn.Module):
    """Scores of a bag with dropout inside, which training draws."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Dropout())
        self.b = nn.Sequential(nn.Linear(D, 16), nn.Sigmoid(), nn.Dropout())
        self.c = nn.Linear(16, 1)

    def forward(self, bag):
        return torch.softmax(self.c(self.a(bag) * self.b(bag)), 0).t() @ bag


def test_pooling_with_dropout_inside_is_left_with_its_reason():
    model, bag = Gated(), torch.randn(23, D)
    report = bf.fuse(model, always=True)
    for _ in range(CALLS):
        model(bag)
    assert report.fused == ()
    assert [entry.text for entry in report.left] == ["its values are needed by dropout"]
