"""The registry: who computes what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast import backends, run
from bahdanau_fast.backends.route import is_cuda_step
from bahdanau_fast.call import Call
from bahdanau_fast.memory import ProjectedKeys, project

from ..cases import Inputs
from . import peers
from .baselines import CourseAttention, compiled, course_attend, rewrite
from .provider import TASKS, Attention, Builder, Outputs, Provider, Runnable, decode, function

Module = CourseAttention | bf.AdditiveAttention


def by_name(name: str) -> Provider:
    """The provider of that name."""
    return next(provider for provider in PROVIDERS if provider.name == name)


# --- functions ----------------------------------------------------------------------------------


def _tuned() -> Attention:
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    return compiled(rewrite, "max-autotune-no-cudagraphs")


def _course_projected(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None
) -> Outputs:
    return course_attend(queries, keys, values, partial(F.linear, weight=w_v), valid_lens)


def _expert() -> Attention:
    from .expert import Attention  # Triton may not be there

    def attention(queries: Tensor, *rest: Any) -> Outputs:
        given, (w_q,) = rest[:4], rest[4:] or (None,)
        return Attention.apply(queries if w_q is None else F.linear(queries, w_q), *given)

    return attention


def additive(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None,
    w_q: Tensor, w_k: Tensor, **more: Any,
) -> Outputs:  # fmt: skip
    """Our public function, its arguments in the order of the others."""
    return bf.additive_attention(queries, keys, values, w_q, w_k, w_v, valid_lens, **more)


def _masked(*given: Any) -> Outputs:
    """Ours with its lengths as a mask."""
    (_, keys, _, _, lens), weights = given[:5], given[5:]
    mask = torch.arange(keys.shape[1], device=lens.device) < lens[:, None]
    return additive(*given[:4], None, *weights, mask=mask)


def _in_front(*given: Any) -> Outputs:
    """A step of ours whose queries are projected by the library."""
    queries, keys, *rest, w_q = given
    backend = backends.resolve(keys.device)
    projected = ProjectedKeys(keys, None, None)
    return attend_projected(backend, F.linear(queries, w_q), projected, *rest)


def _op_projected(inputs: Inputs, ready: bool = False) -> Runnable:
    step = is_cuda_step(False, inputs.queries.shape[1], inputs.w_v.shape[1], general=False)
    backend = backends.resolve(inputs.keys.device, step=step)
    projected = inputs.projected_keys
    prepared = ProjectedKeys(projected, None, None)
    if ready:
        prepared = project(projected, backends.keeps_table(backend, projected))
    rest = inputs.values, inputs.w_v, inputs.valid_lens
    call = partial(attend_projected, backend, inputs.projected_queries, prepared, *rest)
    return Runnable(call, inputs.leaves("projected"))


def attend_projected(
    backend: str, queries: Tensor, keys: ProjectedKeys, values: Tensor, w_v: Tensor,
    valid_lens: Tensor | None,
) -> Outputs:  # fmt: skip
    """Ours, after the projections of queries (B,Tq,H) and keys."""
    given = Call(
        queries, keys.keys, values, w_v, valid_lens=valid_lens, projected=keys, backend=backend
    )
    return run.attend(given)


# --- modules ------------------------------------------------------------------------------------


def _with_parameters(inputs: Inputs, module: nn.Module) -> tuple[Tensor, ...]:
    """The leaves of the full task, the weights being those of a module."""
    own = ("W_q.weight", "W_k.weight", "w_v.weight")
    return inputs.leaves("full")[: -len(own)] + tuple(map(module.get_parameter, own))


def _sharing_weights(cls: type[Module], inputs: Inputs) -> Module:
    """A module of a class, on the same storage of weights as every other provider."""
    (hidden, query_size), key_size = inputs.w_q.shape, inputs.w_k.shape[1]
    module = cls(key_size, query_size, hidden).eval()
    for name in ("W_q", "W_k", "w_v"):
        weight: Tensor = getattr(inputs, name.lower())
        getattr(module, name).weight = nn.Parameter(weight.detach())
    return module


_course = partial(_sharing_weights, CourseAttention)
_ours = partial(_sharing_weights, bf.AdditiveAttention)


def _fused(inputs: Inputs) -> Module:
    """The course's module after ``bf.fuse``."""
    module = _course(inputs)
    bf.fuse(module, (inputs.queries, inputs.keys, inputs.values, inputs.valid_lens))
    return module


