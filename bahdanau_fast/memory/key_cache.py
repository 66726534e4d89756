"""Reuse of the key projection by an unchanged decoder loop.

A course decoder passes the same ``keys`` tensor at every step. The cache remembers the last
projection and returns it if the bytes of the keys, the weight and the bias have the same
fingerprint as when they were projected. PyTorch's version counters would not do: fused optimizers,
``.data``, NumPy, collectives and other processes write without incrementing them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from bahdanau_fast import checks
from bahdanau_fast.memory.projected_keys import ProjectedKeys
from bahdanau_fast.ops.attention import exp_keys, fingerprint
from bahdanau_fast.ops.projection import linear, shared_linear
from bahdanau_fast.ops.saved_tensors import (
    BackwardToken,
    PendingBackwards,
    SavedTensors,
    versions,
)
from bahdanau_fast.ops.shared_gradients import SharedNode


class Source(NamedTuple):
    """The inputs of a projection, ``keys @ weight.T + bias``; or keys that came projected."""

    keys: Tensor  # (B,Tk,Dk); (B,Tk,H) without a weight
    weight: Tensor | None  # (H,Dk)
    bias: Tensor | None  # (H,)
    # What has to be equal for the projection to be reused: sizes, modes, bytes.
    state: tuple[object, ...]

    @classmethod
    def of(
        cls,
        keys: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        backend: str,
        by_version: bool = False,
    ) -> Source:
        """Take the state before the projection, without bytes if nothing is derived from them."""
        tensors = [t for t in (keys, weight, bias) if t is not None]
        state: tuple[object, ...] = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            checks.autocast_dtype(keys.device),
            backend,
            [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors],
            # Identity, for the gradient: a leaf lives as long as a graph node that leads to it.
            [(id(t), t.output_nr) if t.requires_grad else None for t in tensors],
            [t._version for t in tensors] if by_version else fingerprint.now(keys, weight, bias),
        )
        return cls(keys, weight, bias, state)


def may_share(keys: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """True if calls may share one projection, and its node in the graph; not without a weight."""
    # Not under torch.func or forward mode, where tensors have no address or carry a tangent that
    # ends with its level.
    return _can_be_shared(keys, weight, bias, False) and not checks.in_transform()


def _can_be_shared(
    keys: Tensor, weight: Tensor | None, bias: Tensor | None, by_version: bool
) -> bool:
    """As :func:`may_share`, without a transform."""
    # Not in activation checkpointing (detected by its hooks on saved tensors), which runs a call
    # twice: both runs must save the same tensors. Tensors of inference mode have no version
    # counters, and autograd treats them differently.
    return (
        weight is not None
        and type(keys) in (Tensor, Parameter)
        and type(weight) in (Tensor, Parameter)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not (
            (by_version or torch.is_grad_enabled())
            and any(t is not None and t.is_inference() for t in (keys, weight, bias))
        )
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    state: tuple[object, ...]
    storage: weakref.ref[torch.UntypedStorage]  # of the keys; the entry is dropped with it
    # Weak with a graph, which holds the keys, and where the keys came projected.
    projected: Callable[[], Tensor | None]
    backwards: PendingBackwards | None  # None as long as no call was recorded
    saved: weakref.ref[SavedTensors] | None  # of the node in the graph
    table: Tensor | None = None
    keys_max: Tensor | None = None
    shared: weakref.ref[SharedNode] | None = None

    def is_of(self, source: Source) -> bool:
        """True if the entry is the projection of the source."""
        if self.state != source.state:
            return False
        if self.saved is None:
            return source.weight is not None or self.projected() is source.keys
        saved = self.saved()
        grad_fns = tuple(t.grad_fn for t in source[:3] if t is not None)
        return saved is not None and saved.is_current and saved.grad_fns == grad_fns


class KeyCache:
    """One slot: the projection of the keys of the last call."""

    __slots__ = ("__weakref__", "_entry", "_keys_repeat", "_last")

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        # The storage of the keys of the last call, and the versions of what projected them.
        self._last: tuple[weakref.ref[torch.UntypedStorage], list[int | None]] | None = None
        self._keys_repeat = True  # optimistic: take fingerprints until keys fail to come back

    def lookup_or_project(
        self,
        keys: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        values: Tensor,
        w_v: Tensor | None,
        *,
        backend: str,
        table: bool,
        records: bool,
        reads_table: bool,
    ) -> ProjectedKeys:
        """The projection of keys, cached or new; with a table once keys come again.

        No transform is at work. Without a weight the keys came projected, and the calls share what
        is derived from them; without a ``w_v`` they do not share their node.
        """
        source = self._source(keys, weight, bias, backend, weight is None and not table)
        if source is None:
            return ProjectedKeys(keys if weight is None else linear(keys, weight, bias))
        entry = self._entry  # read once: another thread may replace it
        # Counted before the lookup: a cached node then waits for this call's backward.
        token = None if entry is None or entry.backwards is None else entry.backwards.begin()
        cached = entry.projected() if entry is not None and entry.is_of(source) else None
        # A table pays for keys that come again; projected keys do.
        pays = cached is not None or weight is None
        if entry is None or cached is None:
            entry, cached, token = self._store(source, records)
        if table and pays and entry.table is None:
            exp_table, keys_max = exp_keys.overload(cached.detach(), torch.is_grad_enabled())
            entry = self._entry = replace(entry, table=exp_table, keys_max=keys_max)
        if records and entry.backwards is None:
            entry = self._entry = replace(entry, backwards=PendingBackwards())
        result = ProjectedKeys(cached, entry.table, entry.keys_max, None, entry.backwards, token)
        if w_v is None or not records:
            return result
        shared = None if entry.shared is None else entry.shared()
        if shared is not None and shared.fits(values, w_v):
            return result._replace(shared=shared)
        result = result.share(values, w_v, reads_table)
        if result.shared is not None:
            self._entry = replace(entry, shared=weakref.ref(result.shared))
        return result

    def _source(
        self,
        keys: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        backend: str,
        by_version: bool,
    ) -> Source | None:
        """What a projection depends on; None if it is not to be cached."""
        if not _can_be_shared(keys, keys if weight is None else weight, bias, by_version):
            return None
        # A fingerprint, which reads the keys once, is taken of keys that are likely to return: the
        # keys of the last call, unless a counted write came between; or other ones, if the keys
        # before them came more than once, as in a decoder's loop. A module whose keys come once, or
        # once in each step of an optimizer, pays for the first ones alone.
        if not by_version:
            storage, last, now = keys.untyped_storage(), self._last, versions((keys, weight, bias))
            again = last is not None and last[0]() is storage and last[1] == now
            expected, self._keys_repeat = again or self._keys_repeat, again
            if not again:
                self._last = weakref.ref(storage), now
            if not expected:
                return None
        return Source.of(keys, weight, bias, backend, by_version)

    def _store(self, source: Source, records: bool) -> tuple[_Entry, Tensor, BackwardToken | None]:
        """Project, and cache that until the keys are freed or the last backward is done."""
        self._entry = None
        keys, weight, bias, state = source
        backwards = PendingBackwards() if records else None
        token = None if backwards is None else backwards.begin()
        projected, saved = keys, None
        if weight is not None and backwards is not None:
            projected, saved = shared_linear(keys, weight, bias, backwards)
        elif weight is not None:
            projected = linear(keys, weight, bias)
        # The callback outlives this call in the autograd graph. It must not hold the cache or the
        # entry, which would keep that graph alive.
        this = weakref.ref(self)

        def drop(_: object = None) -> None:
            cache = this()
            entry = None if cache is None else cache._entry
            if cache is not None and entry is not None and entry.state is state:
                cache._entry = None

        if saved is not None:
            saved.on_release = drop
        # Of the storage, since tensors with weak references cannot be swapped.
        is_held = saved is None and weight is not None
        entry = self._entry = _Entry(
            state,
            weakref.ref(keys.untyped_storage(), drop),
            (lambda: projected) if is_held else weakref.ref(projected),
            backwards,
            None if saved is None else weakref.ref(saved),
        )
        return entry, projected, token
