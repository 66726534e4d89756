"""Who computes the GPU report's calls: others, and ours as users meet it, compiled or fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bahdanau_fast as bf
from bahdanau_fast import backends
from bahdanau_fast.memory import ProjectedKeys

from ..contestants.baselines import compiled
from ..contestants.providers import (
    Outputs,
    Provider,
    Runnable,
    attend_projected,
    by_name,
    course,
    on_new_keys,
    rewrites,
)
from ..workloads.shapes import Inputs


def _tuned(function: Callable[..., Any]) -> Any:
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    return compiled(function, "max-autotune-no-cudagraphs")


def _expert(inputs: Inputs, step: bool) -> Runnable:
    from ..contestants.expert import Attention  # Triton may not be there

    leaves, given = inputs.leaves("projected"), inputs.valid_lens
    if not step:
        return Runnable(lambda: Attention.apply(*leaves, given), leaves)
    queries, *rest = inputs.queries, *leaves[1:]
    return Runnable(lambda: Attention.apply(F.linear(queries, inputs.w_q), *rest, given), ())


def _in_front(inputs: Inputs) -> Runnable:
    """A step of ours whose queries are projected by the library."""
    keys = ProjectedKeys(inputs.projected_keys, None, None)
    rest = inputs.values, inputs.w_v, inputs.valid_lens
    backend = backends.resolve(inputs.keys.device)
    linear = partial(F.linear, inputs.queries, inputs.w_q)
    return Runnable(lambda: attend_projected(backend, linear(), keys, *rest), ())


def _masked(inputs: Inputs) -> Runnable:
    """Lengths as a mask."""
    lens, keys_len = inputs.valid_lens, inputs.keys.shape[1]
    assert lens is not None
    mask = torch.arange(keys_len, device=lens.device) < lens[:, None]
    leaves = inputs.leaves("full")
    given = (inputs.queries, inputs.keys, inputs.values, *leaves[-3:])
    return Runnable(partial(bf.additive_attention, *given, mask=mask), leaves)


def _fused(inputs: Inputs) -> Runnable:
    """The course's module after ``bf.fuse``."""
    module = course(inputs)
    bf.fuse(module, (inputs.queries, inputs.keys, inputs.values, inputs.valid_lens))
    return on_new_keys(lambda _: module, inputs)


def _attention(*given: Tensor) -> Outputs:
    *tensors, lens = given
    return bf.additive_attention(*tensors, valid_lens=lens)


def _ours_compiled(inputs: Inputs) -> Runnable:
    leaves = inputs.leaves("full")
    given = (inputs.queries, inputs.keys, inputs.values, *leaves[-3:], inputs.valid_lens)
    return Runnable(partial(compiled(_attention), *given), leaves)


IN_FRONT = Provider("W_q in front", "ours", {"step": _in_front})
MASKED_CALL = Provider("ours, masked", "ours", {"full": _masked})
FUSED = Provider("d2l fused", "ours", {"full": _fused})
EXPERT = {"projected": partial(_expert, step=False), "step": partial(_expert, step=True)}
RIVALS: tuple[Provider, ...] = (
    Provider("expert", "peer", EXPERT),
    by_name("rewrite eager"),
    by_name("compiled"),
    by_name("d2l eager"),
    Provider("ours compiled", "compiled", {"full": _ours_compiled}),
    Provider("compiled, tuned", "compiled", rewrites(_tuned)),
)
