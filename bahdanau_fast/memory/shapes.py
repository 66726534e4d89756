"""The shapes people pass: decoder states, any number of batch dimensions, lists as lengths.

Inside, a call has queries (B,Tq,Dq), keys (B,Tk,Dk) and values (B,Tk,Dv). :func:`as_rows` makes
these of what was given, and the :class:`Shape` it gives puts the results back.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks

__all__ = ["Given", "Shape", "as_rows", "lengths"]


class Shape(NamedTuple):
    """What distinguishes the results of a call from (B,Tq,...).

    Attributes:
        batch: the batch dimensions; B is their product.
        state: the query is one state for each batch row, without a dimension of queries.
    """

    batch: tuple[int, ...]
    state: bool

    def flatten(self, tensor: Any) -> Any:
        """A tensor (*batch,...) as (B,...); what is none is given back as it is."""
        dims = len(self.batch)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:dims]) != self.batch:
            return tensor
        return tensor.reshape(math.prod(self.batch), *tensor.shape[dims:])

    def restore(self, result: Tensor) -> Tensor:
        """A result (B,Tq,n) as (*batch,Tq,n), or (*batch,n) for a state."""
        return result.reshape(*self.batch, *result.shape[2 if self.state else 1 :])


class Given(NamedTuple):
    """The tensors of a call in three dimensions, and how its results are put back.

    Attributes:
        rows: queries, keys, values and lengths.
        mask: bool (B,Tk) or (B,Tq,Tk), or None.
        shape: of the results; None where they stay as they are.
    """

    rows: tuple[Tensor, Tensor, Tensor, Tensor | None]
    mask: Tensor | None
    shape: Shape | None


def as_rows(
    queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, mask: Tensor | None
) -> Given:
    """The inputs of a call in three dimensions.

    What fits no shape is given back as it is, for :func:`checks.inputs` to reject.

    Args:
        queries: (*batch,Tq,Dq), or a state (*batch,Dq).
        keys: (*batch,Tk,Dk).
        values: (*batch,Tk,Dv).
        valid_lens: None, or (*batch) or (*batch,Tq) as a tensor or a list.
        mask: None, (*batch,Tk) or (*batch,Tq,Tk).

    Raises:
        TypeError: lengths that are a list of something else than numbers.
        ValueError: batch dimensions that differ.
    """
    lens = lengths(valid_lens, queries)
    as_given = Given((queries, keys, values, lens), mask, None)
    if not all(isinstance(each, Tensor) for each in (queries, keys, values)):
        return as_given
    dims = keys.dim()
    if (
        keys.dim() < 2
        or values.dim() != dims
        or queries.dim() not in (dims, dims - 1)
        or queries.dim() == dims == 3
    ):
        return as_given
    batch, state = tuple(keys.shape[:-2]), queries.dim() == dims - 1
    for name, tensor in (("queries", queries), ("values", values)):
        if tuple(tensor.shape[: dims - 2]) != batch:
            need = f"have the batch dimensions of keys, {batch}"
            checks.reject(ValueError, name, need, tuple(tensor.shape))
    shape = Shape(batch, state)
    queries_len = 1 if state else queries.shape[-2]
    lens = _flattened("valid_lens", lens, batch, ((), (queries_len,)))
    per_key = keys.shape[-2:-1]
    mask = _flattened("mask", mask, batch, (per_key, (1, *per_key), (queries_len, *per_key)))
    if keys.dim() != 3:  # the same tensor is known to be the same in the next call
        keys, values = shape.flatten(keys), shape.flatten(values)
    queries = shape.flatten(queries.unsqueeze(-2) if state else queries)
    return Given((queries, keys, values, lens), mask, shape)


def lengths(valid_lens: Any, like: Any) -> Tensor | None:
    """Lengths as a tensor, where they are a list.

    Args:
        valid_lens: of a call.
        like: a tensor on the device of the data.

    Raises:
        TypeError: a list of something else than numbers.
    """
    if not isinstance(valid_lens, (list, tuple)) or not isinstance(like, Tensor):
        return valid_lens  # type: ignore[no-any-return]
    try:
        return torch.as_tensor(valid_lens, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        checks.reject(TypeError, "valid_lens", "be a tensor or a list of numbers", valid_lens)


def _flattened(
    name: str,
    tensor: Tensor | None,
    batch: tuple[int, ...],
    rests: tuple[tuple[int, ...], ...],
) -> Tensor | None:
    """A tensor (*batch,*rest) as (B,*rest)."""
    if not isinstance(tensor, Tensor):
        return tensor
    shape = tuple(tensor.shape)
    for rest in rests:
        if shape == (*batch, *rest):
            return tensor.reshape(math.prod(batch), *rest)
    need = " or ".join(str((*batch, *rest)) for rest in dict.fromkeys(rests))
    checks.reject(ValueError, name, f"have shape {need}", shape)
