"""What the code around a call does to it: ``torch.func``, forward mode, ``torch.jit``, autocast.

Fused operators and custom backward formulas know neither. Called under one of them they would drop
a tangent without a word, or raise an error about something else; plain PyTorch operations do what
they should, so everything asks here before it takes a short way. The same goes for
``torch.jit.trace``, which can write down no operator that Python differentiates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["active", "autocast_dtype", "needs_gradient", "softmax_in_fp32"]


def active() -> bool:
    """Whether ``torch.func``, a forward-mode level or ``torch.jit.trace`` is at work.

    The first two are seen while code is compiled, too.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (not torch.compiler.is_compiling() and torch._C._is_tracing())
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these inputs."""
    if torch.compiler.is_compiling():  # by what the compiler can trace
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return (
        torch.is_grad_enabled()
        and bool(torch._C._any_requires_grad(*tensors))
        and not torch.is_inference_mode_enabled()  # even within enable_grad()
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast gives matrix products on a device, None where it is off.

    Args:
        device: of any kind; those autocast knows nothing of (meta) may not be asked by name.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def softmax_in_fp32(device: torch.device) -> bool:
    """Whether autocast gives the result of a softmax in fp32: on GPUs it does, on the CPU not."""
    return device.type == "cuda" and torch.is_autocast_enabled("cuda")
