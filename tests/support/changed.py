"""Changes that other code makes to layers, for a module of ours and the course's own alike."""

import torch
from course import CourseAttention, CourseMLPAttention
from torch import nn

import bahdanau_fast as bf

LAYERS = ("W_q", "W_k", "w_v")
# Sizes of one operator for all of a call, and of projections in front of it.
SMALL = {"B": 3, "Tq": 2, "Tk": 7, "key": 5, "query": 6, "hidden": 8}
LARGE = {"B": 3, "Tq": 2, "Tk": 40, "key": 24, "query": 20, "hidden": 32}
EXACT = {"rtol": 1e-9, "atol": 1e-11}
LENS = torch.tensor([4, 0, 7])


def pair(sizes, dtype=torch.float64, bias=False):
    """A module of ours and the course's, with the same weights."""
    shape = sizes["key"], sizes["query"], sizes["hidden"]
    torch.manual_seed(0)
    plain = CourseAttention(*shape, bias=bias).to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = bf.AdditiveAttention(*shape, bias=bias, dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def mlp_pair(sizes):
    """The same under the oldest names, whose scoring layer is ``v``."""
    shape = sizes["hidden"], sizes["key"]
    torch.manual_seed(0)
    plain, ours = CourseMLPAttention(*shape).double(), bf.MLPAttention(*shape).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def inputs(sizes, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(1)
    B, Tq, Tk = (sizes[name] for name in ("B", "Tq", "Tk"))
    shapes = (B, Tq, sizes["query"]), (B, Tk, sizes["key"]), (B, Tk, 4)
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [x.to(dtype).requires_grad_(grad) for x in drawn]


def changed(module, change, *where, **options):
    """The module after a change, which draws the same random numbers each time."""
    torch.manual_seed(5)
    result = change(module, *where, **options)
    return module if result is None else result


def inner(module):
    """What has ``attention_weights``: PEFT wraps a module."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def training(module, given, steps=3):
    """Results and all gradients of some steps of training."""
    optimizer = torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.2)
    seen = []
    torch.manual_seed(7)  # dropout inside a layer
    for _ in range(steps):
        optimizer.zero_grad()
        some = [x.detach().clone().requires_grad_() for x in given]
        context = module(*some, LENS)
        weights = inner(module).attention_weights
        (context.square().sum() + weights.square().sum()).backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        kept = {name: None if g is None else g.clone() for name, g in grads.items()}
        seen.append((context.detach(), weights.detach(), [x.grad for x in some], kept))
        optimizer.step()
    return seen


def by_memory(module, given, queries_at_once=1):
    """One memory, and a step for so many queries each."""
    queries, keys, values = given
    memory = module.memory(keys, values, LENS)
    contexts, weights = [], []
    for query in queries.split(queries_at_once, 1):
        contexts.append(module.attend(query, memory))
        weights.append(module.attention_weights)
    return torch.cat(contexts, 1), torch.cat(weights, 1)


def same_training(ours, plain, given, **tolerance):
    """Some steps of training are equal; what was seen in them."""
    steps = training(ours, given)
    for got, want in zip(steps, training(plain, given), strict=True):
        torch.testing.assert_close(got, want, **(tolerance or EXACT))
        assert any(grad is not None for grad in want[3].values())
    return steps


def same_results(ours, plain, given, queries_at_once=1, **tolerance):
    """A call, the same call again, and steps on a memory; ``eval`` is the caller's to say."""
    tolerance = tolerance or EXACT
    want = plain(*given, LENS)
    want = want, inner(plain).attention_weights
    for _ in range(2):
        got = ours(*given, LENS)
        torch.testing.assert_close((got, inner(ours).attention_weights), want, **tolerance)
    got = by_memory(inner(ours), given, queries_at_once)
    torch.testing.assert_close(got, want, **tolerance)


def plain_decoder(attention, rnn, steps, hidden, keys, values):
    """The course's decoder: one step after the other, the keys projected at each."""
    features, weights = [], []
    for step in steps:
        top = hidden[0] if isinstance(hidden, tuple) else hidden
        context = attention(top[-1].unsqueeze(1), keys, values, LENS)
        feature, hidden = rnn(torch.cat((context.squeeze(1), step), -1).unsqueeze(0), hidden)
        features.append(feature)
        weights.append(inner(attention).attention_weights)
    return torch.cat(features), torch.cat(weights, 1)


def decoders(cls, dtype=torch.float64):
    """A recurrent layer of ours, and the course's attention beside the same recurrent layer."""
    torch.manual_seed(2)
    ours = cls(3, 6, 2, key_size=5, value_size=4, num_hiddens=8, dtype=dtype)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.4)
    plain = CourseAttention(5, 6, 8).to(dtype)
    plain.load_state_dict(ours.attention.state_dict())
    return ours, plain


def decoder_inputs(cls, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = (4, 3, 3), (2, 3, 6), (2, 3, 6), (3, 7, 5), (3, 7, 4)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    steps, h, c, keys, values = drawn
    return steps, h if cls is bf.AttentionGRU else (h, c), keys, values


def same_decoding(cls, change, name, dtype=torch.float64, **tolerance):
    """A decoder whose attention was changed against single steps of the course's."""
    ours, plain = decoders(cls, dtype)
    ours.attention = changed(ours.attention, change, name)
    plain = changed(plain, change, name)
    steps, hidden, keys, values = decoder_inputs(cls, dtype)
    got, _ = ours(steps, hidden, keys, values, LENS)
    want, weights = plain_decoder(plain, ours.rnn, steps, hidden, keys, values)
    torch.testing.assert_close((got, ours.attention_weights), (want, weights), **tolerance)
    return (ours, got), (plain, want)
