"""Losses of attention weights, against their papers' formulas one number at a time."""

import math

import pytest
import torch

from bahdanau_fast import losses

B, T, TK = 3, 5, 7
STEPS, KEYS = (5, 2, 0), (7, 4, 1)


def coverage(w, steps, keys):
    terms = [
        sum(min(w[t][j], sum(w[s][j] for s in range(t))) for j in range(TK)) for t in range(steps)
    ]
    return terms


def guided(w, steps, keys):
    return [
        w[t][j] * (1 - math.exp(-((j / keys - t / steps) ** 2) / (2 * 0.2**2)))
        for t in range(steps)
        for j in range(keys)
    ]


def doubly_stochastic(w, steps, keys):
    return [(1 - sum(w[t][j] for t in range(steps))) ** 2 for j in range(keys)]


@pytest.mark.parametrize("formula", [coverage, guided, doubly_stochastic])
@pytest.mark.parametrize("with_lens", [False, True])
def test_losses(formula, with_lens):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand((B, T, TK), generator=generator, dtype=torch.float64).softmax(2)
    weights.requires_grad_()
    loss = getattr(losses, formula.__name__)
    lens = [torch.tensor(STEPS), torch.tensor(KEYS)] if with_lens else [None, None]
    loss_of = (lambda w: loss(w, lens[0])) if formula is coverage else lambda w: loss(w, *lens)
    sizes = zip(STEPS, KEYS, strict=True) if with_lens else [(T, TK)] * B
    rows = zip(weights.tolist(), sizes, strict=True)
    terms = [term for row, (steps, keys) in rows for term in formula(row, steps, keys)]
    assert loss_of(weights).item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)
    assert torch.autograd.gradcheck(loss_of, weights, eps=1e-7)
    (grad,) = torch.autograd.grad(loss_of(weights), weights)
    many = weights.detach().half().repeat(9000, 1, 1)  # of which the sum is beyond fp16
    assert loss(many).item() == pytest.approx(loss(many.double()).item(), rel=0.01)
    if with_lens:  # of steps that there are not
        assert grad[1, 2:].abs().max() == 0
        assert grad[2].abs().max() == 0
