"""What calls do with their tensors, asked by sending numbers through them, at small sizes.

There are no rules for axes. The numbers of its elements are sent through calls that only move or
add data, random ones through contractions: that shows where every element ends up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Graph, Left, Node, Sizes, need

__all__ = ["CONTRACTIONS", "PRODUCTS", "QUOTIENTS", "VIEWS", "Probe", "back", "by_row",
           "small_sizes"]  # fmt: skip

VIEWS = {
    *("view", "reshape", "permute", "transpose", "t", "T", "mT", "unsqueeze", "squeeze", "flatten"),
    *("getitem", "select", "contiguous", "view_as", "reshape_as", "swapaxes", "swapdims"),
    *("movedim", "unflatten", "float"),
}
_JOINS = {"cat", "concat", "concatenate"}
_MOVES = VIEWS | _JOINS | {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "expand", "expand_as", "broadcast_to"),
    *("broadcast_tensors", "repeat", "repeat_interleave", "stack", "clone"),
}  # fmt: skip
PRODUCTS = {"mul", "rmul", "multiply"}
QUOTIENTS = {"div", "divide", "truediv"}
CONTRACTIONS = {
    *("linear", "matmul", "bmm", "mm", "mv", "einsum", "sum", "tensordot", "inner"),
    *("conv1d", "conv2d", "addmm"),
}
_AFTER = VIEWS | PRODUCTS | QUOTIENTS | CONTRACTIONS | {
    *("add", "sub", "softmax", "masked_fill", "dropout", "where", "setitem", "exp", "max", "amax"),
    *("detach", "expand", "expand_as", "repeat", "type_as", "to"),
}  # fmt: skip
_F64 = torch.float64


def back(graph: Graph, number: int, pinned: Collection[int] = ()) -> tuple[set[int], list[int]]:
    """Calls that only move or add data, back from a tensor, and the tensors where they begin."""
    ids: set[int] = set()
    leaves: list[int] = []
    todo = [number]
    while todo:
        v = todo.pop()
        i = graph.values[v].maker
        if i is not None and i not in pinned and _moves(graph, graph.nodes[i]):
            todo += reversed(graph.nodes[i].operands()) if i not in ids else ()
            ids.add(i)
        elif v not in leaves:
            leaves.append(v)
    return ids, leaves


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a call only moves or adds, and keeps all of what it is given."""
    refs = node.refs()
    if node.name in ("getitem", "select"):
        sizes = [graph.values[v].numel for v in (*refs, *node.out)]
        return len(sizes) == 2 and sizes[0] == sizes[1]
    return node.name in _MOVES and (node.single or node.name == "broadcast_tensors")


def small_sizes(graph: Graph, at: int, unlike: Sizes | None = None) -> Sizes:
    """Sizes at which to look around an activation, ``unlike`` others."""
    node = graph.nodes[at]
    seen, after, todo = {*node.out}, [*node.out], node.refs()
    joined: set[int] = set()
    while todo:
        v = todo.pop()
        i = graph.values[v].maker
        seen.add(v)
        if i is not None and graph.nodes[i].name in _MOVES | CONTRACTIONS:
            refs = graph.nodes[i].refs()
            todo += [ref for ref in refs if ref not in seen]
            if graph.nodes[i].name in _JOINS:
                axes = zip(*(graph.values[ref].shape for ref in (v, *refs)), strict=False)
                joined.update(n for sizes in axes if len({*sizes}) > 1 for n in sizes)
    for v in itertools.islice(after, 16):
        for user in [graph.nodes[i] for i in graph.values[v].users if i >= at]:
            if user.name in _AFTER:
                seen.update(user.refs(), user.out)
                after += user.out
    return Sizes.of([graph.values[v] for v in seen], joined, unlike)


