"""Projected keys, computed once for all steps of a decoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory.room import Room, append_rows
from bahdanau_fast.memory.shapes import Shape, queries_as_rows, spread_queries, steps_as_rows
from bahdanau_fast.ops import sharding
from bahdanau_fast.ops.attention import exp_keys, fingerprint
from bahdanau_fast.ops.saved_tensors import BackwardToken, PendingBackwards
from bahdanau_fast.ops.shared_gradients import SharedNode, share


class ProjectedKeys(NamedTuple):
    """Projected keys, and what is derived from them."""

    keys: Tensor  # (B,Tk,H), W_k k; in the autograd graph
    table: Tensor | None = None  # (B,Tk,H rounded up), exponentials for the C++ kernels
    keys_max: Tensor | None = None  # (B,), max|W_k k| per row
    shared: SharedNode | None = None  # the node of the graph that calls with these keys share
    backwards: PendingBackwards | None = None  # of the nodes that these calls share
    # As long as it exists another of these calls may come, and its backward.
    token: BackwardToken | None = None

    def share(self, values: Tensor, w_v: Tensor, reads_table: bool = True) -> ProjectedKeys:
        """The same, for calls that share one node; those that read a table need one, too."""
        if torch.compiler.is_compiling() or (reads_table and self.table is None):
            return self  # nothing is shared in a graph, by another backend, or of small sizes
        backwards = self.backwards or PendingBackwards()
        shared = share(*self[:3], values, w_v, backwards)
        if shared is None:
            return self
        token = self.token or backwards.begin()
        return self._replace(shared=shared, backwards=backwards, token=token)


def project(projected_keys: Tensor, table: bool) -> ProjectedKeys:
    """Prepare ``W_k k`` (B,Tk,H); with a table where :func:`backends.keeps_table` says so."""
    if not table:
        return ProjectedKeys(projected_keys)
    if type(projected_keys) is not Tensor:
        sharding.register_for(projected_keys)
    exp_table, keys_max = exp_keys.overload(projected_keys.detach(), torch.is_grad_enabled())
    return ProjectedKeys(projected_keys, exp_table, keys_max)


class Maker(NamedTuple):
    """The module of a memory, and what its key layer was then, for ``attend`` to compare."""

    module: nn.Module
    versions: tuple[object, ...] | None = None  # with addresses, of the layer's weight and bias
    sample: Tensor | None = None  # some rows of the weight, compared in every call
    sample_bytes: tuple[int, int] = (0, 0)  # fingerprint of sample and bias
    all_bytes: tuple[int, int] = (0, 0)  # fingerprint of weight and bias

    @classmethod
    def of(cls, module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Maker:
        """Take the fingerprints; with a weight (of a plain layer, for the C++ kernels) only."""
        if weight is None:
            return cls(module)
        sample = weight.detach()[:: max(1, weight.shape[0] // SAMPLED_ROWS)]
        return cls(
            module,
            _versions(weight, bias),
            sample,
            fingerprint.now(sample, None, bias),
            fingerprint.now(weight, None, bias),
        )

    def has_changed(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """True if the key layer, now with these, has changed; False without a sample."""
        if weight is None or self.sample is None:
            return False
        if _versions(weight, bias) == self.versions:
            return bool(fingerprint.now(self.sample, None, bias) != self.sample_bytes)
        return bool(fingerprint.now(weight, None, bias) != self.all_bytes)


def _versions(weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    tensors = (weight,) if bias is None else (weight, bias)
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


# Rows of W_k that a call on a memory compares: an optimizer step changes all rows.
SAMPLED_ROWS = 8


@dataclass(frozen=True, repr=False, eq=False)
class Memory:
    """A source that decoder steps attend to: projected keys, values and lengths.

    The result of :meth:`AdditiveAttention.memory`, for :meth:`AdditiveAttention.attend` of the same
    module. Beams are queries against one memory: nothing in it is copied per beam. ``memory[rows]``
    selects batch rows, e.g. those of unfinished sentences; :meth:`append` gives one with more keys.

    Keys may have any number of batch dimensions; a memory holds them as one, B, their product.

    A memory holds the projection of the keys as they were. After a change of the keys or of the key
    layer (an optimizer step, loaded weights), make a new memory. ``attend`` raises if it detects
    a change of the key layer: on the CPU it compares a fingerprint of some rows of ``W_k``, and of
    all rows if PyTorch's version counter has changed. Values and lengths are referenced, not
    copied.

    Attributes:
        projected: the projected keys.
        values: (B,Tk,Dv).
        valid_lens: None, (B,) or (B,Tq).
        mask: None, or bool (B,1,Tk) or (B,Tq,Tk); with lengths, both hold.
        maker: the module that made the memory, and its key layer; None after unpickling.
        batch: the batch dimensions of the keys; None where that is (B,).
    """

    projected: ProjectedKeys
    values: Tensor
    valid_lens: Tensor | None = None
    mask: Tensor | None = None
    maker: Maker | None = None
    batch: tuple[int, ...] | None = None
    _room: Room | None = None

    def append(self, keys: Tensor, values: Tensor | None = None) -> Memory:
        """The memory with more keys at the end, of which only these are projected.

        A decoder attends to its states so far by appending the newest one at every step. This
        memory stays as it is, and may be appended to again. Rows are written behind those of this
        memory, into buffers that double when they are full: T steps copy O(T) rows and keep as
        many, with gradients too, since nothing is written to rows that a memory has. So nobody else
        may write to its values. Compiled code, exports and transforms copy all rows at every step,
        as ``torch.cat`` does. A table of exponentials, which ``memory()`` computes on the CPU, is
        left out.

        Args:
            keys: (B,n,Dk), or a state (B,Dk), which is one key; B as the memory's keys have it.
            values: (B,n,Dv), or (B,Dv); default: the keys.

        Returns:
            The memory to use next. Where this one has a mask, queries may look at all new keys.

        Raises:
            TypeError, ValueError: sizes, dtype or device are not those of the memory; a memory with
                ``valid_lens``; a copy, which has no module.
        """
        if self.maker is None:
            checks.reject(ValueError, "memory", "be of a module, to be appended to", "a copy")
        if self.valid_lens is not None:
            need = "have a mask, torch.arange(Tk) < lens[:, None], to be appended to"
            checks.reject(ValueError, "memory", need, f"valid_lens {tuple(self.valid_lens.shape)}")
        module: Any = self.maker.module
        keys, values = self._checked_rows(keys, values)
        backwards = None if torch.compiler.is_compiling() else self.projected.backwards
        rows, more = (self.projected.keys, self.values), (module._keys(keys, backwards), values)
        for name, x, y in zip(("keys", "values"), rows, more, strict=True):
            if y.shape[2] != x.shape[2]:
                need = f"have the feature size of the memory, {x.shape[2]}"
                checks.reject(ValueError, name, need, tuple(y.shape))
        (all_keys, all_values), room = append_rows(self._room, rows, more)
        token = None if backwards is None else backwards.begin()
        projected = ProjectedKeys(all_keys, backwards=backwards, token=token)
        mask = None if self.mask is None else F.pad(self.mask, (0, keys.shape[1]), value=True)
        return replace(self, projected=projected, values=all_values, mask=mask, _room=room)

    def _checked_rows(self, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values to append, in three dimensions."""
        batch = (self.values.shape[0],) if self.batch is None else self.batch

        def as_rows(name: str, x: Any) -> Any:
            return steps_as_rows(name, x, batch, "the memory")[0] if isinstance(x, Tensor) else x

        keys = as_rows("keys", keys)
        values = keys if values is None else as_rows("values", values)
        checks.keys_and_values(keys, values, None)
        checks.same_kind("keys", keys, "the memory", self.values)
        return keys, values

    def for_queries(
        self, queries: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Shape | None]:
        """Queries (B,Tq,Dq), what both masks let them see, the shape of results if another."""
        keys, shape = self.projected.keys, None
        if isinstance(queries, Tensor):
            batch = (keys.shape[0],) if self.batch is None else self.batch
            keys_len, of, state = keys.shape[1], "the memory", queries.dim() in (1, 2)
            queries = spread_queries(queries, batch, keys_len)
            if self.batch is not None or state:
                queries, mask, shape = queries_as_rows(queries, mask, batch, keys_len, of)
        checks.queries_for(queries, keys, self.valid_lens, self.mask)
        if mask is None:
            return queries, self.mask, shape
        mask = checks.as_mask(mask, queries.shape[1], keys)
        return queries, mask if self.mask is None else mask & self.mask, shape

    def __getitem__(self, rows: Any) -> Memory:
        """The memory of some batch rows, in the order of ``rows``.

        Args:
            rows: a slice, a list or a tensor, of numbers or booleans, along the batch, or along the
                first of several batch dimensions.

        Raises:
            TypeError: another type; an int would remove the batch dimension.
            ValueError: keys without a batch dimension.
        """
        if isinstance(rows, list):
            dtype = None if rows else torch.long
            rows = torch.tensor(rows, dtype=dtype, device=self.values.device)
        if not (isinstance(rows, slice) or (isinstance(rows, Tensor) and rows.dim() == 1)):
            checks.reject(
                TypeError, "rows", "be a slice, a list or a tensor of one dimension", repr(rows)
            )
        batch = self.batch
        if batch == ():
            checks.reject(ValueError, "memory", "have a batch dimension to be indexed", "none")
        if batch is not None:
            numbers = torch.arange(len(self.values), device=self.values.device).view(batch)[rows]
            rows, batch = numbers.flatten(), tuple(numbers.shape)
        tensors = (*self.projected[:3], self.values, self.valid_lens, self.mask)
        selected: list[Any] = [None if x is None else x[rows] for x in tensors]
        keys, *derived, values, lens, mask = selected
        derived = [None if x is None else x.contiguous() for x in derived]  # of a slice with a step
        fields = {"valid_lens": lens, "mask": mask, "batch": batch}
        return self._with(ProjectedKeys(keys, *derived), values, **fields)

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """The memory on another device, or in another floating dtype; as :meth:`Tensor.to`."""
        keys = self.projected.keys.to(*args, **kwargs)
        values = self.values.to(*args, **kwargs)
        if keys is self.projected.keys and values is self.values:
            return self
        table = self.projected.table is not None and keys.is_cpu
        visible = {"valid_lens": self.valid_lens, "mask": self.mask}
        fields = {name: None if x is None else x.to(values.device) for name, x in visible.items()}
        return self._with(project(keys, table), values, **fields)

    def detach(self) -> Memory:
        """The memory outside of the autograd graph; as :meth:`Tensor.detach`."""
        keys, table, keys_max = self.projected[:3]
        projected = ProjectedKeys(keys.detach(), table, keys_max)
        return replace(self, projected=projected, values=self.values.detach())

    def _with(self, projected: ProjectedKeys, values: Tensor, **fields: Any) -> Memory:
        shared = self.projected.shared
        if shared is not None:
            projected = projected.share(values, shared.w_v)
        return replace(self, projected=projected, values=values, _room=None, **fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        # Tensors are copied without their autograd graph, as attention_weights are in modules.
        maker = self.maker
        if maker is not None and id(maker.module) in memo:
            maker = None  # copied too: its key layer is another one with the same weights
        return Memory(**{**copy.deepcopy(self.__getstate__(), memo), "maker": maker})

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self.detach()), "maker": None, "_room": None}

    def __repr__(self) -> str:
        keys = self.projected.keys
        rows, keys_len, hidden = keys.shape
        batch = rows if self.batch is None else self.batch
        lens = None if self.valid_lens is None else tuple(self.valid_lens.shape)
        mask = "" if self.mask is None else f"mask={tuple(self.mask.shape)}, "
        return (
            f"Memory(B={batch}, Tk={keys_len}, H={hidden}, Dv={self.values.shape[2]}, "
            f"valid_lens={lens}, {mask}dtype={keys.dtype}, device={str(keys.device)!r})"
        )
