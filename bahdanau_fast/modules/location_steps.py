"""A sequence of steps of a LocationAttention, each of which sees where the ones before looked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.memory import Memory
from bahdanau_fast.modules.location import LocationAttention

__all__ = ["LocationSteps"]


class LocationSteps:
    """Takes the place of an attention in the loop of a decoder, for one sequence of steps.

    The location is the last step's weights; with two inputs, and their sum over all steps. Without
    a convolution it is that sum: coverage.
    """

    def __init__(self, attention: LocationAttention) -> None:
        self._attention, self.dropout = attention, attention.dropout
        features: Any = attention.W_f if attention.conv is None else attention.conv
        self._sees_both = features.weight.shape[1] == 2
        self._weights: Tensor | None = None
        self._total: Tensor | None = None

    @property
    def attention_weights(self) -> Tensor:
        """(B,1,Tk) of the last step."""
        assert self._weights is not None
        return self._weights

    def attend(self, queries: Tensor, memory: Memory) -> Tensor:
        """The context (B,1,Dv) of the next step."""
        attention, last, total = self._attention, self._weights, self._total
        if total is None:
            batch, keys_len, _ = memory.values.shape
            total = queries.new_zeros((batch, 1, keys_len))
        weights = total if last is None else last
        location = total if attention.conv is None else weights
        if self._sees_both:
            location = torch.cat((weights, total), 1)
        context = attention.attend(queries, memory, location, previous=last)
        now = attention.attention_weights
        assert now is not None
        self._weights, self._total = now, total + now
        return context

    def _shared(self, memory: Memory) -> Memory:
        return self._attention._shared(memory)
