"""``attention_weights`` stand between queries and context in the graph, as the course's do.

That their gradient is kept, asked for and changed by a hook is among the ways of test_ways.py.
"""

import functools

import pytest
import torch
from beside import as_exact
from course import CourseAttention
from ways.sides import REMEMBERED, SMALL, Pair

import bahdanau_fast as bf
from bahdanau_fast.ops.dropout import dropout_factors

DQ, DK, DV, H = 6, 5, 4, 8


def data(B=3, Tk=9, Tq=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Tq, DQ), (B, Tk, DK), (B, Tk, DV)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in drawn], torch.tensor([Tk, 2, 5])


def used_twice(context, weights):
    """By a term of its own beside the context."""
    weights.retain_grad()
    (context.sin().sum() + weights.square().sum()).backward()
    return weights.grad


def differentiated_again(context, weights):
    (grad,) = torch.autograd.grad(context.sin().sum(), weights, create_graph=True)
    (grad * weights).square().sum().backward()
    return grad.detach()


@pytest.mark.parametrize("look", [used_twice, differentiated_again])
@pytest.mark.parametrize(
    ("kind", "size", "calls"),
    [
        ("additive", SMALL, 1),
        ("additive", REMEMBERED, 1),
        ("additive", REMEMBERED, 3),
        ("memory", REMEMBERED, 1),
    ],
    ids=["one operator", "projected", "a loop", "a memory"],
)
def test_as_the_courses_module(kind, size, calls, look):
    pair = Pair(kind=kind, size=size)

    def step(side):
        for x in (side.queries, side.keys, side.values):
            x.requires_grad_()
        for _ in range(calls):
            results = side.call()
        return look(*results), side.grads()

    assert pair.do("look", step)
    assert pair.wrong == []


@pytest.mark.parametrize("Tk", [9, 200])
def test_through_dropout(Tk):
    """The mask is that of the forward pass; second derivatives go through it, too."""
    found, close = [], functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for ours in (True, False):
        torch.manual_seed(0)
        inputs, lens = data(Tk=Tk)
        module = bf.AdditiveAttention(DK, DQ, H, dropout=0.1).double()
        torch.manual_seed(7)
        context = module(*inputs, lens)
        weights = module.attention_weights
        if not ours:
            torch.manual_seed(7)
            seed = torch.randint(2**62, (1,))
            factors = dropout_factors(seed, tuple(weights.shape), 0.1, torch.float64)
            assert set(factors.unique().tolist()) == {0.0, 1 / 0.9}
            again = torch.bmm(weights * factors, inputs[2])
            close(again, context)
            context = again
        (grad,) = torch.autograd.grad(context.sin().sum(), weights, create_graph=True)
        (grad * weights).square().sum().backward()
        found.append([grad, *(x.grad for x in inputs)])
    close(*found)


def test_in_half_precision():
    inputs, lens = data(Tk=200)
    torch.manual_seed(0)
    plain = CourseAttention(DK, DQ, H)
    ours = bf.AdditiveAttention(DK, DQ, H)
    ours.load_state_dict(plain.state_dict())
    found = []
    for module, dtype in ((ours, torch.bfloat16), (plain, torch.bfloat16), (plain, torch.float64)):
        own = [x.detach().to(dtype).requires_grad_() for x in inputs]
        context = module.to(dtype)(*own, lens)
        module.attention_weights.retain_grad()
        context.sin().sum().backward()
        found.append(module.attention_weights.grad)
    as_exact(*([grad] for grad in found), torch.bfloat16)


def test_of_a_decoder_state():
    (queries, keys, values), lens = data(Tq=1)
    module = bf.AdditiveAttention(DK, DQ, H).double()
    context = module(queries[:, 0], keys, values, lens)
    (found,) = torch.autograd.grad(context.sum(), module.attention_weights)
    torch.testing.assert_close(found, values.sum(2))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_of_the_function(activation):
    (queries, keys, values), lens = data()
    weights_given = (
        torch.randn(H, DQ).double(),
        torch.randn(H, DK).double(),
        torch.randn(H).double(),
    )
    context, weights = bf.additive_attention(
        queries, keys, values, *weights_given, lens, activation=activation
    )
    (found,) = torch.autograd.grad(context.sum(), weights)
    torch.testing.assert_close(found, values.sum(2).unsqueeze(1).expand_as(found))
