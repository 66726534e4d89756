"""What nodes do with their tensors, found by evaluating them on chosen numbers, at small sizes.

No rules say what a function does with axes. Calls that only move or add data are evaluated on a
tensor of the indices of its elements, contractions on random numbers: that shows where every
element ends up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Graph, Node, NotFusable, SmallSizes, require

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
_BEHIND_SCORES = VIEWS | PRODUCTS | QUOTIENTS | CONTRACTIONS | {
    *("add", "sub", "softmax", "masked_fill", "dropout", "where", "setitem", "exp", "max", "amax"),
    *("detach", "expand", "expand_as", "repeat", "type_as", "to"),
}  # fmt: skip
#: What an operand may be joined of, before it is taken whole.
MAX_PARTS = 9
_F64 = torch.float64


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a call only moves or adds, and keeps all elements of its operands."""
    refs = node.refs
    if node.name in ("getitem", "select"):
        sizes = [graph.values[v].numel for v in (*refs, *node.out)]
        return len(sizes) == 2 and sizes[0] == sizes[1]
    return node.name in _MOVES and (node.single or node.name == "broadcast_tensors")


def trace_back(
    graph: Graph, number: int, pinned: Collection[int] = (),
    moves: Callable[[Graph, Node], bool] = _moves,
) -> tuple[set[int], list[int]]:  # fmt: skip
    """The calls that only move or add data, from a tensor back to leaves, and these."""
    ids: set[int] = set()
    leaves: list[int] = []
    todo = [number]
    while todo:
        v = todo.pop()
        i = graph.values[v].maker
        if i is not None and i not in pinned and moves(graph, graph.nodes[i]):
            todo += reversed(graph.nodes[i].operands()) if i not in ids else ()
            ids.add(i)
        elif v not in leaves:
            leaves.append(v)
    return ids, leaves


def small_sizes(graph: Graph, anchor: int, unlike: SmallSizes | None = None) -> SmallSizes:
    """Small sizes for what is around an activation, ``unlike`` others."""
    node = graph.nodes[anchor]
    seen, after, todo = {*node.out}, [*node.out], [*node.refs]
    joined: set[int] = set()
    while todo:
        v = todo.pop()
        i = graph.values[v].maker
        seen.add(v)
        if i is not None and graph.nodes[i].name in _MOVES | CONTRACTIONS:
            refs = graph.nodes[i].refs
            todo += [ref for ref in refs if ref not in seen]
            if graph.nodes[i].name in _JOINS:
                axes = zip(*(graph.values[ref].shape for ref in (v, *refs)), strict=False)
                joined.update(n for sizes in axes if len({*sizes}) > 1 for n in sizes)
    for v in itertools.islice(after, 16):
        for user in [graph.nodes[i] for i in graph.values[v].users if i >= anchor]:
            if user.name in _BEHIND_SCORES:
                seen.update(user.refs, user.out)
                after += user.out
    return SmallSizes.of([graph.values[v] for v in seen], joined, unlike)


