"""What calls do with their tensors, asked by sending numbers through them, at small sizes.

There are no rules for axes. The numbers of its elements are sent through calls that only move or
add data, random ones through contractions: that shows where every element ends up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from bahdanau_fast.fuse.graph import Graph, Left, Node, Sizes, need

__all__ = ["CONTRACTIONS", "PRODUCTS", "QUOTIENTS", "VIEWS", "Part", "Probe", "back", "small_sizes"]

VIEWS = {
    *("view", "reshape", "permute", "transpose", "t", "T", "mT", "unsqueeze", "squeeze", "flatten"),
    *("__getitem__", "getitem", "contiguous", "select", "view_as", "reshape_as", "swapaxes"),
    *("swapdims", "movedim", "float", "unflatten"),
}
SUMS = {
    *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"),
    *("add_", "sub_", "__iadd__", "__isub__"),
}
_JOINS = {"cat", "concat", "concatenate"}
_REPEATS = {"expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "stack"}
_MOVES = VIEWS | SUMS | _JOINS | _REPEATS | {"repeat_interleave", "clone"}
PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply"}
QUOTIENTS = {"div", "__truediv__", "divide", "truediv"}
CONTRACTIONS = {
    *("linear", "matmul", "__matmul__", "bmm", "mm", "mv", "einsum", "sum", "tensordot", "inner"),
    *("conv1d", "conv2d", "addmm"),
}
_SCORES = {"softmax", "masked_fill", "masked_fill_", "dropout"}
_AFTER = VIEWS | SUMS | PRODUCTS | QUOTIENTS | CONTRACTIONS | _SCORES
_F64 = torch.float64

#: Columns of a tensor: whose elements are there, by row and column; by what factor; which columns.
Part = tuple[int, Tensor, float, slice]


def back(graph: Graph, number: int, pinned: Collection[int] = ()) -> tuple[set[int], list[int]]:
    """Calls that only move or add data, back from a tensor, and the tensors where they begin.

    Those that are pinned are made at once: what they give is a beginning.
    """
    ids: set[int] = set()
    leaves: list[int] = []
    todo = [number]
    while todo:
        v = todo.pop()
        i = graph.values[v].maker
        if i is not None and i not in pinned and _moves(graph, graph.nodes[i]):
            todo += reversed(graph.nodes[i].refs()) if i not in ids else ()
            ids.add(i)
        elif v not in leaves:
            leaves.append(v)
    return ids, leaves


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a call only moves or adds, and keeps all of what it is given."""
    refs = node.refs()
    if node.name in ("__getitem__", "getitem", "select"):
        sizes = [graph.values[v].numel for v in (*refs, *node.out)]
        return len(sizes) == 2 and sizes[0] == sizes[1]
    return node.name in _MOVES and (node.single or node.name == "broadcast_tensors")


def small_sizes(graph: Graph, at: int) -> Sizes:
    """Sizes at which to look around an activation."""
    seen = {*graph.nodes[at].out}
    joined: set[int] = set()
    todo = [(ref, 8) for ref in graph.nodes[at].refs()]
    while todo:
        v, depth = todo.pop()
        i = graph.values[v].maker
        seen.add(v)
        if depth and i is not None and graph.nodes[i].name in _MOVES | CONTRACTIONS:
            refs = graph.nodes[i].refs()
            todo += [(ref, depth - 1) for ref in refs if ref not in seen]
            if graph.nodes[i].name in _JOINS:
                shapes = [graph.values[ref].shape for ref in (v, *refs)]
                joined |= {
                    n for each in zip(*shapes, strict=False) if len({*each}) > 1 for n in each
                }
    after = [*graph.nodes[at].out]
    for _ in range(12):
        users = [graph.nodes[i] for v in after for i in graph.values[v].users if i >= at]
        users = [node for node in users if node.name in _AFTER]
        seen.update(v for node in users for v in (*node.refs(), *node.out))
        after = [v for node in users for v in node.out if v not in after]
    return Sizes.of([graph.values[v] for v in seen], joined)


