"""The shapes people pass: decoder states, any number of batch dimensions, lists as lengths.

Inside, a call has queries (B,Tq,Dq), keys (B,Tk,Dk) and values (B,Tk,Dv). :func:`as_rows` makes
these of what was given, and the :class:`Shape` it gives puts the results back. For a memory the two
halves come one after the other: :func:`source_as_rows`, then :func:`queries_as_rows` at each step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks

__all__ = [
    "Given",
    "Shape",
    "as_rows",
    "lengths",
    "queries_as_rows",
    "source_as_rows",
]


class Shape(NamedTuple):
    """What distinguishes the results of a call from (B,Tq,...).

    Attributes:
        batch: the batch dimensions; B is their product.
        state: the query is one state for each batch row, without a dimension of queries.
    """

    batch: tuple[int, ...]
    state: bool

    def flatten(self, tensor: Any) -> Any:
        """A tensor (*batch,...) as (B,...); non-tensors and other shapes pass through."""
        dims = len(self.batch)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:dims]) != self.batch:
            return tensor
        return tensor.reshape(math.prod(self.batch), *tensor.shape[dims:])

    def rows(self, name: str, tensor: Any, *rests: tuple[int, ...]) -> Any:
        """A tensor (*batch,*rest) as (B,*rest), with one of the rests.

        Args:
            name: of the argument.
            tensor: non-tensors pass through.
            rests: sizes that may follow the batch dimensions.

        Raises:
            ValueError: a tensor of another shape.
        """
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        if shape is None or shape in [(*self.batch, *rest) for rest in rests]:
            return self.flatten(tensor)
        need = " or ".join(str((*self.batch, *rest)) for rest in dict.fromkeys(rests))
        checks.reject(ValueError, name, f"have shape {need}", shape)

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
    if (
        not all(isinstance(each, Tensor) for each in (queries, keys, values))
        or keys.dim() < 2
        or values.dim() != keys.dim()
        or keys.dim() - queries.dim() not in (0, 1)
        or queries.dim() == keys.dim() == 3
    ):
        return Given((queries, keys, values, lens), mask, None)
    batch, keys_len = tuple(keys.shape[:-2]), keys.shape[-2]
    queries, mask, shape = queries_as_rows(queries, mask, batch, keys_len, "keys")
    keys, values, lens = _source(shape, keys, values, lens, queries.shape[1])
    return Given((queries, keys, values, lens), mask, shape)


def queries_as_rows(
    queries: Tensor, mask: Tensor | None, batch: tuple[int, ...], keys_len: int, of: str
) -> tuple[Tensor, Tensor | None, Shape]:
    """Queries of keys that have these batch dimensions, and their mask, in three dimensions.

    Args:
        queries: (*batch,Tq,Dq), or a state (*batch,Dq).
        mask: None, (*batch,Tk) or (*batch,Tq,Tk).
        batch: of the keys.
        keys_len: Tk.
        of: what has these batch dimensions, for messages.

    Returns:
        Queries (B,Tq,Dq), mask (B,Tk) or (B,Tq,Tk), and the shape of the results.

    Raises:
        ValueError: other batch dimensions.
    """
    dims = len(batch)
    if tuple(queries.shape[:dims]) != batch or queries.dim() not in (dims + 1, dims + 2):
        need = f"have the batch dimensions of {of}, {batch}, and one or two more"
        checks.reject(ValueError, "queries", need, tuple(queries.shape))
    shape = Shape(batch, queries.dim() == dims + 1)
    queries = shape.flatten(queries.unsqueeze(-2) if shape.state else queries)
    return queries, _mask(shape, mask, queries.shape[1], keys_len), shape


def source_as_rows(
    keys: Tensor, values: Tensor, valid_lens: Any, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[int, ...] | None]:
    """Keys and values of a memory, and what may be seen of them, in three dimensions.

    What fits no shape is given back as it is, for :func:`checks.keys_and_values` to reject.

    Args:
        keys: (*batch,Tk,Dk).
        values: (*batch,Tk,Dv).
        valid_lens: None, or (*batch) or (*batch,Tq) as a tensor or a list.
        mask: None, (*batch,Tk) or (*batch,Tq,Tk).

    Returns:
        Keys (B,Tk,Dk), values (B,Tk,Dv), lengths (B,) or (B,Tq), mask (B,Tk) or (B,Tq,Tk), and the
        batch dimensions, None where they are one.

    Raises:
        TypeError: lengths that are a list of something else than numbers.
        ValueError: batch dimensions that differ.
    """
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
    if keys.dim() == 3:  # the same tensor is known to be the same in the next call
        return keys, values, lens
    rows = shape.flatten(keys)
    return rows, rows if values is keys else shape.flatten(values), lens


def _mask(shape: Shape, mask: Tensor | None, queries_len: int, keys_len: int) -> Tensor | None:
    """A mask in two or three dimensions."""
    rests = (keys_len,), (1, keys_len), (queries_len, keys_len)
    return shape.rows("mask", mask, *rests)  # type: ignore[no-any-return]


def _queries_len(shape: Shape, tensor: Any, more: int) -> int:
    """Tq of lengths or a mask with so many more than the batch dimensions; 1 of others."""
    dims = len(shape.batch)
    if not isinstance(tensor, Tensor) or tensor.dim() != dims + more:
        return 1
    return tensor.shape[dims]


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
        checks.reject(TypeError, "valid_lens", checks.LENGTHS, valid_lens)
