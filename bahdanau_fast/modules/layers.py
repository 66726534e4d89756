"""Layers that other code may have modified: when ``layer.weight`` may be used, and when not.

Reading ``layer.weight`` is correct for an unmodified ``nn.Linear``. Hooks, LoRA, pruning,
parametrizations, quantization and a ``forward`` set on the instance (as accelerate does) change
what the layer computes: such a layer is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Linear
from torch.nn.modules import module as _torch

from bahdanau_fast.ops.projection import linear

__all__ = ["apply_layer", "is_unchanged", "plain_parameters", "plain_weight"]

# Hooks of all modules of the process; torch changes these dicts in place.
_forward_hooks = _torch._global_forward_hooks
_forward_pre_hooks = _torch._global_forward_pre_hooks
_backward_hooks = _torch._global_backward_hooks
_backward_pre_hooks = _torch._global_backward_pre_hooks


def is_unchanged(module: nn.Module) -> bool:
    """True if calling a module runs only its class's ``forward``."""
    if (
        torch.compiler.is_compiling()  # compiled code is for the forward that was looked at
        and not torch.compiler.is_exporting()  # which is done once
        and getattr(module.forward, "__func__", None) is not type(module).forward
    ):
        return False
    # Not through nn.Module's __getattr__, which is slow: a small call comes here three times.
    own = module.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or _forward_hooks
        or _forward_pre_hooks
        or _backward_hooks
        or _backward_pre_hooks
    )


def plain_parameters(layer: nn.Module | None) -> dict[str, Any] | None:
    """``weight`` and ``bias`` of an unmodified ``nn.Linear``; None for any other layer.

    Of another layer nothing is known: its weight may be missing, a method, or on the meta device
    until the layer is called.
    """
    if type(layer) is not Linear or not is_unchanged(layer):
        return None
    parameters = layer._parameters
    return None if parameters.get("weight") is None else parameters


def plain_weight(layer: nn.Module | None) -> Tensor | None:
    """The weight of an unmodified ``nn.Linear`` without bias; None for any other layer."""
    parameters = plain_parameters(layer)
    if parameters is None or parameters.get("bias") is not None:
        return None
    weight: Tensor = parameters["weight"]
    return weight


def apply_layer(layer: nn.Module | None, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``layer(x) + bias``, by :func:`linear` if the layer is an unmodified ``nn.Linear``."""
    assert layer is not None
    parameters = plain_parameters(layer)
    if parameters is not None:
        own = parameters.get("bias")
        total = own if bias is None else bias if own is None else own + bias
        return linear(x, parameters["weight"], total)
    projected: Tensor = layer(x)
    return projected if bias is None else projected + bias
