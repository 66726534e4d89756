"""The providers: how this package and its baselines compute each task.

=========== ==========================================================================
task        what one call does
=========== ==========================================================================
full        the unchanged module call: projections of queries and keys included
step        one decoder step on keys projected beforehand; W_q included
projected   queries and keys both projected beforehand
scan        as projected, and our table of exponentials made beforehand too
loop        DECODE_STEPS dependent steps on the same keys, one projection of them included
=========== ==========================================================================

Every call returns context and weights; a loop the sum of its contexts and the last weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast import backends, functional
from bahdanau_fast.backends.route import is_cuda_step
from bahdanau_fast.memory import ProjectedKeys, project

from ..workloads.shapes import DECODE_STEPS, Inputs, Shape
from . import baselines
from .baselines import CourseAttention, compiled

TASKS = ("full", "step", "projected", "scan", "loop")
Group = Literal["eager", "compiled", "ours", "peer"]
Outputs = tuple[Tensor, Tensor]
Step = Callable[[Tensor], Outputs]
Module = CourseAttention | bf.AdditiveAttention

EAGER_LIMIT = 5e8


@dataclass(frozen=True)
class Runnable:
    """A call that is ready to be timed, and the tensors whose gradients training computes."""

    forward: Callable[[], Outputs]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True)
class Provider:
    """A column of the tables.

    Attributes:
        name: heading of the column.
        group: of providers that share the rule of parity and the bounds.
        builders: make the call of each task that the provider serves.
        on_demand: slow to build; runs only in rows that name the provider or its group.
        process: environment variables of a process of its own, or None.
    """

    name: str
    group: Group
    builders: dict[str, Callable[[Inputs], Runnable]]
    on_demand: bool = False
    process: tuple[tuple[str, str], ...] | None = None

    def build(self, task: str, inputs: Inputs) -> Runnable:
        return self.builders[task](inputs)


def by_name(name: str) -> Provider:
    """The provider of that name."""
    return next(provider for provider in PROVIDERS if provider.name == name)


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


# --- modules: the course's and ours -------------------------------------------------------------


def _with_parameters(inputs: Inputs, module: nn.Module) -> tuple[Tensor, ...]:
    """The leaves of the full task, the weights being those of a module."""
    own = ("W_q.weight", "W_k.weight", "w_v.weight")
    return inputs.leaves("full")[: -len(own)] + tuple(map(module.get_parameter, own))


def _sharing_weights(cls: type[Module], inputs: Inputs) -> Module:
    """A module of a class, on the same storage of weights as every other provider."""
    (hidden, query_size), key_size = inputs.w_q.shape, inputs.w_k.shape[1]
    module = cls(key_size, query_size, hidden).eval()
    for layer, weight in zip(
        (module.W_q, module.W_k, module.w_v), (inputs.w_q, inputs.w_k, inputs.w_v), strict=True
    ):
        layer.weight = nn.Parameter(weight.detach())
    return module


course = partial(_sharing_weights, CourseAttention)
_ours = partial(_sharing_weights, bf.AdditiveAttention)


def _weights(module: Module) -> Tensor:
    if module.attention_weights is None:
        raise RuntimeError("the module left no attention_weights")
    return module.attention_weights


def _forget(module: Module) -> None:
    """Our module keeps the projection of its last keys: those of the next call are new to it."""
    if isinstance(module, bf.AdditiveAttention):
        # An older commit, compared with this tree, has the first alone.
        for name in {"_entry", "_last"}.intersection(type(module._cache).__slots__):
            setattr(module._cache, name, None)


def on_new_keys(make: Callable[[Inputs], Module], inputs: Inputs, steps: bool = False) -> Runnable:
    """A module's call on new keys, or with ``steps`` a loop of calls on the same keys."""
    module = make(inputs)

    def step(query: Tensor) -> Outputs:
        context = module(query, inputs.keys, inputs.values, inputs.valid_lens)
        return context, _weights(module)

    def forward() -> Outputs:
        _forget(module)
        return decode(step, inputs.queries) if steps else step(inputs.queries)

    return Runnable(forward, _with_parameters(inputs, module))


def _course_projected(inputs: Inputs) -> Runnable:
    module, leaves = course(inputs), inputs.leaves("projected")[:-1]
    given = (*leaves, module.w_v, inputs.valid_lens)
    return Runnable(partial(baselines.course_attend, *given), (*leaves, module.w_v.weight))


# --- the rewrite, eager and compiled ------------------------------------------------------------

Wrap = Callable[[Callable[..., Outputs]], Callable[..., Outputs]]


def _rewrite(wrap: Wrap, inputs: Inputs) -> Runnable:
    given = (inputs.queries, inputs.keys, inputs.values, inputs.w_v, inputs.valid_lens)
    call = partial(wrap(baselines.rewrite), *given, inputs.w_q, inputs.w_k)
    return Runnable(call, inputs.leaves("full"))


