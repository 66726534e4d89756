"""Projected keys, computed once for all steps of a decoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.memory.shapes import Shape, queries_as_rows
from bahdanau_fast.ops import sharding
from bahdanau_fast.ops.attention import exp_keys, fingerprint
from bahdanau_fast.ops.saved_tensors import BackwardToken, PendingBackwards
from bahdanau_fast.ops.shared_gradients import SharedNode, share

__all__ = ["Maker", "Memory", "ProjectedKeys", "project"]


class ProjectedKeys(NamedTuple):
    """Projected keys, and what is derived from them.

    Attributes:
        keys: (B,Tk,H), ``W_k k``; in the autograd graph.
        table: (B,Tk,H rounded up), exponentials for the C++ kernels, or None.
        keys_max: (B,), max|W_k k| per row, or None.
        shared: the node of the autograd graph that calls with these keys share, or None.
        backwards: of the nodes that these calls share, or None.
        token: as long as it exists another of these calls may come, and its backward.
    """

    keys: Tensor
    table: Tensor | None
    keys_max: Tensor | None
    shared: SharedNode | None = None
    backwards: PendingBackwards | None = None
    token: BackwardToken | None = None

    def share(self, values: Tensor, w_v: Tensor, reads_table: bool = True) -> ProjectedKeys:
        """The same, for calls that share one node of the autograd graph.

        Args:
            values: (B,Tk,Dv) of those calls.
            w_v: (1,H) or (H,) of those calls.
            reads_table: those calls read the table; where there is none, they do not share.
        """
        if torch.compiler.is_compiling() or (reads_table and self.table is None):
            return self  # nothing is shared in a graph, by another backend, or of small sizes
        backwards = self.backwards or PendingBackwards()
        shared = share(*self[:3], values, w_v, backwards)
        if shared is None:
            return self
        token = self.token or backwards.begin()
        return self._replace(shared=shared, backwards=backwards, token=token)


def project(projected_keys: Tensor, table: bool) -> ProjectedKeys:
    """Prepare ``W_k k`` for the calls to come.

    Args:
        projected_keys: (B,Tk,H).
        table: make the table of exponentials, as :func:`backends.keeps_table` says.
    """
    if not table:
        return ProjectedKeys(projected_keys, None, None)
    if type(projected_keys) is not Tensor:
        sharding.register_for(projected_keys)
    made = exp_keys.overload(projected_keys.detach(), torch.is_grad_enabled())
    return ProjectedKeys(projected_keys, *made)


class Maker(NamedTuple):
    """The module and key layer that made a memory, for ``attend`` to compare.

    Attributes:
        module: whose ``memory`` made it.
        seen: address and version of the key layer's weight and bias; None if unknown (a modified
            layer, another backend).
        sample: some rows of the weight, compared in each call.
        sample_bytes: fingerprint of sample and bias.
        all_bytes: fingerprint of weight and bias.
    """

    module: nn.Module
    seen: tuple[object, ...] | None = None
    sample: Tensor | None = None
    sample_bytes: tuple[int, int] = (0, 0)
    all_bytes: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Maker:
        """Take the fingerprints; without a weight, only the module.

        Args:
            module: whose ``memory`` it is.
            weight: (H,Dk) of a plain key layer served by the C++ kernels, or None.
            bias: (H,) or None.
        """
        if weight is None:
            return cls(module)
        sample = weight.detach()[:: max(1, weight.shape[0] // SAMPLED_ROWS)]
        return cls(
            module,
            _seen(weight, bias),
            sample,
            fingerprint.now(sample, None, bias),
            fingerprint.now(weight, None, bias),
        )

    def has_changed(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """True if the key layer has changed.

        Args:
            weight: (H,Dk) of the key layer now, or None if unknown.
            bias: (H,) or None.
        """
        if weight is None or self.sample is None:
            return False
        if _seen(weight, bias) == self.seen:
            return bool(fingerprint.now(self.sample, None, bias) != self.sample_bytes)
        return bool(fingerprint.now(weight, None, bias) != self.all_bytes)


def _seen(weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    tensors = (weight,) if bias is None else (weight, bias)
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


# Rows of W_k that each call on a memory compares: an optimizer step changes all rows.
SAMPLED_ROWS = 8


@dataclass(frozen=True, repr=False, eq=False)
class Memory:
    """A source that decoder steps attend to: projected keys, values and lengths.

    Made by :meth:`AdditiveAttention.memory`, read by :meth:`AdditiveAttention.attend` of the same
    module. Beams are queries against one memory: nothing in it is copied per beam. ``memory[rows]``
    selects batch rows, e.g. those of unfinished sentences.

    Keys may have any number of batch dimensions; a memory holds them as one, B, their product.

    A memory holds the projection of the keys at the time it was made. After a change of the keys or
    of the key layer (an optimizer step, loaded weights), make a new memory. ``attend`` raises if it
    detects a change of the key layer: on the CPU it compares a fingerprint of some rows of
    ``W_k``, and of all rows if PyTorch's version counter has changed. Values and lengths are
    referenced, not copied.

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

    def queries_as_rows(
        self, queries: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Shape | None]:
        """Queries of the keys as they were given, for the keys as they are held.

        Args:
            queries: (*batch,Tq,Dq), or a state (*batch,Dq).
            mask: None, (*batch,Tk) or (*batch,Tq,Tk).

        Returns:
            Queries (B,Tq,Dq), mask (B,Tk) or (B,Tq,Tk), and the shape of the results; unchanged,
            with None for the shape, if they are (B,Tq,Dq) already, or no tensor.

        Raises:
            ValueError: other batch dimensions than those of the keys.
        """
        if not isinstance(queries, Tensor) or (self.batch is None and queries.dim() != 2):
            return queries, mask, None
        rows, keys_len, _ = self.projected.keys.shape
        batch = (rows,) if self.batch is None else self.batch
        return queries_as_rows(queries, mask, batch, keys_len, "the memory")

    def joined_mask(self, mask: Tensor | None, queries: Tensor) -> Tensor | None:
        """What a call's own mask leaves of the memory's; bool (B,1,Tk) or (B,Tq,Tk), or None.

        Args:
            mask: bool (B,Tk), (B,1,Tk) or (B,Tq,Tk), or None.
            queries: (B,Tq,...) of the call.

        Raises:
            TypeError, ValueError: another mask.
        """
        if mask is None:
            return self.mask
        mask = checks.as_mask(mask, queries, self.projected.keys)
        return mask if self.mask is None else mask & self.mask

    def __getitem__(self, rows: Any) -> Memory:
        """The memory of some batch rows, in the order given.

        Args:
            rows: a slice, a list or a tensor, of numbers or booleans, along the batch, or along the
                first of several batch dimensions.

        Raises:
            TypeError: another type; an int would remove the batch dimension.
            ValueError: keys without a batch dimension.
        """
        if isinstance(rows, list):
            rows = torch.tensor(rows, device=self.values.device)
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
        keys, table, keys_max = self.projected[:3]
        projected = ProjectedKeys(
            keys[rows],
            None if table is None else table[rows],
            None if keys_max is None else keys_max[rows],
        )
        lens, mask = (None if x is None else x[rows] for x in (self.valid_lens, self.mask))
        return self._like(projected, self.values[rows], lens, mask, batch)

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """The memory on another device, or in another floating dtype; as :meth:`Tensor.to`."""
        keys = self.projected.keys.to(*args, **kwargs)
        values = self.values.to(*args, **kwargs)
        seen = (self.valid_lens, self.mask)
        lens, mask = (None if x is None else x.to(values.device) for x in seen)
        if keys is self.projected.keys and values is self.values:
            return self
        table = self.projected.table is not None and keys.is_cpu
        return self._like(project(keys, table), values, lens, mask, self.batch)

    def detach(self) -> Memory:
        """The memory outside of the autograd graph; as :meth:`Tensor.detach`."""
        keys, table, keys_max = self.projected[:3]
        return replace(
            self,
            projected=ProjectedKeys(keys.detach(), table, keys_max),
            values=self.values.detach(),
        )

    def _like(
        self,
        projected: ProjectedKeys,
        values: Tensor,
        valid_lens: Tensor | None,
        mask: Tensor | None,
        batch: tuple[int, ...] | None,
    ) -> Memory:
        shared = self.projected.shared
        if shared is not None:
            projected = projected.share(values, shared.w_v)
        return Memory(projected, values, valid_lens, mask, self.maker, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        # Tensors are copied without their autograd graph, as attention_weights are in modules.
        maker = self.maker
        if maker is not None and id(maker.module) in memo:
            maker = None  # copied too: its key layer is another one with the same weights
        parts = copy.deepcopy(self.__getstate__(), memo)
        other = Memory.__new__(Memory)
        other.__setstate__(parts)
        object.__setattr__(other, "maker", maker)
        return other

    def __getstate__(self) -> dict[str, Any]:
        keys, table, keys_max = self.projected[:3]
        return {
            "keys": keys.detach(),
            "table": table,
            "keys_max": keys_max,
            "values": self.values.detach(),
            "valid_lens": self.valid_lens,
            "mask": self.mask,
            "batch": self.batch,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        projected = ProjectedKeys(state["keys"], state["table"], state["keys_max"])
        others = {name: state[name] for name in ("values", "valid_lens", "mask", "batch")}
        for name, value in {"projected": projected, "maker": None, **others}.items():
            object.__setattr__(self, name, value)

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
