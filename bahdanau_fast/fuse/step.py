"""One step of a module of others: its own layers and tensors, this package's operators."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks, ops
from bahdanau_fast.backends import Route
from bahdanau_fast.functional import attend_projected
from bahdanau_fast.general import attend_inside, attend_location, scores_inside
from bahdanau_fast.memory import ProjectedKeys, project
from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share
from bahdanau_fast.modules.base import apply_layer, plain_parameters
from bahdanau_fast.ops.lifetime import Lifetime
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.ops.shared_gradients import SharedNode
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Located", "Step"]

M = TypeVar("M", bound=nn.Module)


class _Kept(NamedTuple):
    """What was derived from the projected keys that a module keeps."""

    keys: weakref.ref[Tensor]
    state: tuple[object, ...]
    table: Tensor | None
    keys_max: Tensor | None
    lifetime: Lifetime
    shared: weakref.ref[SharedNode] | None


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


class Step:
    """Computes the steps of one module, and uses again what it derived from unchanged tensors.

    Nothing in it is state: what the module keeps stays in the module's own attributes. Copies and
    pickles leave it out.
    """

    def __init__(self) -> None:
        self._raw = KeyCache()
        self._kept: _Kept | None = None
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

        Returns:
            Context (B,Tq,Dv), weights (B,Tq,Tk).
        """
        parameters = plain_parameters(layer) or {}
        w_k, bias = parameters.get("weight"), parameters.get("bias")
        general = inside is not TANH
        route = backends.decide(
            *(queries, keys, values, None, w_k, w_v, bias, w_v.shape[-1], 0.0),
            keys_projected=layer is None,
            general=general,
            masked=seen is not None and seen.dim() == 3,
        )
        if layer is None:
            projected = self._from_kept(route, keys, values, w_v)
        elif w_k is not None:
            projected = self._project(route, keys, w_k, bias, values, w_v)
        else:
            projected = ProjectedKeys(apply_layer(layer, keys), None, None)
        if not general:
            return attend_projected(route, queries, projected, values, w_v, seen, 0.0)
        inputs = (queries, projected.keys, w_v, values, seen, 0.0)
        if located is None:
            return attend_inside(route, *inputs, inside)
        return attend_location(route, *inputs, *located, inside)

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
        """
        route = backends.decide(
            *(queries, keys, keys, None, w_k, w_v, bias, w_v.shape[-1], 0.0), general=True
        )
        projected = self._project(route, keys, w_k, bias, keys, w_v).keys
        scores = scores_inside(route, queries, projected, w_v, TANH)
        return scores.to(queries.dtype), projected

    def _project(
        self,
        route: Route,
        keys: Tensor,
        w_k: Tensor,
        bias: Tensor | None,
        values: Tensor,
        w_v: Tensor,
    ) -> ProjectedKeys:
        """Projected keys, those of the step before if nothing has changed."""
        if not (route.reuse and route.backend == "cpu" and may_share(keys, w_k, bias)):
            return ProjectedKeys(linear(keys, w_k, bias), None, None)
        source = Source.of(keys, w_k, bias, route.backend, False)
        return self._raw.project(source, values, w_v, route.table, route.records)

    def _from_kept(self, route: Route, keys: Tensor, values: Tensor, w_v: Tensor) -> ProjectedKeys:
        """Keys that the module projected, and what was derived from them at the step before."""
        if not (route.table and may_share(keys, keys, None)):
            return ProjectedKeys(keys, None, None)
        state = (*_modes(keys), ops.fingerprint(keys, None, None))
        kept = self._kept
        if kept is None or kept.keys() is not keys or kept.state != state:
            _, table, keys_max, *_ = project(keys, True)
            freed = self._drop_with(keys)
            kept = _Kept(freed, state, table, keys_max, Lifetime(), None)
        self._kept = kept
        found = ProjectedKeys(keys, kept.table, kept.keys_max, None, kept.lifetime)
        if not route.records:
            return found
        shared = None if kept.shared is None else kept.shared()
        if shared is not None and shared.fits(values, w_v):
            return found._replace(shared=shared)
        found = found.share(values, w_v)
        if found.shared is not None:
            self._kept = kept._replace(shared=weakref.ref(found.shared))
        return found

    def _drop_with(self, keys: Tensor) -> weakref.ref[Tensor]:
        """A reference to keys that frees what was derived from them together with them."""
        this = weakref.ref(self)

        def drop(freed: weakref.ref[Tensor]) -> None:
            step = this()
            if step is not None and step._kept is not None and step._kept.keys is freed:
                step._kept = None

        return weakref.ref(keys, drop)

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
        state = (*_modes(weight), scale, ops.fingerprint(weight, None, bias)) if same else ()
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


def _modes(tensor: Tensor) -> tuple[Any, ...]:
    """What decides, beside its bytes, what may be done with what was derived from a tensor."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        checks.autocast_dtype(tensor.device),
        tensor.requires_grad,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