class Probe:
    """Questions to a graph, at small sizes; nothing is sent through calls that are pinned."""

    def __init__(self, graph: Graph, sizes: Sizes, pinned: set[int]) -> None:
        self.graph, self.sizes, self.pinned = graph, sizes, pinned
        self.generator = torch.Generator().manual_seed(0)

    def shape(self, number: int) -> tuple[int, ...]:
        """Of a tensor, small."""
        return self.sizes.shape(self.graph.values[number].shape)

    def run(self, ids: Iterable[int], feed: dict[int, Tensor], want: int) -> Tensor:
        """A tensor, as calls make it of others."""
        nodes = [self.graph.nodes[i] for i in ids]
        feed = self.zeros(v for n in nodes for v in n.refs() if v not in n.operands()) | feed
        laid = {v: self.graph.values[v].laid(x) for v, x in feed.items()}
        made = self.graph.evaluate(ids, laid, [want], self.sizes)[0]
        need(made.shape == self.shape(want), "its sizes depend on each other")
        return made

    def zeros(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """In place of tensors."""
        return {v: torch.zeros(self.shape(v), dtype=_F64) for v in numbers}

    def random(self, number: int) -> Tensor:
        """In place of a tensor."""
        return torch.rand(self.shape(number), dtype=_F64, generator=self.generator)

    def numbers(self, number: int) -> Tensor:
        """From zero, in place of the elements of a tensor."""
        shape = self.shape(number)
        return torch.arange(math.prod(shape), dtype=_F64).view(shape)

    def elements(
        self, ids: set[int], leaves: list[int], target: int
    ) -> list[tuple[int, Tensor, float]]:
        """Of each leaf: the number of its element at each place of the target, and its factor."""
        zero = self.zeros(leaves)
        need(not self.run(ids, zero, target).count_nonzero(), "adds a number inside")
        found = []
        for v in leaves:
            need(self.graph.values[v].dtype.is_floating_point, "adds what is no number")
            one = self.run(ids, zero | {v: zero[v] + 1}, target)
            factors = one[one != 0].unique()
            need(len(factors) == 1, "is scaled unevenly")
            at = self.run(ids, zero | {v: self.numbers(v) + 1}, target) / factors
            need(torch.allclose(at, at.round(), rtol=0, atol=1e-6), "mixes its elements")
            found.append((v, at.round().long() - 1, float(factors)))
        return found

    def parts(self, v: int, axis: int, most: int = 9) -> tuple[set[int], list[Any]]:
        """What a tensor is joined, added or a view of: calls; of each its rows, and the columns."""
        ids, leaves = back(self.graph, v, self.pinned)
        try:
            need(len(leaves) <= most, "is made of several")
            found: list[Any] = []
            for leaf, elements, factor in self.elements(ids, leaves, v):
                at = by_row(elements, axis)
                there = (at[0] >= 0).nonzero().flatten()
                columns = slice(int(there[0]), int(there[-1]) + 1)
                need(factor == 1.0 and (at[:, columns] >= 0).all(), "is in some rows alone")
                found.append((leaf, at[:, columns], columns))
        except Left:
            return set(), [(v, by_row(self.numbers(v).long(), axis), slice(None))]
        return ids, found

    def contracted(
        self, ids: set[int], a: int, w: int, out: int, bias: int | None
    ) -> list[tuple[int, Tensor]]:
        """How ``out`` sums ``a * w``: of each the axis, and the row at each place of ``out``."""
        rest = self.zeros([] if bias is None else [bias])
        ones = {v: torch.ones(self.shape(v), dtype=_F64) for v in (a, w)}
        found = [self._row(ids, v, rest | ones, out) for v in ones]
        draw = {v: self.random(v) for v in ones}
        left, right = (by_row(draw[v], axis) for v, (axis, _) in zip(draw, found, strict=True))
        need(left.shape[1] == right.shape[1], "contracts other sizes")
        want = (left @ right.t())[found[0][1], found[1][1]]
        need(torch.allclose(self.run(ids, draw | rest, out), want), "is no product of two")
        return found

    def _row(self, ids: set[int], v: int, feed: dict[int, Tensor], out: int) -> tuple[int, Tensor]:
        """The axis of ``v`` that ``out`` sums, and the row of ``v`` at each place of ``out``."""
        for axis in reversed(range(feed[v].dim())):
            numbers = torch.zeros_like(feed[v])
            first = numbers.select(axis, 0)
            first += torch.arange(1, first.numel() + 1).view_as(first)
            rows = self.run(ids, feed | {v: numbers}, out) - 1
            if ((rows == rows.round()) & (rows >= 0) & (rows < first.numel())).all():
                return axis, rows.long()
        raise Left("is no contraction over one axis")


def by_row(x: Tensor, axis: int) -> Tensor:
    """(rows, columns), one axis as the columns."""
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])
