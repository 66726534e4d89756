"""Projected keys, kept for as many decoder steps as look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import ops
from bahdanau_fast.deferred import Shared, share

__all__ = ["Memory", "ProjectedKeys", "project"]


# Keys of at most this many elements are faster worked on anew than kept: a call costs more.
TINY = 512


class ProjectedKeys(NamedTuple):
    """What one projection of the keys leaves behind.

    Attributes:
        keys: (B,Tk,H), ``W_k k``; in the autograd graph.
        table: (B,Tk,H rounded up), the exponentials the C++ kernels read, or None.
        keys_max: (B,), max|W_k k| per row, or None.
        shared: the node of the autograd graph that calls on them share, or None.
    """

    keys: Tensor
    table: Tensor | None
    keys_max: Tensor | None
    shared: Shared | None = None

    def share(self, values: Tensor, w_v: Tensor) -> ProjectedKeys:
        """The same, for calls that share one node of the autograd graph.

        Args:
            values: (B,Tk,Dv) of those calls.
            w_v: (1,H) or (H,) of those calls.
        """
        if self.table is None:  # another backend's, or too small to be worth it
            return self
        return self._replace(shared=share(*self[:3], values, w_v))


# From so many queries on a kernel makes the table anew as it goes: one part in so many of the work,
# against as much memory as the keys.
MANY_QUERIES = 16


def project(projected_keys: Tensor, backend: str, queries_len: int = 1) -> ProjectedKeys:
    """Prepare ``W_k k`` for a backend.

    Args:
        projected_keys: (B,Tk,H).
        backend: a name from :data:`backends.NAMES`.
        queries_len: Tq of the calls to come.
    """
    if backend != "cpu" or torch.compiler.is_exporting():  # its precision goes by the size
        return ProjectedKeys(projected_keys, None, None)
    if projected_keys.numel() <= TINY or queries_len >= MANY_QUERIES:
        return ProjectedKeys(projected_keys, None, None)
    return ProjectedKeys(projected_keys, *ops.exp_keys(projected_keys))


@dataclass(frozen=True)
class Memory:
    """A source that decoder steps look at: projected keys, values and lengths.

    Made by :meth:`AdditiveAttention.memory`, read by :meth:`AdditiveAttention.attend`. Beams are
    queries against one memory: nothing in it is copied per beam.

    Attributes:
        projected: the keys after ``W_k``.
        values: (B,Tk,Dv).
        valid_lens: None, (B,) or (B,Tq).
    """

    projected: ProjectedKeys
    values: Tensor
    valid_lens: Tensor | None = None
