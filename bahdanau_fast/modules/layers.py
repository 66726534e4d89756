"""Is a layer more than its parameters? If not, the parameters are read; if so, it is called.

Reading ``layer.weight`` is correct for an unmodified ``nn.Linear``. Hooks, LoRA, pruning,
parametrizations, quantization and a ``forward`` set on the instance (as accelerate does) change
what the layer computes: such a layer is called.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch
from torch.nn.parameter import is_lazy

from bahdanau_fast import checks
from bahdanau_fast.ops.projection import linear

_Linear = nn.Linear
_DROPOUTS = (nn.Dropout, nn.Identity)
# Hooks of all modules of the process; torch updates these dicts, never replaces them.
_forward_hooks = _torch._global_forward_hooks
_forward_pre_hooks = _torch._global_forward_pre_hooks
_backward_hooks = _torch._global_backward_hooks
_backward_pre_hooks = _torch._global_backward_pre_hooks


def check_features(name: str, tensor: Tensor, layer: nn.Module | None) -> None:
    """Queries or keys must have the features, dtype and device of their layer's weight."""
    # A lazy layer has no size yet; a modified one (LoRA, quantized, hooked) checks its inputs.
    parameters = plain_parameters(layer)
    if parameters is not None:
        weight = parameters["weight"]
        checks.features(name, tensor, weight.shape[1])
        checks.same_kind(name, tensor, "the module's weights", weight)


def is_unchanged(module: nn.Module) -> bool:
    """True if calling a module runs only its class's ``forward``."""
    if (
        torch.compiler.is_compiling()  # compiled code is for the forward that was looked at
        and not checks.is_exporting()  # which is done once
        and getattr(module.forward, "__code__", None)  # the compiler knows no other __func__
        is not getattr(type(module).forward, "__code__", None)
    ):
        return False
    # Not through nn.Module's __getattr__, which is slow.
    attributes = module.__dict__
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or _forward_hooks
        or _forward_pre_hooks
        or _backward_hooks
        or _backward_pre_hooks
    )


def plain_parameters(layer: nn.Module | None) -> dict[str, Any] | None:
    """``weight`` and ``bias`` of an unmodified ``nn.Linear``; None for any other layer."""
    # The weight of any other layer may be missing, a method, or on the meta device.
    if type(layer) is not nn.Linear or not is_unchanged(layer):
        return None
    parameters = layer._parameters
    return None if parameters.get("weight") is None else parameters


def plain_dropout(layer: nn.Module | None) -> float | None:
    """What an unmodified ``nn.Dropout`` drops with now, a probability; None for any other layer."""
    if layer is None or type(layer) not in _DROPOUTS or not is_unchanged(layer):
        return None
    if type(layer) is nn.Identity:
        return 0.0
    assert isinstance(layer, nn.Dropout)
    return None if layer.inplace else layer.p if layer.training else 0.0


def plain_convolution(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight (C,inputs,taps) and bias of an unmodified convolution; None for any other layer."""
    # A plain one runs along one row, with an odd number of taps and zeros around, and keeps the
    # length; all its channels see all.
    if type(layer) not in (nn.Conv1d, nn.Conv2d) or not is_unchanged(layer):
        return None
    weight, (*rows, taps) = layer.weight, layer.kernel_size
    ones, halves = (1,) * len(layer.kernel_size), tuple(n // 2 for n in layer.kernel_size)
    if not (
        (*rows, taps % 2) == layer.stride == layer.dilation == ones
        and layer.groups == 1
        and layer.padding in ("same", halves)
        and layer.padding_mode == "zeros"
    ):
        return None
    return weight.squeeze(2) if rows else weight, layer.bias


def plain_weight(layer: nn.Module | None) -> Tensor | None:
    """The weight of an unmodified ``nn.Linear`` without bias; None for any other layer."""
    parameters = plain_parameters(layer)
    if parameters is None or parameters.get("bias") is not None:
        return None
    weight: Tensor = parameters["weight"]
    return weight


#: W_q, W_k and w_v of an additive module and its dropout; None for a layer that has to be called.
Parts = tuple[Tensor | None, Tensor | None, Tensor | None, float | None]


def parts_of(module: Any) -> Parts:
    """The plain weights of an additive module, and its plain dropout."""
    modules = module._modules  # past nn.Module's __getattr__
    names = module._query_layer, module._key_layer, module._score_layer
    dropout = modules["dropout"]
    if torch.compiler.is_compiling():
        w_q, w_k, w_v = (plain_weight(modules[name]) for name in names)
        return w_q, w_k, w_v, plain_dropout(dropout)
    # Hooks of all modules do not depend on the layer.
    if _forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks:
        return None, None, None, None
    weights: list[Any] = []
    for name in names:
        layer, weight = modules[name], None
        if type(layer) is _Linear:
            attributes = layer.__dict__
            if not (  # as is_unchanged: a small call comes here three times
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
                or "forward" in attributes
            ):
                parameters = attributes["_parameters"]
                weight = parameters.get("weight") if parameters.get("bias") is None else None
        weights.append(weight)
    w_q, w_k, w_v = weights
    return w_q, w_k, w_v, plain_dropout(dropout)


def draw_if_lazy(layer: nn.Module | None, name: str, x: Tensor) -> None:
    """Draw the weights of a lazy layer, whose first input is like x."""
    if not isinstance(layer, nn.LazyLinear):
        return
    if torch.compiler.is_compiling():
        layer(x)  # the compiler infers its size, and drops the unused product
        return
    if not is_lazy(layer.weight):  # it has loaded one
        checks.features(name, x, layer.weight.shape[1])
    # What the layer's first call does in front of its hooks, which wait for a real call.
    cast(Any, layer)._infer_parameters(layer, (x,))


def apply_layer(layer: nn.Module | None, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``layer(x) + bias``, by :func:`linear` if the layer is an unmodified ``nn.Linear``."""
    assert layer is not None
    parameters = plain_parameters(layer)
    if parameters is not None:
        total = layer_bias = parameters.get("bias")
        if bias is not None:
            total = bias if layer_bias is None else layer_bias + bias
        return linear(x, parameters["weight"], total)
    projected: Tensor = layer(x)
    return projected if bias is None else projected + bias


def project_if_changed(
    name: str, x: Tensor, layer: nn.Module | None, weight: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Queries or keys (B,T,D) that fit their layer; through it where it is more than a weight."""
    check_features(name, x, layer)
    return x if weight is not None else apply_layer(layer, x, bias)