def _weights(module: Module) -> Tensor:
    if module.attention_weights is None:
        raise RuntimeError("the module left no attention_weights")
    return module.attention_weights


def _forget(module: Module) -> None:
    """Our module keeps the projection of its last keys: those of the next call are new to it."""
    if isinstance(module, bf.AdditiveAttention):
        module._cache._entry = module._cache._last = None


def _on_new_keys(make: Callable[[Inputs], Module], inputs: Inputs, steps: bool = False) -> Runnable:
    """A module's call on new keys, or with ``steps`` a loop of calls on the same keys."""
    module = make(inputs)

    def step(query: Tensor) -> Outputs:
        context = module(query, inputs.keys, inputs.values, inputs.valid_lens)
        return context, _weights(module)

    def forward() -> Outputs:
        _forget(module)
        return decode(step, inputs.queries) if steps else step(inputs.queries)

    return Runnable(forward, _with_parameters(inputs, module))


def _on_memory(inputs: Inputs, steps: bool = False) -> Runnable:
    """A step on a memory, or with ``steps`` a loop, its memory included."""
    module = _ours(inputs)

    def remember() -> Any:
        return module.memory(inputs.keys, inputs.values, inputs.valid_lens)

    def step(query: Tensor, memory: Any) -> Outputs:
        return module.attend(query, memory), _weights(module)

    if steps:
        leaves = _with_parameters(inputs, module)
        return Runnable(lambda: decode(partial(step, memory=remember()), inputs.queries), leaves)
    with torch.no_grad():
        memory = remember()
    return Runnable(lambda: step(inputs.queries, memory), ())


def _module(make: Callable[[Inputs], Module]) -> dict[str, Builder]:
    call = partial(_on_new_keys, make)
    return {"full": call, "loop": partial(call, steps=True)}


# --- the registry -------------------------------------------------------------------------------

_D2L = _module(_course)
PROVIDERS: tuple[Provider, ...] = (
    Provider(
        "d2l eager",
        "eager",
        {**_D2L, "step": _D2L["full"], **function(lambda: _course_projected, "projected")},
    ),
    Provider("rewrite eager", "eager", function(lambda: rewrite, *TASKS)),
    Provider("compiled", "compiled", function(lambda: compiled(rewrite), *TASKS)),
    Provider(
        "compiled max-autotune",
        "compiled",
        function(lambda: compiled(rewrite, "max-autotune"), *TASKS),
        on_demand=True,
    ),
    Provider("ours module", "ours", _module(_ours)),
    Provider("ours memory", "ours", {"step": _on_memory, "loop": partial(_on_memory, steps=True)}),
    Provider(
        "ours op",
        "ours",
        {
            **function(lambda: additive, "full"),
            "projected": _op_projected,
            "scan": partial(_op_projected, ready=True),
        },
    ),
    # On a GPU.
    Provider("expert", "expert", function(_expert, "projected", "step"), on_demand=True),
    Provider("compiled, tuned", "compiled", function(_tuned, *TASKS), on_demand=True),
    Provider(
        "ours compiled", "compiled", function(lambda: compiled(additive), "full"), on_demand=True
    ),
    Provider("W_q in front", "ours", function(lambda: _in_front, "step"), on_demand=True),
    Provider("ours, masked", "ours", function(lambda: _masked, "full"), on_demand=True),
    Provider("d2l fused", "ours", _module(_fused), on_demand=True),
    *peers.PROVIDERS,
)
