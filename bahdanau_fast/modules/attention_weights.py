"""``attention_weights``, the attribute of the attention modules that a call leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast.ops import torch_state

__all__ = ["KeepsWeights"]


class _Boxed:
    """Weights that are no attribute of the module; for the time of a ``torch.export``."""

    def __init__(self, weights: Tensor | None) -> None:
        self.weights = weights


class KeepsWeights(nn.Module):
    """A module with ``attention_weights``, wherever it is called from.

    In a ``torch.export`` they can be read until it ends; one with ``strict=True`` does not keep
    them. A call compiled inside a ``torch.func`` transform leaves None.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: Tensor | _Boxed | None = None

    @property
    def attention_weights(self) -> Tensor | None:
        """(B,Tq,Tk) of the last call, after softmax, before dropout, in the autograd graph."""
        if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
            raise RuntimeError("attention_weights is not kept by torch.export with strict=True")
        kept = self._weights
        return kept.weights if isinstance(kept, _Boxed) else kept

    @attention_weights.setter
    def attention_weights(self, weights: Tensor | None) -> None:
        self._keep(weights)

    def _keep(self, weights: Tensor | None) -> None:
        kept: Tensor | _Boxed | None = weights
        if not torch.compiler.is_compiling():
            self.__dict__["_weights"] = kept  # nn.Module's __setattr__ takes as long as a kernel
            return
        if torch.compiler.is_exporting():
            # Either export warns of a tensor that becomes an attribute, then forgets it.
            if torch.compiler.is_dynamo_compiling():
                return
            kept = _Boxed(weights)
        elif torch_state.active():
            kept = None  # the tensors of a transform may not outlive it in compiled code
        object.__setattr__(self, "_weights", kept)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles carry parameters, not the graph of the last call, which can be neither
        # copied nor pickled.
        state = self.__dict__.copy()
        if isinstance(self._weights, Tensor):
            state["_weights"] = self._weights.detach()
        return state
