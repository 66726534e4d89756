"""Layers that other code may have changed: when a weight stands for its layer, and when not.

Reading ``layer.weight`` is right for an ``nn.Linear`` as torch makes it. Hooks, LoRA, pruning,
parametrizations, quantization and a ``forward`` set on the instance (accelerate does that) change
what calling the layer computes: such a layer is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Linear
from torch.nn.modules import module as _torch

from bahdanau_fast.ops.projection import linear

__all__ = ["apply_layer", "is_unchanged", "plain_parameters", "plain_weight", "plain_weights"]

# Dicts that torch fills in place, with hooks for the modules of the whole process.
_forward_hooks = _torch._global_forward_hooks
_forward_pre_hooks = _torch._global_forward_pre_hooks
_backward_hooks = _torch._global_backward_hooks
_backward_pre_hooks = _torch._global_backward_pre_hooks


def is_unchanged(module: nn.Module) -> bool:
    """Whether calling a module runs its class's ``forward`` and nothing else."""
    if (
        torch.compiler.is_compiling()  # compiled code is for the forward that was looked at
        and not torch.compiler.is_exporting()  # which is done once
        and getattr(module.forward, "__func__", None) is not type(module).forward
    ):
        return False
    return not (_is_changed(module) or _all_modules_have_hooks())


def _all_modules_have_hooks() -> bool:
    return bool(_forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks)


def _is_changed(module: nn.Module) -> bool:
    """Whether the instance has hooks or a ``forward`` of its own."""
    own = module.__dict__  # past nn.Module's __getattr__: small calls ask this three times
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def plain_parameters(layer: nn.Module | None) -> dict[str, Any] | None:
    """``weight`` and ``bias``, when they alone decide what the layer computes; else None.

    Where the answer is None nothing is known of the layer: its weight may be missing, a method, or
    on the meta device until the layer is called.
    """
    if type(layer) is not Linear or not is_unchanged(layer):
        return None
    parameters = layer._parameters
    return None if parameters.get("weight") is None else parameters


def plain_weight(layer: nn.Module | None) -> Tensor | None:
    """The weight, when it alone decides what the layer computes; else None."""
    parameters = plain_parameters(layer)
    if parameters is None or parameters.get("bias") is not None:
        return None
    weight: Tensor = parameters["weight"]
    return weight


def plain_weights(*layers: nn.Module | None) -> list[Tensor | None]:
    """:func:`plain_weight` of each; what does not depend on the layer is asked once."""
    if torch.compiler.is_compiling():
        return [plain_weight(layer) for layer in layers]
    weights: list[Tensor | None] = [None] * len(layers)
    if not _all_modules_have_hooks():
        for i, layer in enumerate(layers):
            if type(layer) is Linear and not _is_changed(layer):
                parameters = layer._parameters
                if parameters.get("bias") is None:
                    weights[i] = parameters.get("weight")
    return weights


def apply_layer(layer: nn.Module | None, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``layer(x) + bias``, by :func:`linear` where its parameters are all that the layer is."""
    assert layer is not None
    parameters = plain_parameters(layer)
    if parameters is not None:
        own = parameters.get("bias")
        total = own if bias is None else bias if own is None else own + bias
        return linear(x, parameters["weight"], total)
    projected: Tensor = layer(x)
    return projected if bias is None else projected + bias
