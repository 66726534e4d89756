"""Projected keys, kept for as many decoder steps as look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bahdanau_fast import ops

__all__ = ["Memory", "ProjectedKeys", "project"]


# Keys of at most this many elements are faster worked on anew than kept: a call costs more.
TINY = 2048


class ProjectedKeys(NamedTuple):
    """What one projection of the keys leaves behind.

    Attributes:
        keys: (B,Tk,H), ``W_k k``; in the autograd graph.
        table: (B,Tk,H rounded up), the exponentials the fused kernels read, or None.
        keys_max: (B,), max|W_k k| per row, or None.
    """

    keys: Tensor
    table: Tensor | None
    keys_max: Tensor | None


def project(projected_keys: Tensor, backend: str) -> ProjectedKeys:
    """Prepare ``W_k k`` of shape (B,Tk,H) for a backend."""
    if backend == "reference" or projected_keys.numel() <= TINY:
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
