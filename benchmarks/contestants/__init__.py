"""Who computes. A provider is a name, and a builder of the call of each task that it serves.

=========== ==========================================================================
task        what one call does
=========== ==========================================================================
full        the unchanged module call: projections of queries and keys included
step        one decoder step on keys projected beforehand; W_q included
projected   queries and keys both projected beforehand
scan        as projected, and our table of exponentials made beforehand too
loop        DECODE_STEPS dependent steps on the same keys, one projection of them included
=========== ==========================================================================

Every call returns context and weights; a loop the sum of its contexts and the last weights. Inputs
and shapes are in ``cases``; ``parity`` verifies a call, ``measure`` times it.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import DECODE_STEPS, Inputs

TASKS = ("full", "step", "projected", "scan", "loop")
Group = Literal["eager", "compiled", "ours", "peer", "expert"]
Outputs = tuple[Tensor, Tensor]
Step = Callable[[Tensor], Outputs]
# Of queries, keys, values, w_v, lengths or None, and the weights of what is not yet projected,
# w_q and w_k or None.
Attention = Callable[..., Outputs]


@dataclass(frozen=True)
class Runnable:
    """A call that is ready to be timed, and the tensors whose gradients training computes."""

    forward: Callable[[], Outputs]
    leaves: tuple[Tensor, ...]


Builder = Callable[[Inputs], Runnable]


@dataclass(frozen=True)
class Provider:
    """A column of the tables."""

    name: str
    group: Group  # of those that share the rule of parity
    builders: dict[str, Builder]  # make the call of each task that it serves
    on_demand: bool = False  # runs only in rows that name it or its group
    process: tuple[tuple[str, str], ...] | None = None  # variables of a process of its own

    def build(self, task: str, inputs: Inputs) -> Runnable:
        return self.builders[task](inputs)


class Unavailable(Exception):
    """A provider cannot serve a row here; the message says why."""


def decode(step: Step, queries: Tensor) -> Outputs:
    """A decoder loop: each query depends on the context before it."""
    context, weights = step(queries)
    total = context
    for _ in range(DECODE_STEPS - 1):
        context, weights = step(queries + context)
        total = total + context
    return total, weights


def _builder(make: Callable[[], Attention], task: str, inputs: Inputs) -> Runnable:
    attention, rest = make(), (inputs.values, inputs.w_v, inputs.valid_lens)
    given = {
        "full": (inputs.queries, inputs.keys, *rest, inputs.w_q, inputs.w_k),
        "step": (inputs.queries, inputs.projected_keys, *rest, inputs.w_q),
    }.get(task, (inputs.projected_queries, inputs.projected_keys, *rest))

    def loop() -> Outputs:
        keys = F.linear(inputs.keys, inputs.w_k)
        return decode(lambda query: attention(query, keys, *rest, inputs.w_q), inputs.queries)

    return Runnable(loop if task == "loop" else partial(attention, *given), inputs.leaves(task))


def function(make: Callable[[], Attention], *tasks: str) -> dict[str, Builder]:
    """Builders of calls of the function that ``make`` gives, in some tasks."""
    return {task: partial(_builder, make, task) for task in tasks}


# ---- the baselines: the course's module in our own words, and its rewrite

# The course's code allocates a (B,Tq,Tk,H) tensor for the sum and another for the tanh; its scoring
# layer is a matrix product. The rewrite multiplies and sums instead, which torch.compile fuses into
# one pass. It is the strongest baseline found.

MASKED = -1e6


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
    queries: Tensor, keys: Tensor, values: Tensor, score: Callable[[Tensor], Tensor],
    valid_lens: Tensor | None, dropout: nn.Module | None = None,
) -> Outputs:  # fmt: skip
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
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None,
    w_q: Tensor | None = None, w_k: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """``(tanh(q + k) * w).sum(-1)``; queries and keys come projected where no weight is given."""
    queries = queries if w_q is None else F.linear(queries, w_q)
    keys = keys if w_k is None else F.linear(keys, w_k)
    scores = (torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1)) * w_v).sum(-1)
    if valid_lens is not None:
        keep = torch.arange(scores.shape[-1], device=scores.device) < valid_lens[:, None, None]
        scores = torch.where(keep, scores, MASKED)
    weights = F.softmax(scores, dim=-1)
    return torch.bmm(weights, values), weights


def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """``function`` under torch.compile, apart from earlier compilations.

    Dynamo keeps its compilations by code object. With the same code object for all shapes, each
    call would check the guards of all earlier shapes, and beyond eight of them fall back to eager
    code silently. A copy of the code object gives each row the fastest baseline.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        why = str(error).splitlines()[0]
        raise Unavailable(f"torch.compile needs a C++ compiler: {why}") from error
    if mode is not None:
        from torch._inductor import config, select_algorithm  # takes seconds

        config.max_autotune_report_choices_stats = False
        select_algorithm.PRINT_AUTOTUNE = False
    copy = types.FunctionType(function.__code__.replace(), function.__globals__)
    copy.__defaults__ = function.__defaults__
    return torch.compile(copy, dynamic=False, fullgraph=True, mode=mode)