class Probe:
    """Questions to a graph, at small sizes.

    Args:
        pinned: calls through which nothing is sent.
    """

    def __init__(self, graph: Graph, sizes: Sizes, pinned: Collection[int]) -> None:
        self.graph, self.sizes, self.pinned = graph, sizes, pinned
        self.generator = torch.Generator().manual_seed(0)

    def shape(self, number: int) -> tuple[int, ...]:
        """Of a tensor, small."""
        return self.sizes.shape(self.graph.values[number].shape)

    def run(self, ids: Iterable[int], feed: dict[int, Tensor], want: int) -> Tensor:
        """A tensor, as calls make it of others."""
        return self.graph.evaluate(ids, feed, [want], self.sizes)[0]

    def zeros(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """In place of tensors."""
        return {v: torch.zeros(self.shape(v), dtype=_F64) for v in numbers}

    def random(self, number: int) -> Tensor:
        """In place of a tensor."""
        return torch.rand(self.shape(number), dtype=_F64, generator=self.generator)

    def numbered(self, number: int, axis: int) -> Tensor:
        """(rows, columns): numbers of the elements of a tensor, one axis as the columns."""
        shape = self.shape(number)
        own = torch.arange(math.prod(shape)).view(shape)
        return own.movedim(axis, -1).reshape(-1, shape[axis])

    def elements(
        self, ids: set[int], leaves: list[int], target: int
    ) -> list[tuple[int, Tensor, float]]:
        """Of each leaf: the number of its element at each place of the target, and its factor."""
        zero = self.zeros(leaves)
        need(not self.run(ids, zero, target).count_nonzero(), "adds a number inside")
        found = []
        for v in leaves:
            n = zero[v].numel()
            need(n and self.graph.values[v].dtype.is_floating_point, "adds what is no number")
            one = self.run(ids, zero | {v: torch.ones_like(zero[v])}, target)
            numbers = torch.arange(1, n + 1, dtype=_F64).view_as(zero[v])
            factors = one[one != 0].unique()
            need(len(factors) == 1, "is scaled unevenly")
            at = self.run(ids, zero | {v: numbers}, target) / factors
            need((at == at.round()).all(), "mixes its elements")
            found.append((v, at.round().long() - 1, float(factors)))
        return found

    def parts(self, v: int, axis: int) -> tuple[set[int], list[Part]]:
        """What a tensor of rows is joined or added of: the calls, and its parts."""
        ids, leaves = back(self.graph, v, self.pinned)
        found: list[Part] = []
        try:
            need(ids, "is made elsewhere")
            for leaf, elements, factor in self.elements(ids, leaves, v):
                at = elements.movedim(axis, -1).reshape(-1, elements.shape[axis])
                there = (at[0] >= 0).nonzero().flatten()
                columns = slice(int(there[0]), int(there[-1]) + 1)
                need((at[:, columns] >= 0).all(), "is in some rows alone")
                found.append((leaf, at[:, columns], factor, columns))
        except Left:
            return set(), [(v, self.numbered(v, axis), 1.0, slice(None))]
        return ids, found

    def whole(self, v: int, axis: int) -> tuple[set[int], int, Tensor]:
        """What a tensor is a view or a repetition of: the calls, its number, its elements."""
        ids, found = self.parts(v, axis)
        leaf, at, factor, _ = found[0]
        if len(found) > 1 or factor != 1.0 or at.shape[1] != self.shape(v)[axis]:
            return set(), v, self.numbered(v, axis)
        return ids, leaf, at

    def contracted(
        self, ids: set[int], a: int, w: int, out: int, bias: int | None
    ) -> tuple[int, Tensor, int, Tensor]:
        """How ``out`` sums ``a * w`` over one axis of each.

        Returns:
            The axis of ``a``, the row of ``a`` (by its other axes) at each place of ``out``; the
            same of ``w``.
        """
        rest = {} if bias is None else self.zeros([bias])
        found = []
        for this, other in ((a, w), (w, a)):
            feed = rest | {other: torch.ones(self.shape(other), dtype=_F64)}
            for axis in reversed(range(len(self.shape(this)))):
                rows = self._rows(ids, this, axis, feed, out)
                if rows is not None:
                    found.append((axis, rows))
                    break
        need(len(found) == 2, "is no contraction over one axis")
        (d, rows_a), (e, rows_w) = found
        draw = {a: self.random(a), w: self.random(w)}
        left, right = (
            draw[v].movedim(axis, -1).reshape(-1, draw[v].shape[axis])
            for v, axis in ((a, d), (w, e))
        )
        need(left.shape[1] == right.shape[1], "contracts other sizes")
        want = (left @ right.t())[rows_a, rows_w]
        need(torch.allclose(self.run(ids, draw | rest, out), want), "is no product of two")
        return d, rows_a, e, rows_w

    def _rows(
        self, ids: set[int], v: int, axis: int, feed: dict[int, Tensor], out: int
    ) -> Tensor | None:
        """The row of ``v`` at each place of ``out``, if that sums over this axis of ``v``."""
        shape = list(self.shape(v))
        n, shape[axis] = shape[axis], 1
        found = []
        for _ in range(2):  # one might fit by chance
            labels = torch.rand(math.prod(shape), dtype=_F64, generator=self.generator)
            given = labels.view(shape).expand(self.shape(v)).contiguous()
            got = (self.run(ids, feed | {v: given}, out) / n).contiguous()
            ordered, order = labels.sort()
            at = torch.searchsorted(ordered, got - 1e-12).clamp(max=len(labels) - 1)
            if not torch.allclose(ordered[at], got, rtol=0, atol=1e-10):
                return None
            found.append(order[at])
        return found[0] if torch.equal(*found) else None
