"""What calls of a module derive from tensors that stay the same: projected keys, scaled vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share

__all__ = ["After", "Caches", "scaled"]

#: What follows the scores: (operation, by what).
After = tuple[tuple[str, Any], ...]


class Caches:
    """Projected keys, for each vector, and vectors with what follows their scores."""

    def __init__(self) -> None:
        self._caches: dict[Any, KeyCache] = {}
        self._vectors: dict[Any, tuple[Any, Tensor]] = {}

    def of(
        self, vector: Tensor, w_k: Tensor | None, after: After
    ) -> tuple[KeyCache | None, Tensor]:
        """A cache of projected keys, and the vector with what follows its scores.

        Of what is added no weight depends: only its gradient, zero, is kept.
        """
        grad = torch.is_grad_enabled()
        after = tuple(
            [
                (how, by)
                for how, by in after
                if how != "+" or (grad and isinstance(by, Tensor) and by.requires_grad)
            ]
        )
        cache = self._cache(vector, w_k)
        if cache is None:
            return None, scaled(vector, after)
        given = [vector, *(by for _, by in after if isinstance(by, Tensor))]
        # The same tensor at each step, for the gradients of steps to meet; of leaves alone: others
        # may belong to a graph that is gone.
        shared = grad and after and len(given) < 3 and all(t.is_leaf for t in given)
        shared = shared and not any(how != "+" and isinstance(by, Tensor) for how, by in after)
        if not shared or not all(may_share(t, t, None) for t in given):
            return cache, scaled(vector, after)
        numbers = tuple(by for _, by in after if not isinstance(by, Tensor))
        state = (*numbers, *Source.of(vector, None, given[-1], "cpu").state)
        known = self._vectors.get(cache)
        if known is None or known[0] != state:
            known = self._vectors[cache] = state, scaled(vector, after)
        return cache, known[1]

    def _cache(self, vector: Tensor, w_k: Tensor | None) -> KeyCache | None:
        if type(vector) not in (Tensor, nn.Parameter):
            return None
        key = (vector.data_ptr(), None if w_k is None else w_k.data_ptr())
        found = self._caches.get(key)
        if found is None:
            if len(self._caches) > 16:
                self._caches.clear()
                self._vectors.clear()
            found = self._caches[key] = KeyCache()
        return found


def scaled(vector: Tensor, after: After) -> Tensor:
    """A vector whose scores are what follows those of ``vector``, but for what is added."""
    for how, by in after:
        # Sums save no tensors, so that any number of backward passes may come through.
        if how == "+":
            vector = torch.add(vector, by, alpha=0)
        elif isinstance(by, Tensor):
            vector = vector * by if how == "*" else vector / by
        else:
            zero = vector.new_zeros(())
            vector = torch.add(zero, vector, alpha=by if how == "*" else 1 / by)
    return vector
