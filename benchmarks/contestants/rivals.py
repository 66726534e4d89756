"""What the GPU report compares with: eager code, torch.compile in its modes, and JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..workloads.shapes import Inputs
from .baselines import MASKED, compiled
from .peers import imported
from .providers import Outputs, Provider, Runnable, by_name, rewrites


def _compiled(name: str, mode: str, tuned: bool = False) -> Provider:
    def wrap(function: Callable[..., Any]) -> Any:
        if tuned:
            from torch._inductor import config

            config.coordinate_descent_tuning = True
        return compiled(function, mode)

    return Provider(name, "compiled", rewrites(wrap))


def _jax(inputs: Inputs, step: bool) -> Runnable:
    """The rewrite in JAX under jit; a call waits for its result, as JAX has a stream of its own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = imported("jax", "JAX")
    jnp = jax.numpy

    def attend(query: Any, key: Any, value: Any, w_v: Any, lens: Any, w_q: Any) -> Any:
        query = query if w_q is None else query @ w_q.T
        scores = (jnp.tanh(query[:, :, None] + key[:, None]) * w_v).sum(-1)
        if lens is not None:
            keep = jnp.arange(scores.shape[-1]) < lens[:, None, None]
            scores = jnp.where(keep, scores, MASKED)
        weights = jax.nn.softmax(scores, -1)
        return weights @ value, weights

    def given(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        return jax.dlpack.from_dlpack(tensor if tensor.is_floating_point() else tensor.int())

    query, w_q = (inputs.queries, inputs.w_q) if step else (inputs.projected_queries, None)
    tensors = (query, inputs.projected_keys, inputs.values, inputs.w_v, inputs.valid_lens, w_q)
    arrays = [None if tensor is None else given(tensor) for tensor in tensors]
    call = jax.jit(attend)

    def forward() -> Outputs:
        context, weights = jax.block_until_ready(call(*arrays))
        return from_dlpack(context), from_dlpack(weights)

    return Runnable(forward, ())


_JAX = {"projected": partial(_jax, step=False), "step": partial(_jax, step=True)}

# Those that take seconds to compile come after those that do not.
RIVALS: tuple[Provider, ...] = (
    by_name("rewrite eager"),
    by_name("compiled"),
    by_name("d2l eager"),
    Provider("JAX jit", "peer", _JAX),
    _compiled("compiled reduce-overhead", "reduce-overhead"),
    _compiled("compiled tuned", "max-autotune-no-cudagraphs", tuned=True),
)
