"""Steps that project for themselves, where that beats a matrix product in front (GPU only)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bahdanau_fast import transforms
from bahdanau_fast.projection import linear

__all__ = ["attend_raw"]


@functools.cache
def _sharing(device: torch.device) -> int:
    """Blocks that share W_q on a GPU (csrc/cuda/kernels/decode.h): a cluster, from 9.0 on."""
    return 8 if torch.cuda.get_device_capability(device) >= (9, 0) else 1


def attend_raw(
    backend: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_q: Tensor,
    w_k: Tensor | None,
    bias: Tensor | None,
    w_v: Tensor,
    valid_lens: Tensor | None,
    draw_seed: Callable[[float, Tensor], Tensor | None],
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor] | None:
    """Context and weights by a GPU backend with a projection in its kernel, or None.

    None where no projection is better made there, where gradients are due and where code is
    compiled or under autocast: the caller projects, then.

    Args:
        backend: "cuda" or "triton".
        queries: (B,Tq,Dq).
        keys: (B,Tk,Dk); projected, (B,Tk,H), where ``w_k`` is None.
        values: (B,Tk,Dv).
        w_q: (H,Dq).
        w_k: (H,Dk) or None.
        bias: (H,) or None.
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        draw_seed: gives a (1,) int64 seed where there is dropout; called only if it is used.
        dropout_p: probability of dropping a weight.
        need_weights: whether the weights are wanted.
    """
    inputs = (queries, keys, values, w_q, w_k, bias, w_v)
    if (
        torch.compiler.is_compiling()
        or transforms.autocast_dtype(queries.device) is not None
        or transforms.needs_gradient(*inputs)
        or (backend == "cuda" and dropout_p > 0.0)
    ):
        return None
    hidden, size = w_v.numel(), queries.element_size()
    from bahdanau_fast.kernels import plans

    if not plans.is_step(queries.shape[1], values.shape[2], wide=size == 4):
        return None
    sharing = _sharing(queries.device) if backend == "cuda" else 1
    own_query = plans.fuses_queries(queries.shape[1], queries.shape[2], hidden, size, sharing)
    rows = keys.shape[0] * keys.shape[1]
    own_keys = w_k is not None and plans.fuses_keys(rows, keys.shape[2], hidden, size)
    if not own_query and not own_keys:
        return None
    if backend == "cuda":
        from bahdanau_fast.cuda_ops import attend_step

        return attend_step(queries, keys, values, w_q, w_k, bias, w_v, valid_lens, need_weights)
    if not own_query:
        queries = linear(queries, w_q)
    if w_k is not None and not own_keys:
        keys = linear(keys, w_k, bias)
    from bahdanau_fast.triton_forward import step_from_raw

    return step_from_raw(
        queries,
        keys,
        values,
        w_q if own_query else None,
        w_k if own_keys else None,
        bias if own_keys else None,
        w_v,
        valid_lens,
        draw_seed(dropout_p, queries),
        dropout_p,
        need_weights,
    )