class Probe:
    """Evaluates parts of a graph at small sizes; calls that are pinned are leaves."""

    def __init__(self, graph: Graph, sizes: SmallSizes, pinned: set[int]) -> None:
        self.graph, self.sizes, self.pinned = graph, sizes, pinned
        self.generator = torch.Generator().manual_seed(0)

    def shape(self, number: int) -> tuple[int, ...]:
        """The small shape of a tensor."""
        return self.sizes.shape(self.graph.values[number].shape)

    def run(self, ids: Iterable[int], feed: dict[int, Tensor], output: int) -> Tensor:
        """A tensor that nodes make of others."""
        nodes = [self.graph.nodes[i] for i in ids]
        feed = self.zeros(v for n in nodes for v in n.refs if v not in n.operands()) | feed
        feed = {v: self.graph.values[v].with_layout(x) for v, x in feed.items()}
        result = self.graph.evaluate(ids, feed, [output], self.sizes)[0]
        require(result.shape == self.shape(output), "its sizes depend on each other")
        return result

    def zeros(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Zeros in place of tensors."""
        return {v: torch.zeros(self.shape(v), dtype=_F64) for v in numbers}

    def random(self, number: int) -> Tensor:
        """Random numbers in place of a tensor."""
        return torch.rand(self.shape(number), dtype=_F64, generator=self.generator)

    def indices(self, number: int) -> Tensor:
        """The indices of its elements, from zero, in place of a tensor."""
        shape = self.shape(number)
        return torch.arange(math.prod(shape), dtype=_F64).view(shape)

    def elements(
        self, ids: set[int], leaves: list[int], target: int
    ) -> list[tuple[int, Tensor, float]]:
        """For each leaf the index of its element by position of the target, and its factor."""
        zero = self.zeros(leaves)
        require(not self.run(ids, zero, target).count_nonzero(), "adds a number inside")
        sources = []
        for v in leaves:
            require(self.graph.values[v].dtype.is_floating_point, "adds what is no number")
            one = self.run(ids, zero | {v: zero[v] + 1}, target)
            factors = one[one != 0].unique()
            require(len(factors) == 1, "is scaled unevenly")
            index = self.run(ids, zero | {v: self.indices(v) + 1}, target) / factors
            require(torch.allclose(index, index.round(), rtol=0, atol=1e-6), "mixes its elements")
            sources.append((v, index.round().long() - 1, float(factors)))
        return sources

    def parts(self, v: int, axis: int, limit: int = MAX_PARTS) -> tuple[set[int], list[Any]]:
        """What a tensor is joined, added or a view of: calls; and (number, rows, columns) each."""
        ids, leaves = trace_back(self.graph, v, self.pinned)
        try:
            require(len(leaves) <= limit, "is made of several")
            parts: list[Any] = []
            for leaf, elements, factor in self.elements(ids, leaves, v):
                index = by_row(elements, axis)
                present = (index[0] >= 0).nonzero().flatten()
                columns = slice(int(present[0]), int(present[-1]) + 1)
                whole = factor == 1.0 and (index[:, columns] >= 0).all()
                require(whole, "is in some rows alone")
                parts.append((leaf, index[:, columns], columns))
        except NotFusable:
            return set(), [(v, by_row(self.indices(v).long(), axis), slice(None))]
        return ids, parts

    def contracted(
        self, ids: set[int], a: int, w: int, out: int, bias: int | None
    ) -> list[tuple[int, Tensor]]:
        """How ``out`` sums ``a * w``: of both the axis, and the row by position of ``out``."""
        rest = self.zeros([] if bias is None else [bias])
        ones = {v: torch.ones(self.shape(v), dtype=_F64) for v in (a, w)}
        sides = [self._row(ids, v, rest | ones, out) for v in ones]
        draw = {v: self.random(v) for v in ones}
        left, right = (by_row(draw[v], axis) for v, (axis, _) in zip(draw, sides, strict=True))
        require(left.shape[1] == right.shape[1], "contracts other sizes")
        expected = (left @ right.t())[sides[0][1], sides[1][1]]
        result = self.run(ids, draw | rest, out)
        require(torch.allclose(result, expected), "is no product of two")
        return sides

    def _row(self, ids: set[int], v: int, feed: dict[int, Tensor], out: int) -> tuple[int, Tensor]:
        """The axis of ``v`` that ``out`` sums, and the row of ``v`` by position of ``out``."""
        for axis in reversed(range(feed[v].dim())):
            numbers = torch.zeros_like(feed[v])
            first = numbers.select(axis, 0)
            first += torch.arange(1, first.numel() + 1).view_as(first)
            rows = self.run(ids, feed | {v: numbers}, out) - 1
            if ((rows == rows.round()) & (rows >= 0) & (rows < first.numel())).all():
                return axis, rows.long()
        raise NotFusable("is no contraction over one axis")


def by_row(x: Tensor, axis: int) -> Tensor:
    """(rows, columns), one axis as the columns."""
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])
