"""The shapes people pass: decoder states, any number of batch dimensions, lists as lengths.

Inside, a call has queries (B,Tq,Dq), keys (B,Tk,Dk) and values (B,Tk,Dv). :func:`as_rows` reshapes
the arguments to these, and the :class:`Shape` it gives puts the results back. For a memory the two
halves come one after the other: :func:`source_as_rows`, then :func:`queries_as_rows` at every step.
Arguments are queries (*batch,Tq,Dq), a state (*batch,Dq), or (1,Tq,Dq) or (Dq,) of all rows; keys
(*batch,Tk,Dk), values (*batch,Tk,Dv), lengths (*batch) or (*batch,Tq) as a tensor or a list, a mask
(*batch,Tk) or what broadcasts to (*batch,Tq,Tk).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks


class Shape(NamedTuple):
    """What distinguishes the results of a call from (B,Tq,...)."""

    batch: tuple[int, ...]  # the batch dimensions; B is their product
    state: bool  # one query per batch row, without a dimension of queries

    def flatten(self, tensor: Any) -> Any:
        """A tensor (*batch,...) as (B,...); non-tensors and other shapes pass through."""
        dims = len(self.batch)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:dims]) != self.batch:
            return tensor
        return tensor.reshape(math.prod(self.batch), *tensor.shape[dims:])

    def rows(self, name: str, tensor: Any, *rests: tuple[int, ...]) -> Any:
        """A tensor (*batch,*rest) as (B,*rest), with one of the rests; non-tensors pass through."""
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        if shape is None or shape in [(*self.batch, *rest) for rest in rests]:
            return self.flatten(tensor)
        need = " or ".join(str((*self.batch, *rest)) for rest in dict.fromkeys(rests))
        checks.reject(ValueError, name, f"have shape {need}", shape)

    def restore(self, result: Tensor) -> Tensor:
        """A result (B,Tq,n) as (*batch,Tq,n), or (*batch,n) for a state."""
        return result.reshape(*self.batch, *result.shape[2 if self.state else 1 :])

    def restore_weights(self, weights: Tensor) -> Tensor:
        """As :meth:`restore`, for weights."""
        return self.restore(weights)

    @property
    def turned(self) -> None:
        """No other order of the weights' axes, which the layout of a fused piece may have."""


def as_rows(
    queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, mask: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor | None, Shape | None]:
    """The inputs of a call in three dimensions, and the shape of results that do not stay so."""
    # Arguments that fit no shape are returned unchanged, for checks.inputs to reject.
    lens = lengths(valid_lens, queries)
    if (
        not all(isinstance(x, Tensor) for x in (queries, keys, values))
        or keys.dim() < 2
        or values.dim() != keys.dim()
    ):
        return (queries, keys, values, lens), mask, None
    batch, keys_len = tuple(keys.shape[:-2]), keys.shape[-2]
    queries = spread_queries(queries, batch, keys_len)
    if queries.dim() > keys.dim() or queries.dim() == keys.dim() == 3:
        return (queries, keys, values, lens), mask, None
    queries, mask, shape = queries_as_rows(queries, mask, batch, keys_len, "keys")
    keys, values, lens = _source(shape, keys, values, lens, queries.shape[1])
    return (queries, keys, values, lens), mask, shape


def spread_queries(queries: Tensor, batch: tuple[int, ...], keys_len: int) -> Tensor:
    """Queries (Dq,) or (1,Tq,Dq) of all rows of a batch, as a view with these; others unchanged.

    An RNN's state (1,B,Dq), or keys (Tk,1,Dk) that are meant for one row, would compute something:
    with Tq = B or with one key (1,Tq,Dq) is left to be rejected.
    """
    dims = len(batch)
    of_rows = queries.dim() == dims + 2 and all(size == 1 for size in queries.shape[:dims])
    if dims == 1 and of_rows:
        of_rows = queries.shape[0] != batch[0] and queries.shape[1] != batch[0] and keys_len != 1
    if queries.dim() != 1 and not of_rows:
        return queries
    return queries.expand(*batch, *queries.shape[-2:])


