"""Rows (keys and values) appended to others: in buffers with room for more, or by a copy of all."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks


class Room:
    """Buffers (B,capacity,n), one of keys and one of values, whose beginnings are memories."""

    __slots__ = ("_buffers", "_length", "_lock")

    def __init__(self, rows: tuple[Tensor, ...], capacity: int) -> None:
        self._lock = threading.Lock()
        self._length = rows[0].shape[1]
        self._buffers = [x.new_empty((len(x), capacity, x.shape[2])) for x in rows]
        for buffer, x in zip(self._buffers, rows, strict=True):
            buffer[:, : self._length] = x

    def write(self, start: int, rows: tuple[Tensor, ...]) -> list[Tensor] | None:
        """All rows (B,start+n,...) with these at the end; None where others are, or no room."""
        first, end = self._buffers[0], start + rows[0].shape[1]
        with self._lock:
            if self._length != start or end > first.shape[1]:
                return None
            if first.is_inference() and not torch.is_inference_mode_enabled():
                return None  # torch writes to none outside of that mode
            self._length = end
        for buffer, x in zip(self._buffers, rows, strict=True):
            buffer[:, start:end] = x
        # As .data, whose version does not count what is written behind it.
        return [buffer.data[:, :end] for buffer in self._buffers]


def append_rows(
    room: Room | None, rows: tuple[Tensor, ...], more: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Room | None]:
    """Rows (B,T,...) with more (B,n,...) at the end, in their dtypes, and the room they are in."""
    if (
        torch.compiler.is_compiling()
        or checks.in_transform()
        or any(type(x) is not Tensor for x in (*rows, *more))
    ):
        pairs = zip(rows, more, strict=True)
        return tuple(torch.cat((x, y.to(x.dtype)), 1) for x, y in pairs), None
    start = rows[0].shape[1]
    with torch.no_grad():
        all_rows = None if room is None else room.write(start, more)
        if all_rows is None:
            room = Room(rows, 2 * (start + more[0].shape[1]))
            all_rows = room.write(start, more)
    assert all_rows is not None
    if checks.needs_gradient(*rows, *more):
        more = tuple(y.to(x.dtype) for x, y in zip(rows, more, strict=True))
        return _AppendedRows.apply(all_rows, *rows, *more), room  # type: ignore[no-untyped-call]
    return tuple(all_rows), room


class _AppendedRows(torch.autograd.Function):
    """Buffers that hold rows and appended rows, as ``torch.cat`` of these in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, all_rows: list[Tensor], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.start = parts[0].shape[1]
        needed = ctx.needs_input_grad[1:]
        constant = zip(all_rows, needed, needed[len(all_rows) :], strict=False)
        ctx.mark_non_differentiable(*(x for x, a, b in constant if not (a or b)))
        return tuple(all_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        start = ctx.start
        before = [None if grad is None else grad[:, :start] for grad in grads]
        return (None, *before, *(None if grad is None else grad[:, start:] for grad in grads))
