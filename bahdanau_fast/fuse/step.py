"""One step of a module of others: its own layers and tensors, this package's operators."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bahdanau_fast import backends
from bahdanau_fast.backends import Route
from bahdanau_fast.functional import attend_projected
from bahdanau_fast.general import attend_inside, attend_location, scores_inside
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.modules.layers import apply_layer, plain_parameters
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Located", "NotServed", "Step"]

M = TypeVar("M", bound=nn.Module)


class _Scorer(NamedTuple):
    """A scoring vector made of a layer's parameters."""

    weight: Tensor
    bias: Tensor | None
    state: tuple[object, ...]
    w_v: Tensor


class Located(NamedTuple):
    """Features of the keys that are a convolution of where earlier steps looked.

    Attributes:
        location: (B,inputs,Tk).
        weight: (C,inputs,taps).
        bias: (C,) or None.
    """

    location: Tensor
    weight: Tensor
    bias: Tensor | None


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
        general = inside is not TANH
        route = backends.decide(
            *(queries, keys, values, None, w_k, w_v, bias, w_v.shape[-1], 0.0),
            keys_projected=layer is None,
            general=general,
            masked=seen is not None and seen.dim() == 3,
        )
        if layer is not None and w_k is None:
            projected = ProjectedKeys(apply_layer(layer, keys), None, None)
        else:
            projected = self._projected(
                route, keys, w_k, bias, values, w_v, located=located is not None
            )
        shape = Shape((queries.shape[0],), True) if state else None
        if not general:
            return attend_projected(route, queries, projected, values, w_v, seen, 0.0, shape=shape)
        rest = (w_v, values, seen, 0.0)
        if located is None:
            return attend_inside(route, queries, projected.keys, *rest, inside, shape)
        return attend_location(route, queries, projected, *rest, *located, inside, shape)

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
        route = backends.decide(
            *(queries, keys, keys, None, w_k, w_v, bias, w_v.shape[-1], 0.0), general=True
        )
        projected = self._projected(route, keys, w_k, bias, keys, w_v).keys
        return scores_inside(route, queries, projected, w_v, TANH), projected

    def _projected(
        self,
        route: Route,
        keys: Tensor,
        w_k: Tensor | None,
        bias: Tensor | None,
        values: Tensor,
        w_v: Tensor,
        located: bool = False,
    ) -> ProjectedKeys:
        """Projected keys, and what was derived from them at the step before if nothing has changed.

        Without a weight the keys are projected: the module keeps them.
        """
        on_cpu = route.backend == "cpu"
        # Calls with a location read no table; their gradients meet in one node all the same.
        meet = located and on_cpu and route.records and not route.traced
        pays = route.table or meet if w_k is None else route.reuse and on_cpu
        # Where nothing is derived from the bytes of the keys, none are compared.
        by_version = w_k is None and not route.table
        source = self._cache.source(keys, w_k, bias, route.backend, by_version) if pays else None
        if source is None:
            own = keys if w_k is None else linear(keys, w_k, bias)
            return ProjectedKeys(own, None, None)
        return self._cache.project(
            source, values, w_v, route.table, route.records, reads_table=not located
        )

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
