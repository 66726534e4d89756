"""Which axes of the scores are the batch's, the queries' and the keys'."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import NotFusable, require
from bahdanau_fast.graphs.piece import Axes, Broadcast, Piece
from bahdanau_fast.graphs.probe import Probe


class ScoreAxes(Probe):
    """The axes along which addends, masks and vectors change."""

    p: Piece
    vector_index: Tensor  # (scores,), the vector of a score
    index: Tensor  # the scores' indices, moved as the weights are
    key_index: Tensor | None
    split_sizes: list[int]  # sizes of the axes of the scores, those that hold several split

    def axes(self) -> None:
        """Which addends are of queries and which of keys, by the axes along which they change."""
        p = self.p
        maps = [addend.rows[:, 0] for addend in p.addends]
        self.split_sizes = sizes = self._split([*maps, self.vector_index])
        vectors = self._varying(self.vector_index)
        axes = [self._varying(m) - vectors for m in maps]
        broad = {
            s for s, e in zip(axes, p.addends, strict=True)
            if s or e.w is not None or not self.graph.values[e.x].constant
        }  # fmt: skip
        require(p.is_pooling or len(broad) > 1, "nothing is broadcast, or there is no query")
        queries, keys = self._rows(axes[0]) if p.is_pooling else self._sides(axes, broad)
        every = queries | keys | vectors == {*range(len(sizes))} and len(vectors) < 2
        require(every and keys - queries, "nothing is broadcast")
        groups = [*vectors, *sorted(queries & keys)], sorted(queries - keys), sorted(keys - queries)
        order = [d for group in groups for d in group]
        p.sizes, p.groups = [sizes[d] for d in order], [*map(len, groups)]
        for addend, varying in zip(p.addends, axes, strict=True):
            addend.of_keys = not varying <= queries
            side = groups[0] + groups[2 if addend.of_keys else 1]
            addend.broadcast = self._broadcast(addend.rows, side)
        for mask in p.masks:
            mask.broadcast = self._broadcast(mask.index[:, None], order)
        index = torch.arange(len(self.vector_index)).view(p.sizes)
        index = index.permute([order.index(d) for d in range(len(sizes))]).reshape(-1)
        p.scores_axes = self.axes_of(p.scores, index)
        if p.weights is not None:
            p.weights_axes = self.axes_of(p.weights, index[self.index.reshape(-1)])

    def _rows(self, keys: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The axes of pooling, which has no queries: its softmax is over some of the keys'."""
        assert self.key_index is not None
        over = self._varying(self.key_index)
        require(over and over <= keys, "its softmax is not over rows")
        return frozenset(), keys

    def _sides(
        self, axes: list[frozenset[int]], broad: set[frozenset[int]]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The axes of queries and of keys, both with the batch's."""
        if self.key_index is not None:
            over = self._varying(self.key_index)
            keys = frozenset[int]().union(*(s for s in broad if s & over))
            queries = frozenset[int]().union(*(s for s in broad if not s & over))
            require(over == keys - queries, "softmax is over something else")
            return queries, keys
        largest = [s for s in {*axes} if not any(s < other for other in axes)]
        largest.sort(key=lambda s: sorted(s)[::-1])  # keys are behind queries
        require(len(largest) < 3, "more than queries and keys")
        keys, others = largest[-1], broad - {largest[-1]}
        queries = largest[0] if len(largest) > 1 else frozenset().union(*others)
        return max(others, key=len) if queries == keys else queries, keys

    def axes_of(self, number: int, index: Tensor) -> Axes:
        """How scores (b,tq,tk) become a tensor of the elements ``index``."""
        positions = torch.empty(len(index), dtype=torch.long)
        positions[index] = torch.arange(len(index))
        return _order(positions.view(self.p.sizes)), [*self.shape(number)]

    def _varying(self, m: Tensor) -> frozenset[int]:
        """The axes of the scores along which something changes."""
        m = m.view(self.split_sizes)
        return frozenset(d for d in range(m.dim()) if (m.diff(dim=d) != 0).any())

    def _split(self, maps: list[Tensor]) -> list[int]:
        """The sizes of the scores' axes, split where an index repeats itself within an axis."""
        sizes, d = [n for n in self.shape(self.p.scores) if n != 1], 0
        while d < len(sizes):
            for m in maps:
                r = m.view(sizes).movedim(d, 0).reshape(sizes[d], -1)[:, 0]
                if 1 < len(r.unique()) < len(r):
                    step = int((r != r[0]).nonzero()[0])
                    step = step if step > 1 else int((r[1:] == r[0]).nonzero()[0]) + 1
                    require(len(r) % step == 0, "its rows are picked")
                    sizes[d : d + 1] = [len(r) // step, step]
                    break
            else:
                d += 1
        return sizes

    def _broadcast(self, rows: Tensor, dims: list[int]) -> Broadcast:
        """How the tensor with these elements is brought to the axes ``dims``."""
        sizes, varying = self.split_sizes, self._varying(rows[:, 0])
        others = [d for d in range(len(sizes)) if d not in dims]
        part = [slice(None) if d in varying else slice(1) for d in dims] + [0] * len(others)
        x = rows.view(*sizes, -1).permute(*dims, *others, -1)[tuple(part)]
        order = _order(x)
        shape, inverse = [x.shape[d] for d in order], [order.index(d) for d in range(x.dim())]
        return Broadcast(shape, inverse, [sizes[d] for d in dims])


def _order(x: Tensor) -> list[int]:
    """The axes of consecutive numbers, as they lie in memory."""
    for order in itertools.permutations(range(x.dim())):
        if torch.equal(x.permute(order).reshape(-1), torch.arange(x.numel())):
            return list(order)
    raise NotFusable("its rows are picked")
