"""Rows behind other rows: in buffers with room for more, or by a copy of all."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks

__all__ = ["Room", "joined"]


class Room:
    """Buffers (B,capacity,n) that begin with the rows of memories, and are written behind them."""

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


def joined(
    room: Room | None, rows: tuple[Tensor, ...], more: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Room | None]:
    """Rows (B,T,...) and more (B,n,...) in the dtypes of the first, and the room they are in."""
    if (
        torch.compiler.is_compiling()
        or checks.in_transform()
        or any(type(x) is not Tensor for x in (*rows, *more))
    ):
        pairs = zip(rows, more, strict=True)
        return tuple(torch.cat((x, y.to(x.dtype)), 1) for x, y in pairs), None
    start = rows[0].shape[1]
    with torch.no_grad():
        together = None if room is None else room.write(start, more)
        if together is None:
            room = Room(rows, 2 * (start + more[0].shape[1]))
            together = room.write(start, more)
    assert together is not None
    if checks.needs_gradient(*rows, *more):
        more = tuple(y.to(x.dtype) for x, y in zip(rows, more, strict=True))
        return _Joined.apply(together, *rows, *more), room  # type: ignore[no-untyped-call]
    return tuple(together), room


class _Joined(torch.autograd.Function):
    """Rows that were written behind others, as ``torch.cat`` of both."""

    @staticmethod
    def forward(ctx: Any, together: list[Tensor], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.start = parts[0].shape[1]
        needed = ctx.needs_input_grad[1:]
        constant = zip(together, needed, needed[len(together) :], strict=False)
        ctx.mark_non_differentiable(*(x for x, a, b in constant if not (a or b)))
        return tuple(together)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        start = ctx.start
        before = [None if grad is None else grad[:, :start] for grad in grads]
        return (None, *before, *(None if grad is None else grad[:, start:] for grad in grads))
