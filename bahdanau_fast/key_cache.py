"""Reuse of the key projection by an unchanged decoder loop.

A course decoder passes the same ``keys`` tensor at every step. The cache remembers the last
projection and hands it out again while nothing it depends on has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, transforms
from bahdanau_fast.deferred import Shared
from bahdanau_fast.layers import plain_weight
from bahdanau_fast.memory import ProjectedKeys, project

__all__ = ["KeyCache"]


@dataclass(frozen=True, slots=True)
class _Entry:
    token: object
    keys: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]
    state: tuple[object, ...]
    projected: Callable[[], Tensor | None]  # weak in the graph, which holds the keys in turn
    table: Tensor | None
    keys_max: Tensor | None
    shared: Callable[[], Shared | None] | None


def _state(keys: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    """Everything but identity that a projection depends on."""
    return (
        keys._version,
        keys.data_ptr(),
        keys.requires_grad,
        weight._version,
        weight.data_ptr(),
        weight.requires_grad,
        None if bias is None else (id(bias), bias._version, bias.data_ptr(), bias.requires_grad),
        torch.is_grad_enabled(),
        transforms.autocast_dtype(keys.device),
        backends.resolve(keys.device, dtype=keys.dtype),
    )


def _is_transformed() -> bool:
    """Whether the call is one of several runs of the same code, or of code on wrapped tensors.

    Activation checkpointing (seen by its hooks on saved tensors) runs a call twice, and both runs
    must save the same tensors, of which a reused projection saves fewer. The tensors of
    ``torch.func`` have no address, those of forward mode carry a tangent that ends with its level.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or transforms.active()


class KeyCache:
    """One slot: the projection of the keys of the last call."""

    __slots__ = ("__weakref__", "_entry")

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def find(
        self, keys: Tensor, layer: nn.Module | None, bias: Tensor | None, queries_len: int
    ) -> ProjectedKeys | None:
        """The projection of ``keys`` when it is still the right one, else None."""
        entry = self._entry  # read once: another thread may replace it
        if entry is None or entry.keys() is not keys:
            return None
        weight = plain_weight(layer)
        if weight is None or entry.weight() is not weight or keys.is_inference():
            return None
        own = entry.projected()
        if own is None or _is_transformed() or entry.state != _state(keys, weight, bias):
            return None
        if entry.table is None:  # asked for again: from now on a table pays
            made = project(own, backends.resolve(keys.device, dtype=keys.dtype), queries_len)
            entry = self._entry = replace(entry, table=made.table, keys_max=made.keys_max)
        return ProjectedKeys(own, entry.table, entry.keys_max)

    def share(self, projected: ProjectedKeys, values: Tensor, w_v: Tensor) -> ProjectedKeys:
        """Let the calls on a projection that was found share one node of the autograd graph.

        Args:
            projected: what :meth:`find` gave.
            values: (B,Tk,Dv) of the call.
            w_v: (1,H) or (H,) of the call.
        """
        entry = self._entry
        if entry is None or entry.projected() is not projected.keys:
            return projected
        shared = None if entry.shared is None else entry.shared()
        if shared is not None:
            return projected._replace(shared=shared)
        projected = projected.share(values, w_v)
        if projected.shared is not None:
            self._entry = replace(entry, shared=projected.shared.weakly())
        return projected

    def store(
        self,
        keys: Tensor,
        layer: nn.Module | None,
        bias: Tensor | None,
        own: Tensor,
    ) -> None:
        """Remember the projection ``own`` until ``keys`` dies or a backward runs through it."""
        self._entry = None
        weight = plain_weight(layer)
        # Inference tensors count no versions: a change in place would go unseen.
        if weight is None or keys.is_inference() or weight.is_inference() or _is_transformed():
            return
        # The callback outlives this call inside the autograd graph: it must hold neither the cache
        # nor the entry, which would keep that same graph alive.
        this, token = weakref.ref(self), object()

        def drop(_: object) -> None:
            cache = this()
            if cache is not None and cache._entry is not None and cache._entry.token is token:
                cache._entry = None

        entry = _Entry(
            token,
            weakref.ref(keys, drop),
            weakref.ref(weight),
            _state(keys, weight, bias),
            (lambda: own) if not own.requires_grad else weakref.ref(own),
            None,
            None,
            None,
        )
        if own.requires_grad:
            own.register_hook(drop)
        self._entry = entry
