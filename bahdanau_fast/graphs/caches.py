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
        self._known: dict[Any, tuple[KeyCache, Any, Tensor]] = {}

    def of(self, vector: Tensor, w_k: Tensor | None, after: Any) -> tuple[KeyCache, Tensor]:
        """A cache of projected keys; and the vector with what follows, as :func:`scaled`."""
        key = vector.data_ptr(), None if w_k is None else w_k.data_ptr()
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 16:
                self._known.clear()
            found = self._known[key] = KeyCache(), None, vector
        cache, known, made = found
        if not (after and torch.is_grad_enabled()):
            return cache, scaled(vector, after)
        by = [each for each in after if isinstance(each[1], Tensor)]
        given = [vector, *(t for _, t in by)]
        # The same tensor at each step, for the gradients of steps to meet; of leaves alone: others
        # may belong to a graph that is gone.
        adds = [how for how, _ in by] in ([], ["+"])
        if not adds or not all(t.is_leaf and may_share(t, t, None) for t in given):
            return cache, scaled(vector, after)
        numbers = (each for each in after if not isinstance(each[1], Tensor))
        state = (*numbers, *Source.of(vector, None, given[-1], "cpu").state)
        if known != state:
            made = scaled(vector, after)
            self._known[key] = cache, state, made
        return cache, made


class NoCaches(Caches):
    """Nothing is kept: for graphs, and for keys that come once."""

    def of(self, vector: Tensor, _: Tensor | None, after: Any) -> tuple[Any, Tensor]:
        """No cache."""
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
    """A vector whose scores are what follows, (operation, by what), but for what is added.

    Of that no weight depends: only its gradient, zero, is kept.
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
