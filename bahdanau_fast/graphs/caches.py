"""What calls of a module derive from tensors that stay the same: projected keys, scaled vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share

__all__ = ["Caches", "NoCaches", "Shared", "scaled"]


class Caches:
    """Projected keys, and a vector with what follows its scores, by vector and weight."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[KeyCache, Any, Tensor]] = {}

    def of(self, vector: Tensor, w_k: Tensor | None, after: Any) -> tuple[KeyCache, Tensor]:
        """A cache of projected keys; and the vector with what follows, as :func:`scaled`."""
        key = vector.data_ptr(), None if w_k is None else w_k.data_ptr()
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) > 16:
                self._entries.clear()
            entry = self._entries[key] = KeyCache(), None, vector
        cache, state, cached = entry
        if not (after and torch.is_grad_enabled()):
            return cache, scaled(vector, after)
        operations = [how for how, by in after if isinstance(by, Tensor)]
        tensors = [vector, *(by for _, by in after if isinstance(by, Tensor))]
        # The gradients of steps meet where each step has the same tensor. It is made of leaves
        # alone, since others may belong to a graph that is gone.
        adds = operations in ([], ["+"])
        if not adds or not all(t.is_leaf and may_share(t, t, None) for t in tensors):
            return cache, scaled(vector, after)
        numbers = (step for step in after if not isinstance(step[1], Tensor))
        current = (*numbers, *Source.of(vector, None, tensors[-1], "cpu").state)
        if state != current:
            cached = scaled(vector, after)
            self._entries[key] = cache, current, cached
        return cache, cached


class NoCaches(Caches):
    """Nothing is cached, for graphs and for keys that come once."""

    def of(self, vector: Tensor, _: Tensor | None, after: Any) -> tuple[Any, Tensor]:
        """No cache, and the vector with what follows."""
        return None, scaled(vector, after)


class Shared:
    """What the graphs of a module share; not the module, which compiled code would keep alive.

    Attributes:
        caches: of projected keys.
        always: whether the operator runs where it takes more time, too.
    """

    def __init__(self, caches: Caches, always: bool = False) -> None:
        self.caches, self.always = caches, always


def scaled(vector: Tensor, after: tuple[tuple[str, Any], ...]) -> Tensor:
    """A vector whose scores have what follows, (operation, operand), but for what is added.

    No weight depends on that: it only gets its gradient, zero.
    """
    for how, by in after:
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
