"""What calls of a module derive from tensors that stay the same: projected keys, scaled vectors.

Operations on scores, ``(operation, operand)``, are carried out on the vector w_v of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share


class Caches:
    """Projected keys, and vectors with the operations on their scores, by vector and weight."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[KeyCache, Any, Tensor]] = {}

    def of(self, vector: Tensor, w_k: Tensor | None, score_ops: Any) -> tuple[KeyCache, Tensor]:
        """A cache of projected keys; and the vector as :func:`scaled` has it."""
        key = vector.data_ptr(), None if w_k is None else w_k.data_ptr()
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) > 16:
                self._entries.clear()
            entry = self._entries[key] = KeyCache(), None, vector
        cache, state, cached = entry
        if not (score_ops and torch.is_grad_enabled()):
            return cache, scaled(vector, score_ops)
        operations = [how for how, by in score_ops if isinstance(by, Tensor)]
        tensors = [vector, *(by for _, by in score_ops if isinstance(by, Tensor))]
        # The gradients of steps meet where each step has the same tensor. It is made of leaves
        # alone, since others may belong to a graph that is gone.
        adds = operations in ([], ["+"])
        if not adds or not all(t.is_leaf and may_share(t, t, None) for t in tensors):
            return cache, scaled(vector, score_ops)
        numbers = (op for op in score_ops if not isinstance(op[1], Tensor))
        current = (*numbers, *Source.of(vector, None, tensors[-1], "cpu").state)
        if state != current:
            cached = scaled(vector, score_ops)
            self._entries[key] = cache, current, cached
        return cache, cached


class NoCaches(Caches):
    """Nothing is cached, for graphs and for keys that come once."""

    def of(self, vector: Tensor, _: Tensor | None, score_ops: Any) -> tuple[Any, Tensor]:
        """No cache, and the vector as :func:`scaled` has it."""
        return None, scaled(vector, score_ops)


@dataclass(eq=False, repr=False)
class Shared:
    """What the graphs of a module share; not the module, which compiled code would keep alive."""

    caches: Caches
    always: bool = False  # the operator runs where it takes more time, too


def scaled(vector: Tensor, score_ops: tuple[tuple[str, Any], ...]) -> Tensor:
    """The vector that gives scores with these operations carried out, except for sums.

    No weight depends on what is added to all scores: it only gets its gradient, zero.
    """
    for how, by in score_ops:
        # Sums save no tensors, so that any number of backward passes may come through.
        if how == "+":
            if isinstance(by, Tensor) and by.requires_grad and torch.is_grad_enabled():
                vector = torch.add(vector, by, alpha=0)
        elif isinstance(by, Tensor):
            vector = vector * by if how == "*" else vector / by
        else:
            zero = vector.new_zeros(())
            vector = torch.add(zero, vector, alpha=by if how == "*" else 1 / by)
    return vector
