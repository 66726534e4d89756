"""``attention_weights``, the attribute that a call of an attention module sets."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.ops.context import Box


def _weights(module: Any) -> Any:
    stored = module.__dict__.get("_weights")
    if not isinstance(stored, Box):
        return stored
    stored.is_read = True
    return stored.weights


def _get(module: Any) -> Any:
    """(B,Tq,Tk) of the last call, after softmax, before dropout, in the autograd graph."""
    if _is_exporting_strictly():
        raise RuntimeError("attention_weights is not kept by torch.export with strict=True")
    return _weights(module)


def _is_exporting_strictly() -> bool:
    return checks.is_exporting() and torch.compiler.is_dynamo_compiling()


def keep(module: nn.Module, weights: Tensor | None, context: Tensor | None = None) -> None:
    """Keep the weights of a call; in the box of the context's node, if that has one."""
    if not torch.compiler.is_compiling():
        box = None if context is None else getattr(context.grad_fn, "box", None)
        if box is not None:
            box.is_read = False  # until the attribute is
        # nn.Module's __setattr__ takes as long as a kernel.
        module.__dict__["_weights"] = weights if box is None else box
        return
    stored: Any = weights
    if checks.is_exporting():
        # Both kinds warn of a tensor that becomes an attribute, then drop it. In a box it can be
        # read meanwhile, but with strict=True.
        if torch.compiler.is_dynamo_compiling():
            return
        stored = Box(stored)
    elif checks.in_transform():
        stored = None  # the tensors of a transform may not outlive it in compiled code
    object.__setattr__(module, "_weights", stored)


#: The property of a module, with the type of what it gives; a call sets it by :func:`keep`.
attention_weights: Tensor | None = cast(Any, property(_get, keep))


def restored(module: nn.Module, context: Tensor, shape: Shape) -> Tensor:
    """The context of the call that just ended in another shape, and its stored weights."""
    weights = _weights(module)
    if weights is not None and not _is_exporting_strictly():  # else they are of an earlier call
        keep(module, shape.restore(weights))
    return shape.restore(context)


def state_of(module: nn.Module) -> dict[str, Any]:
    """What copies and pickles take: the graph of the last call can be neither."""
    stored = module.__dict__.get("_weights")
    stored = stored.weights if isinstance(stored, Box) else stored
    return {**vars(module), "_weights": stored.detach() if isinstance(stored, Tensor) else stored}
