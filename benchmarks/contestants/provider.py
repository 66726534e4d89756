"""Providers: a name, and a builder of the call of each task that it serves.

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

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from ..cases import DECODE_STEPS, Inputs, Shape

TASKS = ("full", "step", "projected", "scan", "loop")
Group = Literal["eager", "compiled", "ours", "peer", "expert"]
Outputs = tuple[Tensor, Tensor]
Step = Callable[[Tensor], Outputs]
# Of queries, keys, values, w_v, lengths or None, and the weights of what is not yet projected,
# w_q and w_k or None.
Attention = Callable[..., Outputs]

EAGER_LIMIT = 5e8


@dataclass(frozen=True)
class Runnable:
    """A call that is ready to be timed, and the tensors whose gradients training computes."""

    forward: Callable[[], Outputs]
    leaves: tuple[Tensor, ...]


Builder = Callable[[Inputs], Runnable]


@dataclass(frozen=True)
class Provider:
    """A column of the tables.

    Attributes:
        name: heading of the column.
        group: of providers that share the rule of parity.
        builders: make the call of each task that the provider serves.
        on_demand: runs only in rows that name the provider or its group.
        process: environment variables of a process of its own, or None.
    """

    name: str
    group: Group
    builders: dict[str, Builder]
    on_demand: bool = False
    process: tuple[tuple[str, str], ...] | None = None

    def build(self, task: str, inputs: Inputs) -> Runnable:
        return self.builders[task](inputs)


def eager_too_large(shape: Shape) -> str | None:
    """Why eager code does not run on a shape, or None."""
    size = 4 * shape.features
    return None if size <= EAGER_LIMIT else f"(B,Tq,Tk,H) is {size / 1e9:.1f} GB"


def decode(step: Step, queries: Tensor) -> Outputs:
    """A decoder loop: each query depends on the context before it."""
    context, weights = step(queries)
    total = context
    for _ in range(DECODE_STEPS - 1):
        context, weights = step(queries + context)
        total = total + context
    return total, weights


def _builder(make: Callable[[], Attention], task: str, inputs: Inputs) -> Runnable:
    """A function's call in a task."""
    attention, rest = make(), (inputs.values, inputs.w_v, inputs.valid_lens)
    if task == "full":
        call = partial(attention, inputs.queries, inputs.keys, *rest, inputs.w_q, inputs.w_k)
    elif task == "step":
        call = partial(attention, inputs.queries, inputs.projected_keys, *rest, inputs.w_q)
    elif task == "loop":

        def call() -> Outputs:
            keys = F.linear(inputs.keys, inputs.w_k)
            return decode(lambda query: attention(query, keys, *rest, inputs.w_q), inputs.queries)

    else:
        call = partial(attention, inputs.projected_queries, inputs.projected_keys, *rest)
    return Runnable(call, inputs.leaves(task))


def function(make: Callable[[], Attention], *tasks: str) -> dict[str, Builder]:
    """Builders of calls of the function that ``make`` gives, in some tasks."""
    return {task: partial(_builder, make, task) for task in tasks}
