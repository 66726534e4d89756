"""``attention_weights``, the attribute that a call of an attention module sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.ops.context import Box

__all__ = ["KeepsWeights"]


class _Boxed:
    """Hides weights from ``torch.export``, which handles tensor attributes on its own."""

    def __init__(self, weights: Tensor | None) -> None:
        self.weights = weights


class KeepsWeights(nn.Module):
    """A module with ``attention_weights``, in eager, compiled and exported calls.

    During ``torch.export`` they can be read, but not with ``strict=True``. A compiled call inside a
    ``torch.func`` transform sets them to None.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: Tensor | _Boxed | Box | None = None

    @property
    def attention_weights(self) -> Tensor | None:
        """(B,Tq,Tk) of the last call, after softmax, before dropout, in the autograd graph."""
        if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
            raise RuntimeError("attention_weights is not kept by torch.export with strict=True")
        kept = self._weights
        return kept.weights if isinstance(kept, (_Boxed, Box)) else kept

    @attention_weights.setter
    def attention_weights(self, weights: Tensor | None) -> None:
        self._keep(weights)

    def _keep(self, weights: Tensor | None, context: Tensor | None = None) -> None:
        """Keep the weights; in the box that this context's node has, where there is one."""
        kept: Tensor | _Boxed | Box | None = weights
        if not torch.compiler.is_compiling():
            if context is not None:
                box = getattr(context.grad_fn, "box", None)
                kept = weights if box is None else box
            self.__dict__["_weights"] = kept  # nn.Module's __setattr__ takes as long as a kernel
            return
        if torch.compiler.is_exporting():
            # Both kinds of export warn of a tensor that becomes an attribute, then drop it.
            if torch.compiler.is_dynamo_compiling():
                return
            kept = _Boxed(weights)
        elif checks.in_transform():
            kept = None  # the tensors of a transform may not outlive it in compiled code
        object.__setattr__(self, "_weights", kept)

    def _restored(self, context: Tensor, shape: Shape) -> Tensor:
        """The context of the call that just ended in another shape, and the weights it kept."""
        kept = self._weights
        weights = kept.weights if isinstance(kept, (_Boxed, Box)) else kept
        exported = torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()
        if weights is not None and not exported:  # else they are those of an earlier call
            self._keep(shape.restore(weights))
        return shape.restore(context)

    def __getstate__(self) -> dict[str, Any]:
        # The graph of the last call can be neither copied nor pickled.
        state = self.__dict__.copy()
        kept = self._weights.weights if isinstance(self._weights, Box) else self._weights
        state["_weights"] = kept.detach() if isinstance(kept, Tensor) else kept
        return state
