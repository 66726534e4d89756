"""The CUDA C++ backend as an implementation of the operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bahdanau_fast import ops

__all__ = ["attend_step", "register"]

_step: Callable[..., tuple[Tensor, Tensor]]


def register() -> None:
    """Make the operators of the extension, which is loaded, serve CUDA tensors."""
    global _step
    kernels = torch.ops.bahdanau_fast
    forward, backward = kernels.attend_cuda.default._op, kernels.attend_backward_cuda.default._op
    ops.implement("cuda", forward, backward, "CUDA")
    _step = kernels.attend_step_cuda.default._op


def attend_step(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_q: Tensor,
    w_k: Tensor | None,
    bias: Tensor | None,
    w_v: Tensor,
    valid_lens: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Context and weights with the projections inside the launch, where the kernels have that.

    Without gradients and dropout. What the kernels do not project themselves is multiplied by
    torch before.

    Args:
        queries: (B,Tq,Dq).
        keys: (B,Tk,Dk); projected, (B,Tk,H), where ``w_k`` is None.
        values: (B,Tk,Dv).
        w_q: (H,Dq).
        w_k: (H,Dk) or None.
        bias: (H,) or None; only with ``w_k``.
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        need_weights: whether the weights are wanted.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk), fp64 for fp64 and else fp32; (0,) if not wanted.
    """
    return _step(queries, w_q, keys, w_k, bias, values, w_v, valid_lens, need_weights)
