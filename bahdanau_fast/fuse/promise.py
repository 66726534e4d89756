"""Tensors whose values nobody has asked for yet.

A :class:`Promise` stands for a tensor of a module's own computation; what it is a promise of is one
of :mod:`.values`. Whoever needs its numbers gets them, computed as the module would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.fuse.axes import Layout, Sizes, flat, place, shape_of

__all__ = [
    "Cell",
    "Leaked",
    "Promise",
    "as_shape",
    "now",
    "range_of",
    "shown",
    "sources",
    "version",
]


class Leaked(BaseException):
    """A promise that cannot be kept: it got past autograd, or what it is of was changed."""


class Cell:
    """What a promise and its views stand for; values once somebody has asked."""

    __slots__ = ("__weakref__", "axes", "grad", "needed", "state", "value")

    def __init__(self, state: Any, axes: Layout, needed: Callable[[Any], None]) -> None:
        self.state, self.axes, self.needed = state, axes, needed
        self.value: Tensor | None = None
        self.grad = torch.is_grad_enabled()

    def compute(self) -> Tensor:
        """The values, in the layout of the promise that was made first."""
        if self.value is None:
            state = self.state
            self.needed(state)
            order = getattr(state, "order", range_of(state.sizes))
            with torch.set_grad_enabled(self.grad):
                self.value = shown(state.compute(), order, self.axes, state.sizes)
        return self.value


class Promise(Tensor):
    """A tensor whose values are computed when somebody needs them."""

    cell: Cell
    axes: Layout  # what each dimension shows
    viewed: Promise | None  # what it is a view of
    detached: bool
    value: Tensor | None  # of a view

    @staticmethod
    def of(
        cell: Cell,
        layout: Layout,
        shape: Any,
        like: Tensor,
        viewed: Promise | None = None,
        detached: bool = False,
    ) -> Promise:
        """A promise of a cell, or a view of another; ``like`` has its dtype and device."""
        # As a leaf: who goes past torch's functions then comes to __torch_dispatch__.
        made: Any = torch.Tensor._make_wrapper_subclass(
            Promise, shape, dtype=like.dtype, device=like.device, requires_grad=cell.grad
        )
        made.cell, made.axes, made.viewed, made.detached = cell, layout, viewed, detached
        made.value = None
        assert isinstance(made, Promise)
        return made

    def compute(self) -> Tensor:
        """The values: the same tensor at each call, and of a view a view of the other's."""
        if self.viewed is None:
            return self.cell.compute()
        if self.value is None:
            x, axes, sizes = self.viewed.compute(), self.viewed.axes, self.cell.state.sizes
            with torch.set_grad_enabled(self.cell.grad):
                order = flat(axes)
                parts = tuple([sizes[axis] for axis in order])
                x = shown(x if x.shape == parts else x.view(parts), order, self.axes, sizes)
            self.value = x.detach() if self.detached else x
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SEEN_FROM_OUTSIDE:
                return func(*args, **(kwargs or {}))
            return func(*now(args), **now(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in (*args, *(kwargs or {}).values()) if type(x) is Promise]
        if any(x.cell.grad for x in given):
            raise Leaked
        return func(*now(args), **now(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return now(self).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(now(self))


# What does not need values.
_SEEN_FROM_OUTSIDE = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.is_floating_point,
    torch.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "is_cuda", "is_cpu")
    ),
}


def now(x: Any) -> Any:
    """The values of promises, also in lists, tuples and dictionaries."""
    kind = type(x)
    if kind is Promise:
        return x.compute()
    if kind is tuple or kind is list:
        return kind(now(each) for each in x)
    if kind is dict:
        return {name: now(each) for name, each in x.items()}
    return x


def sources(x: Any) -> Iterator[Tensor]:
    """Tensors with values that a promise, or what it is of, is made of."""
    if type(x) is Promise:
        yield from sources(x.cell.state)
    elif isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for each in x:
            yield from sources(each)


def version(x: Tensor) -> int:
    """Counts the writes to a tensor; those of inference mode have no counter."""
    return -1 if type(x) is Promise or x.is_inference() else x._version


def range_of(sizes: Sizes) -> tuple[int, ...]:
    """All axes, in their order."""
    return tuple(range(len(sizes)))


def shown(x: Tensor, order: tuple[int, ...], layout: Layout, sizes: Sizes) -> Tensor:
    """A tensor with its axes in an order, in a layout."""
    core = tuple([None if sizes[axis] == 1 else axis for axis in order])
    return as_shape(place(x, core, flat(layout)), shape_of(layout, sizes))


def as_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """In another shape; to ask first is quicker."""
    return x if x.shape == shape else x.reshape(shape)
