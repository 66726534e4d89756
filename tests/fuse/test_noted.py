"""Ways to write a sum that are noted in all modes, and compared with the notes by later calls."""

import pytest
import torch
from beside import ran, same
from torch import nn
from whole import Tutorial

import bahdanau_fast as bf


def of_a_shape(q, k):
    return q.expand(k.shape) + k


def in_place(q, k):
    both = q + k
    both += k  # a tensor of inference mode counts no versions
    return both


def flat(q, k):
    return (q.repeat(1, k.size(1), 1).view(-1, 16) + k.view(-1, 16)).view_as(k)


class Joined(Tutorial):
    def __init__(self, join):
        super().__init__(16)
        self.Ua, self.join = nn.Linear(16, 16, bias=False), join

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.join(self.Wa(query), self.Ua(keys))))
        weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("join", [of_a_shape, in_place, flat])
def test_a_sum_is_fused_in_each_mode(join, mode):
    module, given = Joined(join), (torch.randn(3, 1, 16), torch.randn(3, 7, 16))
    report = bf.fuse(module, always=True)
    with mode():
        found = [module(*given) for _ in range(4)]
        own = Joined.forward(module, *given)
    same(found, [own] * 4)
    assert ran(report) > 0
