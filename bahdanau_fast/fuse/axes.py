"""Axes of a sum that nobody has computed: which of them a tensor shows, and which part they play.

The axes of a sum are numbered; those of size one are left out. A *layout* says what each dimension
of a tensor shows: the axes that it merges, none for a dimension of size one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

__all__ = [
    "Axes",
    "Layout",
    "Parts",
    "Sizes",
    "Unruled",
    "broadcast_shape",
    "flat",
    "layout_of",
    "need",
    "parts_of",
    "place",
    "regrouped",
    "remembered",
    "shape_of",
]

P = ParamSpec("P")
R = TypeVar("R")
Sizes = tuple[int, ...]
Layout = tuple[tuple[int, ...], ...]
# The axis that each dimension of a tensor shows; None for a dimension of size one.
Axes = tuple[int | None, ...]


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """A function that looks up what it was asked before; not where sizes are symbols."""
    cached = lru_cache(4096)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return cached(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # a symbol has no hash
            return function(*args, **kwargs)

    return call


@remembered
def shape_of(layout: Layout, sizes: Sizes) -> tuple[int, ...]:
    """What a tensor of a layout has for its shape."""
    return tuple([math.prod([sizes[axis] for axis in group]) for group in layout])


def layout_of(shape: Sequence[int]) -> Layout:
    """A dimension for each axis that is not of size one."""
    return tuple([() if n == 1 else (i,) for i, n in enumerate(shape)])


def broadcast_shape(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """As ``torch.broadcast_shapes``, which takes a tenth of a millisecond."""
    if len(a) < len(b):
        a, b = b, a
    shape = list(a)
    for i, n in enumerate(b, len(a) - len(b)):
        need(n == 1 or shape[i] in (1, n))
        if n != 1:
            shape[i] = n
    return shape


class Unruled(Exception):
    """No rule fits a call."""


def need(condition: Any) -> None:
    """End a rule that does not fit."""
    if not condition:
        raise Unruled


def flat(layout: Layout) -> tuple[int, ...]:
    """The axes of a layout, in its order."""
    return tuple(axis for group in layout for axis in group)


def regrouped(layout: Layout, sizes: Sizes, shape: Sequence[int]) -> Layout:
    """The layout after a view with another shape, which cuts no axis."""
    left = list(flat(layout))
    groups = []
    for wanted in shape:
        group, size = [], 1
        while size < wanted and left:
            group.append(left.pop(0))
            size *= sizes[group[-1]]
        need(size == wanted)
        groups.append(tuple(group))
    need(not left)
    return tuple(groups)


def place(x: Tensor, axes: Axes, order: Sequence[int]) -> Tensor:
    """A view with a dimension for each axis of ``order``, of size one where ``x`` has it not."""
    if axes == order:
        return x
    dims, shape = _placing(axes, tuple(order), x.shape)
    x = x if dims is None else x.permute(dims)
    return x if x.shape == shape else x.reshape(shape)


@remembered
def _placing(
    axes: Axes, order: tuple[int, ...], shape: Sequence[int]
) -> tuple[list[int] | None, tuple[int, ...]]:
    """How :func:`place` permutes, if it has to, and the shape that comes of it."""
    sizes = dict(zip(axes, shape, strict=True))
    wanted = [axis for axis in order if axis in sizes]
    dims = None
    if wanted != [axis for axis in axes if axis is not None]:
        ones = [i for i, axis in enumerate(axes) if axis is None]
        dims = [*(axes.index(axis) for axis in wanted), *ones]
    return dims, tuple([sizes.get(axis, 1) for axis in order])


class Parts(NamedTuple):
    """The parts that axes and addends play in a score.

    Attributes:
        batch: axes that queries and keys have.
        queries: axes of the queries alone.
        keys: axes of the keys alone.
        of_queries: numbers of the addends that are queries.
        of_keys: of those that are keys.
    """

    batch: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    of_queries: tuple[int, ...]
    of_keys: tuple[int, ...]

    def turned(self) -> Parts:
        """Queries for keys: a score is the same either way, a softmax is not."""
        return Parts(self.batch, self.keys, self.queries, self.of_keys, self.of_queries)


@remembered
def parts_of(addends: tuple[frozenset[int], ...], lead: frozenset[int]) -> Parts:
    """Who is a query and who a key in a sum of both, by the axes of each addend.

    Args:
        addends: axes of each, without that of the hidden features.
        lead: axes of the sum, without that.
    """
    largest = {each for each in addends if not any(each < other for other in addends)}
    need(len(largest) < 3)
    if len(largest) == 1:  # all queries are constant along some axes of the keys
        (keys,) = largest
        rest = [each for each in addends if each != keys]
        queries = frozenset().union(*rest)
        need(rest)
    else:
        queries, keys = sorted(largest, key=sorted)
    need(queries | keys == lead and keys - queries)
    of_queries = tuple(i for i, each in enumerate(addends) if each <= queries)
    return Parts(
        tuple(sorted(queries & keys)),
        tuple(sorted(queries - keys)),
        tuple(sorted(keys - queries)),
        of_queries,
        tuple(i for i in range(len(addends)) if i not in of_queries),
    )
