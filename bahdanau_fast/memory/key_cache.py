"""Reuse of the key projection by an unchanged decoder loop.

A course decoder passes the same ``keys`` tensor at every step. The cache remembers the last
projection and hands it out again to a call that it is right for: not because nothing is known to
have changed (fused optimizers, ``.data``, NumPy, collectives and other processes write without
PyTorch's version counters noticing), but because the bytes of the keys, of the weight and of the
bias have the same fingerprint as when they were projected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from bahdanau_fast import ops
from bahdanau_fast.memory import ProjectedKeys, project
from bahdanau_fast.ops import torch_state
from bahdanau_fast.ops.lifetime import Held, Lifetime
from bahdanau_fast.ops.projection import shared_linear
from bahdanau_fast.ops.shared_gradients import SharedNode

__all__ = ["KeyCache", "Source", "may_share"]


class Source(NamedTuple):
    """What a projection is made of: ``keys @ weight.T + bias``.

    Attributes:
        keys: (B,Tk,Dk).
        weight: (H,Dk).
        bias: (H,) or None.
        backend: that will serve the call.
        trusted: take version counters for it, not bytes.
        state: what has to be the same for the projection to be: sizes, modes, bytes.
    """

    keys: Tensor
    weight: Tensor
    bias: Tensor | None
    backend: str
    trusted: bool
    state: tuple[object, ...]

    @classmethod
    def of(
        cls, keys: Tensor, weight: Tensor, bias: Tensor | None, backend: str, trusted: bool
    ) -> Source:
        """Take the state, before anything is projected.

        Args:
            keys: (B,Tk,Dk).
            weight: (H,Dk).
            bias: (H,) or None.
            backend: that will serve the call.
            trusted: take version counters for it, not bytes.
        """
        tensors = (keys, weight) if bias is None else (keys, weight, bias)
        state: tuple[object, ...] = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch_state.autocast_dtype(keys.device),
            backend,
            *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors),
            # Whose gradient it is: a leaf lives as long as a node of the graph that leads to it.
            *((id(t), t.output_nr) if trusted or t.requires_grad else None for t in tensors),
            tuple(t._version for t in tensors) if trusted else ops.fingerprint(keys, weight, bias),
        )
        return cls(keys, weight, bias, backend, trusted, state)

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, weight and, if there is one, bias."""
        return (self.keys, self.weight, *(() if self.bias is None else (self.bias,)))

    def grad_fns(self) -> tuple[Any, ...]:
        """Nodes of the graph that their gradients go to; None for leaves."""
        return tuple(tensor.grad_fn for tensor in self.tensors())


def may_share(
    keys: Tensor, weight: Tensor | None, bias: Tensor | None, trusted: bool = False
) -> bool:
    """Whether calls may share one projection, and one node of the graph for it.

    Not in activation checkpointing (seen by its hooks on saved tensors), which runs a call twice:
    both runs must save the same tensors. Not under ``torch.func`` or forward mode, where tensors
    have no address or carry a tangent that ends with its level. Tensors of inference mode have no
    versions to trust, and autograd treats them in its own ways.

    Args:
        keys: (B,Tk,Dk).
        weight: (H,Dk), or None where the key layer is more than its weight.
        bias: (H,) or None.
        trusted: by versions, not by bytes.
    """
    return (
        weight is not None
        and type(keys) is Tensor
        and type(weight) in (Tensor, Parameter)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch_state.active()
        and not (
            (trusted or torch.is_grad_enabled())
            and any(t is not None and t.is_inference() for t in (keys, weight, bias))
        )
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    state: tuple[object, ...]
    trusted: tuple[Tensor | None, ...]  # weight and bias, where their bytes are not looked at
    storage: weakref.ref[torch.UntypedStorage]  # of the keys: with them goes the entry
    projected: Callable[[], Tensor | None]  # weak in the graph, which holds the keys in turn
    lifetime: Lifetime
    held: weakref.ref[Held] | None  # of the node in the graph
    table: Tensor | None = None
    keys_max: Tensor | None = None
    shared: weakref.ref[SharedNode] | None = None

    def is_of(self, source: Source) -> bool:
        """Whether the projection is that of the source."""
        if self.state != source.state:
            return False
        if source.trusted and any(
            known is not now
            for known, now in zip(self.trusted, (source.weight, source.bias), strict=True)
        ):
            return False
        if self.held is None:
            return True
        held = self.held()
        return held is not None and held.is_current and held.grad_fns == source.grad_fns()


class KeyCache:
    """One slot: the projection of the keys of the last call."""

    __slots__ = ("__weakref__", "_entry")

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def project(
        self, source: Source, values: Tensor, w_v: Tensor | None, queries_len: int
    ) -> ProjectedKeys:
        """The projection of a source: the one that is remembered, or one to remember.

        Args:
            source: of the call.
            values: (B,Tk,Dv) of the call.
            w_v: (1,H) of the call, or None where it is not known.
            queries_len: Tq.
        """
        entry = self._entry  # read once: another thread may replace it
        own = entry.projected() if entry is not None and entry.is_of(source) else None
        if entry is None or own is None:
            return self._store(source)
        if entry.table is None:  # asked for again: from now on a table pays
            made = project(own, source.backend, queries_len)
            entry = self._entry = replace(entry, table=made.table, keys_max=made.keys_max)
        found = ProjectedKeys(own, entry.table, entry.keys_max, None, entry.lifetime)
        if w_v is None:
            return found
        shared = None if entry.shared is None else entry.shared()
        if shared is not None and shared.fits(values, w_v):
            return found._replace(shared=shared)
        found = found.share(values, w_v)
        if found.shared is not None:
            self._entry = replace(entry, shared=weakref.ref(found.shared))
        return found

    def _store(self, source: Source) -> ProjectedKeys:
        """Project, and remember that until the keys die or the last backward has run through it."""
        self._entry = None
        lifetime = Lifetime()
        keys, weight, bias, _, _, state = source
        own, held = shared_linear(keys, weight, bias, lifetime)
        # The callback outlives this call inside the autograd graph: it must hold neither the cache
        # nor the entry, which would keep that same graph alive.
        this = weakref.ref(self)

        def drop(_: object = None) -> None:
            cache = this()
            entry = None if cache is None else cache._entry
            if cache is not None and entry is not None and entry.lifetime is lifetime:
                cache._entry = None

        if held is not None:
            held.on_release = drop
        # Of the storage, since tensors that are referred to weakly cannot be swapped.
        self._entry = _Entry(
            state,
            (weight, bias) if source.trusted else (),
            weakref.ref(keys.untyped_storage(), drop),
            (lambda: own) if held is None else weakref.ref(own),
            lifetime,
            None if held is None else weakref.ref(held),
        )
        return ProjectedKeys(own, None, None, None, lifetime)
