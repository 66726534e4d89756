"""One step of a module of others: its own layers and tensors, this package's operators."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bahdanau_fast import run
from bahdanau_fast.call import Call, Located
from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.modules.layers import apply_layer, plain_parameters
from bahdanau_fast.reference import TANH, Inside

__all__ = ["NotServed", "Step"]

M = TypeVar("M", bound=nn.Module)


class _Scorer(NamedTuple):
    """A scoring vector made of a layer's parameters."""

    weight: Tensor
    bias: Tensor | None
    state: tuple[object, ...]
    w_v: Tensor


class NotServed(Exception):
    """A call that is left to the module's own ``forward``, which has words for what is wrong."""


class Step:
    """Computes the steps of one module, and uses again what it derived from unchanged tensors.

    Nothing in it is state: what the module keeps stays in the module's own attributes. Copies and
    pickles leave it out.
    """

    def __init__(self) -> None:
        self._cache = KeyCache()
        self._scorer: _Scorer | None = None
        self._own: nn.Module | None = None

    def own(self, kind: type[M]) -> M:
        """A module of this package that stands behind the other one; made once.

        Args:
            kind: its class.
        """
        if not isinstance(self._own, kind):
            self._own = kind()
        return self._own

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        w_v: Tensor,
        seen: Tensor | None = None,
        *,
        layer: nn.Module | None = None,
        inside: Inside = TANH,
        located: Located | None = None,
        state: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Context and weights.

        Args:
            queries: (B,Tq,H), projected.
            keys: (B,Tk,Dk) for the key layer; (B,Tk,H), projected, without.
            values: (B,Tk,Dv).
            w_v: (1,H), from :meth:`scorer`.
            seen: None, lengths (B,), or a mask (B,1,Tk) or (B,Tq,Tk), True where to look.
            layer: projects the keys.
            inside: features of the keys, and the activation.
            located: what the features are made of, in place of those of ``inside``.
            state: the query is a decoder state: Tq, one, is left out of the results.

        Returns:
            Context (B,Tq,Dv), weights (B,Tq,Tk).

        Raises:
            NotServed: sizes that do not fit together, or a mask that is not bool.
        """
        _check(queries, keys, values, seen)
        parameters = plain_parameters(layer) or {}
        w_k, bias = parameters.get("weight"), parameters.get("bias")
        cache: KeyCache | None = self._cache
        if layer is not None and w_k is None:
            keys, cache = apply_layer(layer, keys), None
        is_mask = seen is not None and seen.dtype is torch.bool
        lens, mask = (None, seen) if is_mask else (seen, None)
        return run.attend(
            Call(
                *(queries, keys, values, w_v, None, w_k, bias, lens, mask),
                inside=inside,
                located=located,
                cache=cache,
                shape=Shape((queries.shape[0],), True) if state else None,
            )
        )

    def scores(
        self, queries: Tensor, keys: Tensor, w_k: Tensor, bias: Tensor | None, w_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores before the softmax.

        Args:
            queries: (B,Tq,H), projected.
            keys: (B,Tk,Dk).
            w_k: (H,Dk).
            bias: (H,) or None.
            w_v: (1,H).

        Returns:
            Scores (B,Tq,Tk), projected keys (B,Tk,H).

        Raises:
            NotServed: as :meth:`attend`.
        """
        _check(queries, keys, keys, None)
        given = (queries, keys, keys, w_v, None, w_k, bias)
        call = run.project(Call(*given, cache=self._cache, scores_only=True))
        return run.scores(call), call.keys

    def scorer(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """``scale * weight``, the same tensor as long as nothing changes, for steps to share.

        Args:
            weight: (1,H).
            bias: (1,) of the scores, or None. No weight depends on it: its gradient is zero.
            scale: factor of the scores.
        """
        idle = bias is None or not (torch.is_grad_enabled() and bias.requires_grad)
        if idle and scale == 1:
            return weight
        known = self._scorer
        same = not torch.compiler.is_compiling()
        same = same and weight.is_cpu and may_share(weight, weight, None)
        state = (scale, *Source.of(weight, None, bias, "cpu").state) if same else ()
        if (
            known is not None
            and known.state == state
            and known.weight is weight
            and known.bias is bias
        ):
            return known.w_v
        # Sums: their nodes save no tensors, so any number of backward passes may come through.
        w_v = torch.add(weight.new_zeros(()), weight, alpha=scale)
        if bias is not None and not idle:
            w_v = torch.add(w_v, bias, alpha=0)
        if same:
            self._scorer = _Scorer(weight, bias, state, w_v)
        return w_v


def _check(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> None:
    """Sizes as :meth:`Step.attend` needs them: a module's own code may add up others."""
    if not queries.dim() == keys.dim() == values.dim() == 3:
        raise NotServed
    (batch, queries_len, _), keys_len = queries.shape, keys.shape[1]
    if not (keys.shape[0] == batch and values.shape[:2] == keys.shape[:2]):
        raise NotServed
    if seen is None or (seen.dim() == 1 and seen.shape[0] == batch):
        return
    masks = ((batch, 1, keys_len), (batch, queries_len, keys_len))
    if seen.dtype != torch.bool or tuple(seen.shape) not in masks:
        raise NotServed
