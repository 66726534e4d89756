"""What the GPU report compares with: torch.compile in its modes, one Triton kernel, and JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..workloads.shapes import Inputs
from .baselines import MASKED, compiled
from .peers import imported
from .providers import Outputs, Provider, Runnable, _rewrites, by_name


def _compiled(name: str, mode: str, tuned: bool = False) -> Provider:
    def wrap(function: Callable[..., Any]) -> Any:
        if tuned:
            from torch._inductor import config

            config.coordinate_descent_tuning = True
        return compiled(function, mode)

    return Provider(name, "compiled", _rewrites(wrap))


def _tensors(inputs: Inputs, task: str) -> tuple[Any, ...]:
    """The arguments of ``rewrite`` or, for a step, of ``rewrite_step``."""
    if task == "projected":
        return (*inputs.leaves(task), inputs.valid_lens)
    weights = (inputs.w_q, inputs.w_v)
    return inputs.queries, inputs.projected_keys, inputs.values, weights, inputs.valid_lens


def _tanh_approx(task: str, inputs: Inputs) -> Runnable:
    imported("triton", "Triton")
    from .tanh_approx import attend

    def step(
        query: Tensor, key: Tensor, value: Tensor, weights: tuple[Tensor, Tensor], lens: Tensor
    ) -> Outputs:
        return attend(F.linear(query, weights[0]), key, value, weights[1], lens)

    function = attend if task == "projected" else step
    return Runnable(partial(function, *_tensors(inputs, task)), ())


def _jax(task: str, inputs: Inputs) -> Runnable:
    """``rewrite`` in JAX under jit; a call waits for its result, as JAX has a stream of its own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = imported("jax", "JAX")
    jnp = jax.numpy

    def attend(query: Any, key: Any, value: Any, w_v: Any, lens: Any) -> Any:
        scores = (jnp.tanh(query[:, :, None] + key[:, None]) * w_v).sum(-1)
        if lens is not None:
            keep = jnp.arange(scores.shape[-1]) < lens[:, None, None]
            scores = jnp.where(keep, scores, MASKED)
        weights = jax.nn.softmax(scores, -1)
        return weights @ value, weights

    def step(query: Any, key: Any, value: Any, weights: Any, lens: Any) -> Any:
        return attend(query @ weights[0].T, key, value, weights[1], lens)

    def given(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        return jax.dlpack.from_dlpack(tensor if tensor.is_floating_point() else tensor.int())

    arrays = jax.tree_util.tree_map(given, _tensors(inputs, task))
    call = jax.jit(attend if task == "projected" else step)

    def forward() -> Outputs:
        context, weights = jax.block_until_ready(call(*arrays))
        return from_dlpack(context), from_dlpack(weights)

    return Runnable(forward, ())


def _both(build: Callable[[str, Inputs], Runnable]) -> dict[str, Callable[[Inputs], Runnable]]:
    return {task: partial(build, task) for task in ("projected", "step")}


# Those that take seconds to compile come after those that do not.
RIVALS: tuple[Provider, ...] = (
    Provider("Triton tanh.approx", "peer", _both(_tanh_approx)),
    by_name("rewrite eager"),
    by_name("compiled"),
    by_name("d2l eager"),
    Provider("JAX jit", "peer", _both(_jax)),
    _compiled("compiled reduce-overhead", "reduce-overhead"),
    _compiled("compiled tuned", "max-autotune-no-cudagraphs", tuned=True),
)
