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
import torch._inductor.select_algorithm
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CourseAttention", "Unavailable", "compiled", "compiler_problem", "course_attend"]
__all__ += ["rewrite", "rewrite_full", "rewrite_step"]

MASKED = -1e6


class Unavailable(Exception):
    """A provider cannot serve a row here; the message says why."""


def _course_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    if valid_lens is None:
        return F.softmax(scores, dim=-1)
    rows = scores.reshape(-1, scores.shape[-1])
    lens = valid_lens.reshape(-1)
    if valid_lens.dim() == 1:
        lens = torch.repeat_interleave(valid_lens, scores.shape[1])
    rows[~(torch.arange(rows.shape[1], device=rows.device) < lens[:, None])] = MASKED
    return F.softmax(rows.reshape(scores.shape), dim=-1)


def course_attend(
    queries: Tensor, keys: Tensor, values: Tensor, score: nn.Module, valid_lens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The course's forward after its projections."""
    features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))
    weights = _course_softmax(score(features).squeeze(-1), valid_lens)
    return torch.bmm(weights, values), weights


class CourseAttention(nn.Module):
    """Additive attention as the course teaches it, with the layers and the dropout it has."""

    def __init__(self, w_q: Tensor, w_k: Tensor, w_v: Tensor, dropout: float = 0.0) -> None:
        super().__init__()
        self.W_k, self.W_q, self.w_v = (_linear(w) for w in (w_k, w_q, w_v))
        self.dropout = nn.Dropout(dropout)
        self.attention_weights: Tensor | None = None

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        queries, keys = self.W_q(queries), self.W_k(keys)
        features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))
        scores = self.w_v(features).squeeze(-1)
        weights = _course_softmax(scores, valid_lens)
        self.attention_weights = weights
        return torch.bmm(self.dropout(weights), values)


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach())  # every provider uses the same storage
    return layer


def rewrite(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(tanh(q + k) * w).sum(-1)`` on projected queries and keys."""
    scores = (torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1)) * w_v).sum(-1)
    if valid_lens is not None:
        keep = torch.arange(scores.shape[-1], device=scores.device) < valid_lens[:, None, None]
        scores = torch.where(keep, scores, MASKED)
    weights = F.softmax(scores, dim=-1)
    return torch.bmm(weights, values), weights


def rewrite_step(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: tuple[Tensor, Tensor],
    valid_lens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rewrite with the keys projected beforehand; ``weights`` are W_q and w_v."""
    w_q, w_v = weights
    return rewrite(F.linear(queries, w_q), keys, values, w_v, valid_lens)


def rewrite_full(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    valid_lens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rewrite with both projections inside; ``weights`` are W_q, W_k and w_v."""
    w_q, w_k, w_v = weights
    return rewrite(F.linear(queries, w_q), F.linear(keys, w_k), values, w_v, valid_lens)


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
            function.__code__.replace(), function.__globals__, function.__name__
        )
    if mode is not None:
        torch._inductor.config.max_autotune_report_choices_stats = False
        torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    wrapped: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True, mode=mode)
    return wrapped