def _rewrite_step(wrap: Wrap, inputs: Inputs) -> Runnable:
    given = (inputs.queries, inputs.projected_keys, inputs.values, inputs.w_v, inputs.valid_lens)
    return Runnable(partial(wrap(baselines.rewrite), *given, inputs.w_q), ())


def _rewrite_projected(wrap: Wrap, inputs: Inputs) -> Runnable:
    leaves = inputs.leaves("projected")
    return Runnable(partial(wrap(baselines.rewrite), *leaves, inputs.valid_lens), leaves)


def _rewrite_loop(wrap: Wrap, inputs: Inputs) -> Runnable:
    call = wrap(baselines.rewrite)

    def forward() -> Outputs:
        keys = F.linear(inputs.keys, inputs.w_k)
        rest = (keys, inputs.values, inputs.w_v, inputs.valid_lens, inputs.w_q)
        return decode(lambda query: call(query, *rest), inputs.queries)

    return Runnable(forward, inputs.leaves("loop"))


def rewrites(wrap: Wrap) -> dict[str, Callable[[Inputs], Runnable]]:
    """The rewrite in every task, each function wrapped, for example compiled."""
    return {
        "full": partial(_rewrite, wrap),
        "step": partial(_rewrite_step, wrap),
        **dict.fromkeys(("projected", "scan"), partial(_rewrite_projected, wrap)),
        "loop": partial(_rewrite_loop, wrap),
    }


# --- ours on a memory, and our operator ----------------------------------------------------------


def _memory_step(inputs: Inputs) -> Runnable:
    module = _ours(inputs)
    with torch.no_grad():
        memory = module.memory(inputs.keys, inputs.values, inputs.valid_lens)
    return Runnable(lambda: (module.attend(inputs.queries, memory), _weights(module)), ())


def _memory_loop(inputs: Inputs) -> Runnable:
    module = _ours(inputs)

    def forward() -> Outputs:
        memory = module.memory(inputs.keys, inputs.values, inputs.valid_lens)

        def step(query: Tensor) -> Outputs:
            return module.attend(query, memory), _weights(module)

        return decode(step, inputs.queries)

    return Runnable(forward, _with_parameters(inputs, module))


def _op_full(inputs: Inputs) -> Runnable:
    weights = (inputs.w_q, inputs.w_k, inputs.w_v)
    given = (inputs.queries, inputs.keys, inputs.values, *weights, inputs.valid_lens)
    return Runnable(partial(bf.additive_attention, *given), inputs.leaves("full"))


def _op_projected(inputs: Inputs, ready: bool = False) -> Runnable:
    step = is_cuda_step(False, inputs.queries.shape[1], inputs.w_v.shape[1], general=False)
    backend = backends.resolve(inputs.keys.device, step=step)
    query, values, w_v = inputs.projected_queries, inputs.values, inputs.w_v
    projected = inputs.projected_keys
    prepared = ProjectedKeys(projected, None, None)
    if ready:
        prepared = project(projected, backends.keeps_table(backend, projected))

    def forward() -> Outputs:
        return attend_projected(backend, query, prepared, values, w_v, inputs.valid_lens)

    return Runnable(forward, inputs.leaves("projected"))


def attend_projected(
    backend: str,
    queries: Tensor,
    keys: ProjectedKeys,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
) -> Outputs:
    """Ours, after the projections of queries (B,Tq,H) and keys."""
    try:
        from bahdanau_fast import run
        from bahdanau_fast.call import Call
    except ImportError:  # an older commit, compared with this tree
        old: Any = functional
        given = (queries, keys.keys, values, None, None, w_v, None, w_v.shape[-1], 0.0)
        route = old.backends.decide(*given, keys_projected=True, name=backend)
        return old.attend_projected(route, queries, keys, values, w_v, valid_lens, 0.0)
    inputs = (queries, keys.keys, values, w_v)
    return run.attend(Call(*inputs, valid_lens=valid_lens, projected=keys, backend=backend))


_AUTOTUNED = partial(compiled, mode="max-autotune")
_COURSE = partial(on_new_keys, course)
_OURS = partial(on_new_keys, _ours)
_OP = {
    "full": _op_full,
    "projected": _op_projected,
    "scan": partial(_op_projected, ready=True),
}

PROVIDERS: tuple[Provider, ...] = (
    Provider(
        "d2l eager",
        "eager",
        {
            **dict.fromkeys(("full", "step"), _COURSE),
            "projected": _course_projected,
            "loop": partial(_COURSE, steps=True),
        },
    ),
    Provider("rewrite eager", "eager", rewrites(lambda function: function)),
    Provider("compiled", "compiled", rewrites(compiled)),
    Provider("compiled max-autotune", "compiled", rewrites(_AUTOTUNED), on_demand=True),
    Provider(
        "ours module",
        "ours",
        {"full": _OURS, "loop": partial(_OURS, steps=True)},
    ),
    Provider("ours memory", "ours", {"step": _memory_step, "loop": _memory_loop}),
    Provider("ours op", "ours", _OP),
)
