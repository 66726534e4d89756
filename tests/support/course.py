"""The course's own modules, written again from its formulas, and inputs for them."""

import torch
from torch import nn

from benchmarks import contestants as baselines
from benchmarks.contestants import course_softmax


class CourseAttention(baselines.CourseAttention):
    """The course's module; its softmax writes into a copy of the scores.

    PyTorch forbids writing into the output of a layer with backward hooks.
    """

    def score(self, features):
        return super().score(features).clone()


class CourseMLPAttention(nn.Module):
    """The oldest form: W_k on the query, W_q on the key; with the tanh of its formula."""

    def __init__(self, units, ipt_dim, dropout=0.0):
        super().__init__()
        self.W_k = nn.Linear(ipt_dim, units, bias=False)
        self.W_q = nn.Linear(ipt_dim, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)

    def forward(self, query, key, value, valid_length):
        features = self.W_k(query)[:, :, None] + self.W_q(key)[:, None]
        self.attention_weights = course_softmax(
            self.v(torch.tanh(features)).squeeze(-1).clone(), valid_length
        )
        return self.attention_weights @ value


def inputs(query=20, key=2, value=4, B=2, Tq=3, Tk=10):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, Tq, query), (B, Tk, key), (B, Tk, value)
    return [torch.randn(shape, generator=generator) for shape in shapes]