def queries_as_rows(
    queries: Tensor, mask: Tensor | None, batch: tuple[int, ...], keys_len: int, of: str
) -> tuple[Tensor, Tensor | None, Shape]:
    """Queries of what has these batch dimensions, and their mask, in three dimensions."""
    image = ": keys (B, h, w, C) of an image are keys.flatten(1, 2)"
    hint = image if len(batch) == 2 and queries.dim() in (2, 3) else ""
    queries, shape = steps_as_rows("queries", queries, batch, of, hint)
    return queries, _mask(shape, mask, queries.shape[1], keys_len), shape


def steps_as_rows(
    name: str, steps: Tensor, batch: tuple[int, ...], of: str, hint: str = ""
) -> tuple[Tensor, Shape]:
    """Steps (*batch,T,D), or one without T, of what has these batch dimensions, as (B,T,D)."""
    dims = len(batch)
    if tuple(steps.shape[:dims]) != batch or steps.dim() not in (dims + 1, dims + 2):
        need = f"have the batch dimensions of {of}, {batch}, and one or two more"
        checks.reject(ValueError, name, need, f"{tuple(steps.shape)}{hint}")
    shape = Shape(batch, steps.dim() == dims + 1)
    return shape.flatten(steps.unsqueeze(-2) if shape.state else steps), shape


def source_as_rows(
    keys: Tensor, values: Tensor, valid_lens: Any, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[int, ...] | None]:
    """The source of a memory in three dimensions; its batch dimensions, None where they are one."""
    # Arguments that fit no shape are returned unchanged, for checks.keys_and_values to reject.
    lens = lengths(valid_lens, keys)
    both = isinstance(keys, Tensor) and isinstance(values, Tensor)
    if not both or keys.dim() < 2 or keys.dim() == 3:
        return keys, values, lens, mask, None
    shape, keys_len = Shape(tuple(keys.shape[:-2]), False), keys.shape[-2]
    keys, values, lens = _source(shape, keys, values, lens, _queries_len(shape, lens, 1))
    mask = _mask(shape, mask, _queries_len(shape, mask, 2), keys_len)
    return keys, values, lens, mask, shape.batch


def _source(
    shape: Shape, keys: Tensor, values: Tensor, lens: Tensor | None, queries_len: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and lengths in three dimensions."""
    batch = shape.batch
    if tuple(values.shape[: len(batch)]) != batch:
        need = f"have the batch dimensions of keys, {batch}"
        checks.reject(ValueError, "values", need, tuple(values.shape))
    lens = shape.rows("valid_lens", lens, (), (queries_len,))
    if keys.dim() == 3:  # the same tensor, which the next call can recognize
        return keys, values, lens
    rows = shape.flatten(keys)
    return rows, rows if values is keys else shape.flatten(values), lens


def _mask(shape: Shape, mask: Tensor | None, queries_len: int, keys_len: int) -> Tensor | None:
    """A mask in three dimensions."""
    if mask is None:
        return None
    spread = checks.spread_mask(mask, shape.batch, queries_len, keys_len)
    return shape.flatten(spread)  # type: ignore[no-any-return]


def _queries_len(shape: Shape, tensor: Any, more: int) -> int:
    """Tq of lengths or a mask with so many more than the batch dimensions; 1 of others."""
    dims = len(shape.batch)
    if not isinstance(tensor, Tensor) or tensor.dim() != dims + more:
        return 1
    return tensor.shape[dims]


def lengths(valid_lens: Any, like: Any) -> Tensor | None:
    """Lengths as a tensor on the device of the data, where they are a list."""
    if not isinstance(valid_lens, (list, tuple)) or not isinstance(like, Tensor):
        return valid_lens  # type: ignore[no-any-return]
    try:
        return torch.as_tensor(valid_lens, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        checks.reject(TypeError, "valid_lens", checks.LENGTHS, valid_lens)
