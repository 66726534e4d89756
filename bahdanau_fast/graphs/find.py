"""Finding additive attention in what a call did, back and forth from an activation."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Graph, NotFusable, SmallSizes, require
from bahdanau_fast.graphs.piece import Addend, Piece, ScoreMask
from bahdanau_fast.graphs.pooling import Pooling, activates_projection, drops
from bahdanau_fast.graphs.probe import (
    CONTRACTIONS,
    MAX_PARTS,
    PRODUCTS,
    VIEWS,
    by_row,
    small_sizes,
    trace_back,
)
from bahdanau_fast.graphs.softmax import Softmax

# More vectors than this are an output layer, not attention.
_MAX_VECTORS = 16

_ERRORS = NotFusable, RuntimeError, LookupError, TypeError, ValueError
_EXPANDS = {"expand", "expand_as", "broadcast_to"}
_COPIES = {"repeat", "type_as", "to", "clone"}


def activates_sum(graph: Graph, anchor: int) -> tuple[bool, bool]:
    """Whether a call activates a sum of several tensors, and whether it broadcasts one of them."""
    todo = graph.nodes[anchor].refs[:1]
    several = repeats = False
    rows = math.prod(graph.values[todo[0]].shape[:-1]) if todo else 0
    for v in todo:
        leaves = trace_back(graph, v)[1]
        several |= len(leaves) > 1
        for value in [graph.values[leaf] for leaf in leaves]:
            fewer = value.shape and math.prod(value.shape[:-1]) < rows
            repeats |= bool(fewer) and not value.constant
            if value.maker is not None and len(todo) < 16:
                node = graph.nodes[value.maker]
                todo += node.refs if node.name in CONTRACTIONS else ()
    return several, repeats


class _Written(Exception):
    """More calls are pinned, as others write to what they read: the search begins anew."""


def find(
    graph: Graph, anchor: int, sizes: SmallSizes, calls: range | None = None, checked: bool = False
) -> Piece:
    """Additive attention around an activation, in some calls; ``checked``: its masks are tested."""
    calls = range(len(graph.nodes)) if calls is None else calls
    state = graph.nodes[anchor].state  # others are in an autograd.Function, or without gradients
    others = {i for i in calls if graph.nodes[i].state != state or graph.nodes[i].pinned}
    pinned = {*range(calls.start), *others}
    require(anchor not in pinned, "gradients are saved otherwise within it")
    while True:
        finder = _Finder(graph, anchor, sizes, pinned, calls.stop, checked)
        try:
            return finder.piece()
        except _Written:
            continue
        except NotFusable as why:
            why.maybe_later = finder.maybe_later
            raise


def is_pooling(graph: Graph, anchor: int) -> bool:
    """Whether a call is the activation of pooling without a query."""
    with contextlib.suppress(*_ERRORS):
        if activates_projection(graph, anchor):
            return find(graph, anchor, small_sizes(graph, anchor)).is_pooling
    return False


class _Finder(Softmax, Pooling):
    """The steps of :func:`find`."""

    def __init__(
        self, graph: Graph, anchor: int, sizes: SmallSizes, pinned: set[int], end: int,
        checked: bool,
    ) -> None:  # fmt: skip
        super().__init__(graph, sizes, pinned)
        node, self.end, self.checked = graph.nodes[anchor], end, checked
        numbers = [x for x in (*node.args[1:2], *node.kwargs.values()) if type(x) in (int, float)]
        slope = float([*numbers, 0.01][0])
        self.p = Piece(anchor, node.name, slope, node.out[0], deferred={anchor})
        self.total, self.maybe_later = int(node.refs[0]), False

    def piece(self) -> Piece:
        self.maybe_later = not self.graph.values[self.p.activated].numel
        require(not self.maybe_later, "has no elements")
        summed, gate = self.gated()
        self.joined = gate is not None  # a gate is of one tensor, which may be a concatenation
        try:
            self.contraction(summed)
        except NotFusable:
            if not self.contraction_of_masked(summed):
                raise
        self.p.addends = self.addends(self.total)
        self.p.gate = [] if gate is None else self.addends(gate)
        require(self.find_pooling() or not self.p.gate, "is multiplied by a sigmoid")
        # One key shows no broadcast, more of them may.
        maps, n = [addend.rows[:, 0] for addend in self.p.addends], len(self.rows.unique())
        repeated = any(1 < len(m.unique()) < n for m in maps)
        several = len(self.p.addends) > 1
        self.maybe_later = several and (1 in self.shape(self.total) or repeated)
        scores = replace(
            self.p, deferred={*self.p.deferred}, score_ops=[*self.p.score_ops],
            masks=[*self.p.masks], immediate=set(), assumed_binary=set(), mask_calls=set(),
            weight_views=set(),
        )  # fmt: skip
        if self.p.is_pooling:
            return self.without_query(scores)
        try:
            self.softmax()
            self.axes()
            self.context()
            self.check_order()
        except _ERRORS as why:
            reason = str(why) if isinstance(why, NotFusable) else "it has another form"
            self.p, self.key_index = replace(scores, why_scores_only=reason), None
            self.axes()
            self.check_order()
        return self.p

    def without_query(self, scores: Piece) -> Piece:
        """The scores of pooling: their softmax is read to tell what its rows are."""
        with contextlib.suppress(*_ERRORS):
            self.softmax()
        self.p = scores
        if self.key_index is None:
            raise NotFusable("no softmax over its rows")
        self.maybe_later = not self.key_index.any()  # it is of one row
        self.axes()
        self.maybe_later = True
        self.check_order()
        return self.p

    def to_contraction(self, i: int, v: int) -> tuple[set[int], int, int, int | None]:
        """From a call to a contraction: the calls, its result, the other operand, and a bias."""
        ids: set[int] = set()
        other = bias = None
        while True:
            n = self.graph.nodes[i]
            served = n.name in VIEWS | PRODUCTS | CONTRACTIONS | _EXPANDS | _COPIES
            served |= n.name == "dropout" and not drops(n)
            served &= n.single and not n.writes and i < self.end and v in n.operands()
            require(served, f"its values are needed by {n.name}")
            more = [ref for ref in n.operands() if ref != v]
            bias = more.pop(0 if n.name == "addmm" else 1) if len(more) == 2 else bias
            require(len(more) + (other is not None) < 2, "no contraction with a vector")
            other = more[0] if more else other
            ids.add(i)
            v = n.out[0]
            if n.name in CONTRACTIONS and other is not None:
                return ids, v, other, bias
            later = [j for j in self.graph.values[v].users if j > i]
            require(later, "no contraction with a vector")
            i = later[0]

    def contraction_of_masked(self, v: int) -> bool:
        """As :meth:`contraction`, of a product with one factor a row; False where it is none."""
        graph = self.graph
        users = [graph.nodes[i] for i in graph.values[v].users if i < self.end]
        products = [n for n in users if n.name in PRODUCTS and n.single and not n.writes]
        others = [ref for n in products[:1] for ref in n.operands() if ref != v]
        if len(others) != 1:
            return False
        (by,), (out,) = others, products[0].out
        ids, (leaf, *_) = trace_back(
            graph, by, self.pinned, lambda _, n: n.name in VIEWS | _EXPANDS
        )
        index = self.run(ids, {leaf: self.indices(leaf)}, by)
        self.contraction(out)
        alike = self.shape(v) == self.shape(out) and len(self.p.vector_starts) == 1
        require(alike, "is multiplied")
        rows = by_row(index.expand(self.shape(v)), self.axis)[self.rows].long()
        require((rows == rows[:, :1]).all(), "is multiplied")
        self.p.deferred |= {*ids, int(graph.values[out].maker or 0)}
        self.p.masks.append(ScoreMask(leaf, "factor", rows[:, 0]))
        return True

    def contraction(self, summed: int) -> None:
        """Forward from what is activated to its product with a vector, the scores."""
        p, users = self.p, self.graph.values[summed].users
        require(users, "its values are kept")
        for user in users:
            try:
                ids, p.scores, vector, bias = self.to_contraction(user, summed)
                break
            except NotFusable:
                if user == users[-1]:
                    raise
        p.score_ops = [] if bias is None else [("+", bias)]
        (self.axis, rows), (axis, vectors) = self.contracted(ids, summed, vector, p.scores, bias)
        self.rows, self.index = rows.reshape(-1), torch.arange(rows.numel()).view(rows.shape)
        more, [(p.vector, every, _)] = self.parts(vector, axis, 1)
        p.hidden = every.shape[1]
        require(p.hidden > 1, "has one hidden feature")
        elements = every[vectors.reshape(-1)]
        require((elements.diff() == 1).all(), "no vector in a row")
        begins, self.vector_index = elements[:, 0].unique(return_inverse=True)
        p.vector_starts = begins.tolist()
        require(len(begins) <= _MAX_VECTORS, "many vectors")
        once = (self.rows * len(begins) + self.vector_index).unique()
        require(len(once) == len(self.rows), "is summed twice")
        p.deferred |= ids | more
        p.end = max(ids)

    def addends(self, total: int) -> list[Addend]:
        """Back from the sum under the activation: its addends, and what projects them."""
        addends: list[Addend] = []
        ids, leaves = trace_back(self.graph, total, self.pinned)
        require(len(leaves) < 7, "too many addends")
        self.p.deferred |= ids
        for v, elements, factor in self.elements(ids, leaves, total):
            require((elements >= 0).all(), "not all of it is added to")
            rows = by_row(elements, self.axis)[self.rows]
            try:
                require(factor == 1.0, "is scaled")
                addends += self.projected(v, rows)
            except (NotFusable, RuntimeError):
                addends.append(Addend(v, rows, factor))
        return addends

    def projected(self, v: int, index: Tensor) -> list[Addend]:
        """The addends that a product with a matrix stands for."""
        graph, i = self.graph, self.graph.values[v].maker
        users = {j for j in graph.values[v].users if v in graph.nodes[j].operands()}
        if i is None or i in self.pinned or len(users) > 1:
            raise NotFusable("is needed")
        node, refs = graph.nodes[i], list(dict.fromkeys(graph.nodes[i].refs))
        usual = node.name in CONTRACTIONS and node.single and not node.writes
        require(usual and 1 < len(refs) < 4, "is no product")
        bias = refs.pop(0 if node.name == "addmm" else 2) if len(refs) == 3 else None
        x, w = refs
        (d, rows), (e, outs) = self.contracted({i}, x, w, v, bias)
        rows, outs = rows.reshape(-1)[index], outs.reshape(-1)[index]
        if not (rows == rows[:, :1]).all():
            x, d, rows, w, e, outs = w, e, outs, x, d, rows
        more, [(source, w_index, _)] = self.parts(w, e, 1)
        begins = w_index[:, 0][outs]  # it may be repeated
        require((rows == rows[:, :1]).all() and (begins == begins[:1]).all(), "is no product")
        if bias is not None:
            feed = self.zeros(refs) | {bias: self.indices(bias)}
            elements = self.run({i}, feed, v).reshape(-1)[index]
            require((elements == torch.arange(self.p.hidden)).all(), "adds something else")
        ids, parts = self.parts(x, d, 0 if self.joined else MAX_PARTS)
        self.p.deferred |= {i} | more | ids
        rows, w_index = rows[:, 0], w_index[outs[0]]
        addends = [Addend(y, part[rows], 1.0, source, w_index[:, c]) for y, part, c in parts]
        addends[0].bias = bias
        return addends

    def context(self) -> None:
        """A contraction of the weights with values."""
        p = self.p
        assert p.weights is not None
        require(len(p.vector_starts) == 1, "several vectors")
        why = "nothing is weighed"
        for first in self.graph.values[p.weights].users:
            try:
                ids, out, values, _ = self.to_contraction(first, p.weights)
                self.weighted_sum(ids, values, out)
                path = self.views_of_weights(ids)
            except _ERRORS as error:  # what torch says of other shapes explains nothing
                said = isinstance(error, NotFusable) and "output" not in str(error)
                why = str(error) if said else why
                continue
            p.context, p.values, p.end = out, values, max(ids)
            p.deferred |= ids
            self.find_read_view(path)
            return
        raise NotFusable(why)

    def views_of_weights(self, ids: set[int]) -> list[int]:
        """The weights, and views of them on the way to the context."""
        path = [int(self.p.weights or 0)]
        for i in sorted(ids):
            n = self.graph.nodes[i]
            if n.name not in CONTRACTIONS | PRODUCTS and n.operands()[0] == path[-1]:
                path.append(n.out[0])
        return path

    def find_read_view(self, path: list[int]) -> None:
        """The view of the weights that others read becomes the weights of the piece."""
        p, values, calls = self.p, self.graph.values, {*self.p.deferred, self.p.end}
        read = [v for v in path if not calls.issuperset(values[v].users)]
        if not self.graph.nodes[p.anchor].state.grad or read in ([], path[:1]):
            return
        require(len(read) == 1, "several views of its weights are read")
        ids = {int(values[v].maker or 0) for v in path[1 : path.index(read[0]) + 1]}
        elements = self.run(ids, {path[0]: self.indices(path[0])}, read[0])
        require(elements.numel() == len(self.vector_index), "its weights are repeated")
        order, _ = p.weights_axes
        index = torch.arange(len(self.vector_index)).view(p.sizes).permute(order).reshape(-1)
        p.weights = read[0]
        p.weights_axes = self.axes_of(read[0], index[elements.long().reshape(-1)])

    def weighted_sum(self, ids: set[int], values: int, out: int) -> None:
        """Which axes are which where ``out`` is the weighted sum of values: tried on numbers."""
        p = self.p
        sizes, (weights_order, shape) = iter(p.sizes), p.weights_axes
        b, q, k = (math.prod(itertools.islice(sizes, n)) for n in p.groups)
        w = torch.rand(b, q, k, dtype=torch.float64, generator=self.generator)
        weights, x = w.view(p.sizes).permute(weights_order).reshape(shape), self.random(values)
        result = self.run(ids, {int(p.weights or 0): weights, values: x}, out)
        x = x.squeeze()
        require(x.numel() % (b * k) == 0, "is no weighted sum")
        for values_order in itertools.permutations(range(x.dim())):
            context = torch.bmm(w, x.permute(values_order).reshape(b, k, -1))
            for order in itertools.permutations(range(3)):
                y = context.permute(order)
                if y.numel() == result.numel() and torch.allclose(y.reshape(result.shape), result):
                    p.values_axes = [*values_order], [*x.shape]
                    p.context_axes = [*order], [*result.shape]
                    return
        raise NotFusable("is no weighted sum")

    def check_order(self) -> None:
        """Nobody reads what is deferred, or writes to what it needs, before the operator runs."""
        graph, p, values = self.graph, self.p, self.graph.values
        calls = {*p.deferred, p.end}
        inputs = {p.values, *(mask.number for mask in p.masks), *p.assumed_binary}
        for i in sorted(calls, reverse=True):  # what others need, too, runs at once
            out, single = graph.nodes[i].out, graph.nodes[i].single
            elsewhere = not all(calls.issuperset(values[v].users) for v in out)
            if i < p.anchor and (inputs.intersection(out) or elsewhere or not single):
                calls.discard(i)
                p.immediate.add(i)
        p.deferred = calls - {p.end}
        require(values[self.total].maker in calls, "its sum is needed")
        require(not calls & self.pinned, "autocast or gradients change within it")
        self.check_readers(calls, inputs)
        self.check_writers(calls)

    def check_readers(self, calls: set[int], inputs: set[int]) -> None:
        """Others read nothing but the weights, and views of them; the operator runs before."""
        graph, p, values = self.graph, self.p, self.graph.values
        outputs = {p.weights} if p.context is not None else set()
        p.insert_before = p.end
        for i in sorted(p.deferred):
            n = graph.nodes[i]
            outputs.update(n.out if outputs.intersection(n.refs) else ())
            early = [j for v in n.out if v in outputs for j in values[v].users if j not in calls]
            p.insert_before = min([p.insert_before, *early])
        makers = [values[v].maker for v in inputs if v >= 0]
        late = [i for i in makers if i is not None and i >= p.insert_before and i not in calls]
        require(not late, "its weights are needed early")
        for i in sorted(p.deferred):
            n = graph.nodes[i]
            for v in (*n.out, *(after for _, after in n.writes)):
                others = {*values[v].users} - calls
                p.weight_views |= {i} if others and v in outputs - {p.weights} else set()
                names = ", ".join(graph.nodes[j].name for j in others)
                require(v in outputs or not others, f"its values are needed by {names}")

    def check_writers(self, calls: set[int]) -> None:
        """Others write to nothing that the operator reads, or that is read before it."""
        graph, p, values = self.graph, self.p, self.graph.values
        inputs = {v.storage for v in values if v.maker is None}
        read_by = {i: self.storages(graph.nodes[i].refs) for i in calls | p.immediate}
        for i in {*range(min(read_by), p.end)} - calls:
            written = self.storages(v for v, _ in graph.nodes[i].writes)
            before = {j for j in calls if j < i and read_by[j] & written}
            # What was read before might be the same as an input in another call.
            unread = all(j < p.anchor for j in before) and not written & inputs
            require(unread, "something is written to")
            if before - self.pinned:
                self.pinned |= before
                raise _Written
        # The operator saves what it reads, where a call may have saved a copy.
        outer = [v for i in calls for v in graph.nodes[i].refs if values[v].maker not in calls]
        later = self.storages(v for n in graph.nodes[p.end :] for v, _ in n.writes)
        saved = self.storages(outer) if graph.nodes[p.anchor].state.grad else set()
        require(not saved & later, "what it reads is written to later")
        for i in [i for i in calls if graph.nodes[i].writes]:
            written = self.storages(v for v, _ in graph.nodes[i].writes)
            alike = [v for v in values if v.storage in written and v.maker not in calls]
            read = any(v.maker is None or max(v.users, default=0) > i for v in alike)
            require(not read, "what it writes to is read")

    def storages(self, numbers: Iterable[int]) -> set[int | None]:
        """Where tensors are that are not gone."""
        return {self.graph.values[v].storage for v in numbers} - {None}
