"""The baselines: the course's module in our own words, and its rewrite.

The course's code allocates a (B,Tq,Tk,H) tensor for the sum and another for the tanh; its scoring
layer is a matrix product. The rewrite multiplies and sums instead, which torch.compile fuses into
one pass. It is the strongest baseline found.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED = -1e6


class Unavailable(Exception):
    """A provider cannot serve a row here; the message says why."""


def course_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    """The course's masked softmax (B,Tq,Tk); writes into ``scores``, as the course does."""
    if valid_lens is None:
        return F.softmax(scores, dim=-1)
    rows = scores.reshape(-1, scores.shape[-1])
    lens = valid_lens.reshape(-1)
    if valid_lens.dim() == 1:
        lens = torch.repeat_interleave(valid_lens, scores.shape[1])
    rows[~(torch.arange(rows.shape[1], device=rows.device) < lens[:, None])] = MASKED
    return F.softmax(rows.reshape(scores.shape), dim=-1)


def course_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    score: Callable[[Tensor], Tensor],
    valid_lens: Tensor | None,
    dropout: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """The course's forward after its projections: context and weights."""
    features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))
    weights = course_softmax(score(features).squeeze(-1), valid_lens)
    return torch.bmm(dropout(weights) if dropout else weights, values), weights


class CourseAttention(nn.Module):
    """The course's AdditiveAttention: (num_hiddens,), or with key and query size first.

    ``bias`` adds to the features what the course's layers leave out.
    """

    def __init__(self, *sizes: int, dropout: float = 0.0, bias: bool = False) -> None:
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
        self.attention_weights: Tensor | None = None

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        queries, keys = self.W_q(queries), self.W_k(keys)
        if self.bias is not None:
            keys = keys + self.bias
        context, self.attention_weights = course_attend(
            queries, keys, values, self.score, valid_lens, self.dropout
        )
        return context

    def score(self, features: Tensor) -> Tensor:
        """(B,Tq,Tk,1) of features (B,Tq,Tk,H)."""
        scores: Tensor = self.w_v(features)
        return scores


def rewrite(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    w_q: Tensor | None = None,
    w_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(tanh(q + k) * w).sum(-1)``; queries and keys come projected where no weight is given."""
    queries = queries if w_q is None else F.linear(queries, w_q)
    keys = keys if w_k is None else F.linear(keys, w_k)
    scores = (torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1)) * w_v).sum(-1)
    if valid_lens is not None:
        keep = torch.arange(scores.shape[-1], device=scores.device) < valid_lens[:, None, None]
        scores = torch.where(keep, scores, MASKED)
    weights = F.softmax(scores, dim=-1)
    return torch.bmm(weights, values), weights


@functools.cache
def compiler_problem() -> str | None:
    """Why torch.compile does not work here, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        return f"torch.compile needs a C++ compiler: {str(error).splitlines()[0]}"
    return None


def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """``function`` under torch.compile, apart from earlier compilations.

    Dynamo keeps its compilations by code object. With the same code object for all shapes, each
    call would check the guards of all earlier shapes, and beyond eight of them fall back to eager
    code silently. A copy of the code object gives each row the fastest baseline.
    """
    problem = compiler_problem()
    if problem is not None:
        raise Unavailable(problem)
    if isinstance(function, types.FunctionType):
        function = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
        )
    if mode is not None:
        from torch._inductor import config, select_algorithm  # takes seconds

        config.max_autotune_report_choices_stats = False
        select_algorithm.PRINT_AUTOTUNE = False
    wrapped: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True, mode=mode)
    return wrapped
