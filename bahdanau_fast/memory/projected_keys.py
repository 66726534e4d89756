"""Projected keys, kept for as many decoder steps as look at them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bahdanau_fast import checks, limits, ops
from bahdanau_fast.backends.route import keeps_table
from bahdanau_fast.ops.lifetime import Due, Lifetime
from bahdanau_fast.ops.shared_gradients import SharedNode, share

__all__ = ["Maker", "Memory", "ProjectedKeys", "project"]


class ProjectedKeys(NamedTuple):
    """What one projection of the keys leaves behind.

    Attributes:
        keys: (B,Tk,H), ``W_k k``; in the autograd graph.
        table: (B,Tk,H rounded up), the exponentials the C++ kernels read, or None.
        keys_max: (B,), max|W_k k| per row, or None.
        shared: the node of the autograd graph that calls on them share, or None.
        lifetime: of the nodes that calls on them share, or None.
    """

    keys: Tensor
    table: Tensor | None
    keys_max: Tensor | None
    shared: SharedNode | None = None
    lifetime: Lifetime | None = None

    def share(self, values: Tensor, w_v: Tensor) -> ProjectedKeys:
        """The same, for calls that share one node of the autograd graph.

        Args:
            values: (B,Tk,Dv) of those calls.
            w_v: (1,H) or (H,) of those calls.
        """
        if self.table is None:  # another backend's, or too small to be worth it
            return self
        lifetime = self.lifetime or Lifetime()
        shared = share(*self[:3], values, w_v, lifetime)
        return self._replace(shared=shared, lifetime=lifetime)


def project(projected_keys: Tensor, backend: str, queries_len: int = 1) -> ProjectedKeys:
    """Prepare ``W_k k`` for a backend.

    Args:
        projected_keys: (B,Tk,H).
        backend: a name from :data:`backends.NAMES`.
        queries_len: Tq of the calls to come.
    """
    if backend != "cpu" or torch.compiler.is_exporting():  # its precision goes by the size
        return ProjectedKeys(projected_keys, None, None)
    if not keeps_table(projected_keys.numel(), queries_len, limits.LIMITS):
        return ProjectedKeys(projected_keys, None, None)
    return ProjectedKeys(projected_keys, *ops.exp_keys(projected_keys))


class Maker(NamedTuple):
    """What a memory was made with, for ``attend`` to see that it is still the same.

    Attributes:
        module: whose ``memory`` made it.
        seen: address and version of the weight and bias of the key layer, then; None where they
            cannot be seen (a layer that is more than its weight, another backend).
        sample: some rows of the weight, looked at in each call.
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
        """Take the fingerprints; of the module alone where there is no weight to see.

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
            ops.fingerprint(sample, None, bias),
            ops.fingerprint(weight, None, bias),
        )

    def has_changed(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether the key layer is seen to be another one now.

        Args:
            weight: (H,Dk) of the key layer now, or None where it cannot be seen.
            bias: (H,) or None.
        """
        if weight is None or self.sample is None:
            return False
        if _seen(weight, bias) == self.seen:
            return ops.fingerprint(self.sample, None, bias) != self.sample_bytes
        return ops.fingerprint(weight, None, bias) != self.all_bytes


def _seen(weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    tensors = (weight,) if bias is None else (weight, bias)
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


# Rows of W_k that each call on a memory looks at: an optimizer step changes them all.
SAMPLED_ROWS = 8


@dataclass(frozen=True, repr=False, eq=False)
class Memory:
    """A source that decoder steps look at: projected keys, values and lengths.

    Made by :meth:`AdditiveAttention.memory`, read by :meth:`AdditiveAttention.attend` of the same
    module. Beams are queries against one memory: nothing in it is copied per beam. ``memory[rows]``
    keeps some batch rows, those of the sentences that are not finished, say.

    A memory holds what the key layer made of the keys when it was made. Later changes of the keys
    or of the key layer (an optimizer step, loaded weights) are not in it: make another memory then.
    ``attend`` raises where it sees that the key layer has changed: on the CPU it compares a
    fingerprint of some rows of ``W_k``, and of all of it once PyTorch's version counter has moved.
    Values and lengths are held as they are, not copied.

    Attributes:
        projected: the keys after ``W_k``.
        values: (B,Tk,Dv).
        valid_lens: None, (B,) or (B,Tq).
        maker: the module that made it and its key layer then; None after unpickling.
    """

    projected: ProjectedKeys
    values: Tensor
    valid_lens: Tensor | None = None
    maker: Maker | None = None
    # While there is a memory, there may be another backward through what its calls share.
    _due: Due | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.projected.lifetime is not None:
            object.__setattr__(self, "_due", self.projected.lifetime.begin())

    def __getitem__(self, rows: Any) -> Memory:
        """The memory of some batch rows, in the order given.

        Args:
            rows: a slice, a list or a tensor, of numbers or booleans, along the batch.

        Raises:
            TypeError: anything else: an int would take the batch dimension away.
        """
        if isinstance(rows, list):
            rows = torch.tensor(rows, device=self.values.device)
        if not (isinstance(rows, slice) or (isinstance(rows, Tensor) and rows.dim() == 1)):
            checks.reject(
                TypeError, "rows", "be a slice, a list or a tensor of one dimension", repr(rows)
            )
        keys, table, keys_max = self.projected[:3]
        projected = ProjectedKeys(
            keys[rows],
            None if table is None else table[rows],
            None if keys_max is None else keys_max[rows],
        )
        lens = None if self.valid_lens is None else self.valid_lens[rows]
        return self._like(projected, self.values[rows], lens)

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """The memory on another device, or in another floating dtype; as :meth:`Tensor.to`."""
        keys = self.projected.keys.to(*args, **kwargs)
        values = self.values.to(*args, **kwargs)
        lens = None if self.valid_lens is None else self.valid_lens.to(values.device)
        if keys is self.projected.keys and values is self.values:
            return self
        backend = "cpu" if self.projected.table is not None and keys.is_cpu else "reference"
        return self._like(project(keys, backend), values, lens)

    def detach(self) -> Memory:
        """The memory outside of the autograd graph; as :meth:`Tensor.detach`."""
        keys, table, keys_max = self.projected[:3]
        return replace(
            self,
            projected=ProjectedKeys(keys.detach(), table, keys_max),
            values=self.values.detach(),
        )

    def _like(self, projected: ProjectedKeys, values: Tensor, valid_lens: Tensor | None) -> Memory:
        shared = self.projected.shared
        if shared is not None:
            projected = projected.share(values, shared.w_v)
        return replace(self, projected=projected, values=values, valid_lens=valid_lens)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        # As modules do with their attention_weights: what lies in a graph is copied without it.
        maker = self.maker
        if maker is not None and id(maker.module) in memo:
            maker = None  # copied along: its key layer is another one, of the same numbers
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
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of the first 0.1.0 hold the fields as they are.
        projected = state.get("projected")
        if projected is None:
            projected = ProjectedKeys(state["keys"], state["table"], state["keys_max"])
        fields = (projected, state["values"], state["valid_lens"], None, None)
        for name, value in zip(self.__dataclass_fields__, fields, strict=True):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        keys, lens = self.projected.keys, self.valid_lens
        batch, keys_len, hidden = keys.shape
        shown = None if lens is None else tuple(lens.shape)
        return (
            f"Memory(B={batch}, Tk={keys_len}, H={hidden}, Dv={self.values.shape[2]}, "
            f"valid_lens={shown}, dtype={keys.dtype}, device={str(keys.device)!r})"
        )
