"""The course's own modules, written again from its formulas, and inputs for them."""

import torch
from torch import nn


def course_softmax(scores, lens):
    """The course's masked_softmax, written again."""
    if lens is None:
        return scores.softmax(-1)
    if lens.dim() == 1:
        lens = lens[:, None].expand(scores.shape[:2])
    keep = torch.arange(scores.shape[-1]) < lens[..., None]
    return torch.where(keep, scores, torch.tensor(-1e6, dtype=scores.dtype)).softmax(-1)


class CourseAttention(nn.Module):
    """The course's AdditiveAttention: (num_hiddens, dropout), or with key and query size first.

    ``bias`` adds to the features what the course's layers leave out.
    """

    def __init__(self, *sizes, dropout=0.0, bias=False):
        super().__init__()
        hidden = sizes[-1]
        if len(sizes) == 1:
            self.W_k, self.W_q = (nn.LazyLinear(hidden, bias=False) for _ in range(2))
            self.w_v = nn.LazyLinear(1, bias=False)
        else:
            self.W_k = nn.Linear(sizes[0], hidden, bias=False)
            self.W_q = nn.Linear(sizes[1], hidden, bias=False)
            self.w_v = nn.Linear(hidden, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden)) if bias else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens):
        features = self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None]
        if self.bias is not None:
            features = features + self.bias
        scores = self.w_v(torch.tanh(features)).squeeze(-1)
        self.attention_weights = course_softmax(scores, valid_lens)
        return self.dropout(self.attention_weights) @ values


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
            self.v(torch.tanh(features)).squeeze(-1), valid_length
        )
        return self.attention_weights @ value


def inputs(query=20, key=2, value=4, B=2, Tq=3, Tk=10):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, Tq, query), (B, Tk, key), (B, Tk, value)
    return [torch.randn(shape, generator=generator) for shape in shapes]
