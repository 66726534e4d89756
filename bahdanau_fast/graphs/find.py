"""Finding additive attention in what a call did, back and forth from an activation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Graph, Left, Node, Sizes, need
from bahdanau_fast.graphs.probe import CONTRACTIONS, PRODUCTS, VIEWS, back, by_row
from bahdanau_fast.graphs.softmax import Mask, Softmax

__all__ = ["Addend", "Piece", "Place", "find", "summed"]

# Scores that are made of one sum, at most: more are logits over something.
_VECTORS = 16

_REPEATS = {"expand", "expand_as", "broadcast_to", "repeat", "type_as", "to", "clone"}

#: An order of axes, and the shape that they are brought to then.
Way = tuple[list[int], list[int]]


class Place(NamedTuple):
    """How a tensor is brought to some axes of the scores, with its features behind them."""

    first: list[int]  # it is reshaped to this, of size one where it lacks an axis,
    turn: list[int]  # its axes are put into this order,
    whole: list[int]  # and are repeated to this


@dataclass
class Addend:
    """One of the sum: ``factor * x``, or ``x @ w.T + bias``."""

    x: int
    rows: Tensor  # (scores, features): which element of x each score has at each feature
    factor: float = 1.0
    w: int | None = None
    w_at: Tensor | None = None  # (H, features): which elements of w the weight has
    bias: int | None = None
    key: bool = False  # of the keys
    place: Any = None  # its Place among the axes of queries, or of keys


@dataclass
class Piece:
    """Additive attention in a graph: what is put off, where the operator runs, and on what.

    Tensors are numbers, sizes are small ones. Scores are (b,tq,tk); several vectors are the first
    axis of b.
    """

    at: int  # the activation
    activation: str
    slope: float
    activated: int
    addends: list[Addend] = field(default_factory=list)
    late: set[int] = field(default_factory=set)  # calls that are put off
    before: set[int] = field(default_factory=set)  # calls of it that others need, made at once
    end: int = -1  # the last call
    first: int = -1  # the call before which the operator runs
    vector: int = -1
    vectors_at: list[int] = field(default_factory=list)  # the first element of each
    hidden: int = 0
    sizes: list[int] = field(default_factory=list)  # axes of the scores: batch, queries, keys
    groups: list[int] = field(default_factory=list)  # how many axes of each
    after: list[tuple[str, Any]] = field(default_factory=list)  # follows the scores
    masks: list[tuple[Mask, Place]] = field(default_factory=list)
    fill: float | None = None
    exact: bool = True  # the operator has what plain code has for rows with nothing to look at
    assumed: set[int] = field(default_factory=set)  # tensors that hold nothing but zero and one
    scores: int = -1
    weights: int | None = None
    context: int | None = None
    values: int = -1
    scores_way: Way = ([], [])
    weights_way: Way = ([], [])
    context_way: Way = ([], [])  # of (b,tq,features)
    values_way: Way = ([], [])  # to be (b,tk,features)
    certain: bool = True  # the operator has it for all inputs
    truths: set[int] = field(default_factory=set)  # calls that make masks of truths
    rest: str = ""  # why what follows the scores is none of it
    views: set[int] = field(default_factory=set)  # calls that view weights for others, too


def summed(graph: Graph, at: int) -> tuple[bool, bool]:
    """Whether a call activates a sum of several things, and one that repeats some of them."""
    todo = graph.nodes[at].refs()[:1]
    several = repeats = False
    rows = math.prod(graph.values[todo[0]].shape[:-1]) if todo else 0
    for v in todo:
        leaves = back(graph, v)[1]
        several |= len(leaves) > 1
        for value in [graph.values[leaf] for leaf in leaves]:
            fewer = value.shape and math.prod(value.shape[:-1]) < rows
            repeats |= bool(fewer) and not value.constant
            if value.maker is not None and len(todo) < 16:
                node = graph.nodes[value.maker]
                todo += node.refs() if node.name in CONTRACTIONS else ()
    return several, repeats


class _Written(Exception):
    """What calls read, which are pinned now, is written to before the operator would run."""


def find(
    graph: Graph, at: int, sizes: Sizes, calls: range | None = None, checked: bool = False
) -> Piece:
    """The additive attention around an activation, in some calls; it may be ``checked`` in each."""
    calls = range(len(graph.nodes)) if calls is None else calls
    now = graph.nodes[at].state  # another one is inside an autograd.Function, or without gradients
    others = {i for i in calls if graph.nodes[i].state != now or graph.nodes[i].pinned}
    pinned = {*range(calls.start), *others}
    need(at not in pinned, "gradients are saved otherwise within it")
    while True:
        finder = _Finder(graph, at, sizes, pinned, calls.stop, checked)
        try:
            return finder.piece()
        except _Written:
            continue
        except Left as why:
            why.near = finder.near
            raise


class _Finder(Softmax):
    """The steps of :func:`find`."""

    def __init__(
        self, graph: Graph, at: int, sizes: Sizes, pinned: set[int], end: int, checked: bool
    ) -> None:
        super().__init__(graph, sizes, pinned)
        node, self.end, self.near, self.checked = graph.nodes[at], end, False, checked
        numbers = [x for x in (*node.args[1:2], *node.kwargs.values()) if type(x) in (int, float)]
        self.p = Piece(at, node.name, float([*numbers, 0.01][0]), node.out[0], late={at})
        self.total = int(node.refs()[0])
        self.masks: list[Mask] = []
        self.key_at: Tensor | None = None

    def piece(self) -> Piece:
        self.near = not self.graph.values[self.p.activated].numel
        need(not self.near, "has no elements")
        self.contraction()
        self.sum()
        # One key shows no broadcast, more of them may.
        maps, n = [each.rows[:, 0] for each in self.p.addends], len(self.rows.unique())
        self.near = 1 in self.shape(self.total) or any(1 < len(m.unique()) < n for m in maps)
        scores = replace(self.p, late={*self.p.late}, after=[*self.p.after], before=set())
        try:
            self.softmax()
            self.axes()
            self.context()
            self.may_run()
        except (Left, RuntimeError, LookupError, TypeError, ValueError) as why:  # scores alone
            self.p, self.masks, self.key_at = scores, [], None
            self.p.rest = str(why)
            self.axes()
            self.may_run()
        return self.p

    def chain(self, i: int, v: int) -> tuple[set[int], int, int, int | None]:
        """From a call to a contraction: the calls, its result, what it is with, and a bias."""
        ids: set[int] = set()
        other = bias = None
        while True:
            n = self.graph.nodes[i]
            known = n.name in VIEWS | PRODUCTS | CONTRACTIONS | _REPEATS
            known |= n.name == "dropout" and not _drops(n)
            known &= n.single and not n.writes and i < self.end and v in n.operands()
            need(known, f"its values are needed by {n.name}")
            more = [ref for ref in n.operands() if ref != v]
            bias = more.pop() if len(more) == 2 else bias
            need(len(more) + (other is not None) < 2, "no contraction with a vector")
            other = more[0] if more else other
            ids.add(i)
            v = n.out[0]
            if n.name in CONTRACTIONS and other is not None:
                return ids, v, other, bias
            later = [j for j in self.graph.values[v].users if j > i]
            need(later, "no contraction with a vector")
            i = later[0]

    def contraction(self) -> None:
        """Forward from the activation to its sum against a vector."""
        p, users = self.p, self.graph.values[self.p.activated].users
        need(users, "its values are kept")
        for user in users:
            try:
                ids, p.scores, vector, bias = self.chain(user, p.activated)
                break
            except Left:
                if user == users[-1]:
                    raise
        p.after = [] if bias is None else [("+", bias)]
        (self.axis, rows), (axis, vectors) = self.contracted(
            ids, p.activated, vector, p.scores, bias
        )
        self.rows, self.index = rows.reshape(-1), torch.arange(rows.numel()).view(rows.shape)
        more, [(p.vector, every, _)] = self.parts(vector, axis, 1)
        p.hidden = every.shape[1]
        need(p.hidden > 1, "has one hidden feature")
        own = every[vectors.reshape(-1)]
        need((own.diff() == 1).all(), "no vector in a row")
        begins, self.which = own[:, 0].unique(return_inverse=True)
        p.vectors_at = begins.tolist()
        need(len(p.vectors_at) <= _VECTORS, "many vectors")
        once = (self.rows * len(begins) + self.which).unique()
        need(len(once) == len(self.rows), "is summed twice")
        p.late |= ids | more
        p.end = max(ids)

    def sum(self) -> None:
        """Back from the activation: the addends, and what projects them."""
        ids, leaves = back(self.graph, self.total, self.pinned)
        need(len(leaves) < 7, "too many addends")
        self.p.late |= ids
        for v, at, factor in self.elements(ids, leaves, self.total):
            need((at >= 0).all(), "not all of it is added to")
            rows = by_row(at, self.axis)[self.rows]
            try:
                need(factor == 1.0, "is scaled")
                self.p.addends += self.projected(v, rows)
            except (Left, RuntimeError):
                self.p.addends.append(Addend(v, rows, factor))

    def projected(self, v: int, at: Tensor) -> list[Addend]:
        """The addends that a product with a matrix stands for."""
        graph, i = self.graph, self.graph.values[v].maker
        users = {j for j in graph.values[v].users if v in graph.nodes[j].operands()}
        if i is None or i in self.pinned or len(users) > 1:
            raise Left("is needed")
        node, refs = graph.nodes[i], list(dict.fromkeys(graph.nodes[i].refs()))
        usual = node.name in CONTRACTIONS and node.single and not node.writes
        need(usual and 1 < len(refs) < 4, "is no product")
        bias = refs.pop(0 if node.name == "addmm" else 2) if len(refs) == 3 else None
        x, w = refs
        (d, rows), (e, outs) = self.contracted({i}, x, w, v, bias)
        rows, outs = rows.reshape(-1)[at], outs.reshape(-1)[at]
        if not (rows == rows[:, :1]).all():
            x, d, rows, w, e, outs = w, e, outs, x, d, rows
        more, [(source, w_at, _)] = self.parts(w, e, 1)
        begins = w_at[:, 0][outs]  # it may be repeated
        need((rows == rows[:, :1]).all() and (begins == begins[:1]).all(), "is no product")
        if bias is not None:
            feed = self.zeros(refs) | {bias: self.numbers(bias)}
            elements = self.run({i}, feed, v).reshape(-1)[at]
            need((elements == torch.arange(self.p.hidden)).all(), "adds something else")
        ids, parts = self.parts(x, d)
        self.p.late |= {i} | more | ids
        rows, w_at = rows[:, 0], w_at[outs[0]]
        made = [Addend(y, y_at[rows], 1.0, source, w_at[:, c]) for y, y_at, c in parts]
        made[0].bias = bias
        return made

    def softmax(self) -> None:
        """Behind the scores: numbers, masks, softmax."""
        p, w = self.p, self.weighing(self.p.scores, self.index)
        p.late |= {p.end} | w.ids
        self.index, self.key_at, self.masks = w.index, w.key_at, w.masks
        p.after, p.fill, p.weights = p.after + w.after, w.fill, w.weights
        p.exact, p.assumed, p.truths = w.exact, w.assumed, w.truths
        p.certain = p.exact and all(mask.hides in ("true", "false") for mask in w.masks)
        need(self.checked or (p.certain and not p.assumed), "its mask is not of truths alone")

    def axes(self) -> None:
        """Who is a query, who a key: by the axes of the scores along which each addend changes."""
        p = self.p
        maps = [each.rows[:, 0] for each in p.addends]
        self.sizes_apart = sizes = self.taken_apart([*maps, self.which])
        vectors = self.varies(self.which)
        axes = [self.varies(m) - vectors for m in maps]
        broad = {
            s for s, e in zip(axes, p.addends, strict=True)
            if s or e.w is not None or not self.graph.values[e.x].constant
        }  # fmt: skip
        need(len(broad) > 1, "nothing is broadcast, or there is no query")
        if self.key_at is not None:
            over = self.varies(self.key_at)
            keys = frozenset[int]().union(*(s for s in broad if s & over))
            queries = frozenset[int]().union(*(s for s in broad if not s & over))
            need(over == keys - queries, "softmax is over something else")
        else:
            largest = [s for s in {*axes} if not any(s < other for other in axes)]
            largest.sort(key=lambda s: sorted(s)[::-1])  # keys are behind queries
            need(len(largest) < 3, "more than queries and keys")
            keys, others = largest[-1], broad - {largest[-1]}
            queries = largest[0] if len(largest) > 1 else frozenset().union(*others)
            queries = max(others, key=len) if queries == keys else queries
        every = queries | keys | vectors == {*range(len(sizes))} and len(vectors) < 2
        need(every and keys - queries, "nothing is broadcast")
        groups = [*vectors, *sorted(queries & keys)], sorted(queries - keys), sorted(keys - queries)
        order = [d for group in groups for d in group]
        p.sizes, p.groups = [sizes[d] for d in order], [*map(len, groups)]
        for each, own in zip(p.addends, axes, strict=True):
            each.key = not own <= queries
            each.place = self.placed(each.rows, groups[0] + groups[2 if each.key else 1])
        p.masks = [(mask, self.placed(mask.at[:, None], order)) for mask in self.masks]
        at = torch.arange(len(self.which)).view(p.sizes)
        at = at.permute([order.index(d) for d in range(len(sizes))]).reshape(-1)
        p.scores_way = self.way(p.scores, at)
        if p.weights is not None:
            p.weights_way = self.way(p.weights, at[self.index.reshape(-1)])

    def way(self, number: int, at: Tensor) -> Way:
        """How scores (b,tq,tk) become a tensor of the elements ``at``."""
        places = torch.empty(len(at), dtype=torch.long)
        places[at] = torch.arange(len(at))
        return _order(places.view(self.p.sizes)), [*self.shape(number)]

    def varies(self, m: Tensor) -> frozenset[int]:
        """The axes of the scores along which something changes."""
        m = m.view(self.sizes_apart)
        return frozenset(d for d in range(m.dim()) if (m.diff(dim=d) != 0).any())

    def taken_apart(self, maps: list[Tensor]) -> list[int]:
        """Sizes of the axes of the scores, those that hold several taken apart."""
        sizes, d = [n for n in self.shape(self.p.scores) if n != 1], 0
        while d < len(sizes):
            for m in maps:
                r = m.view(sizes).movedim(d, 0).reshape(sizes[d], -1)[:, 0]
                if 1 < len(r.unique()) < len(r):
                    step = int((r != r[0]).nonzero()[0])
                    step = step if step > 1 else int((r[1:] == r[0]).nonzero()[0]) + 1
                    need(len(r) % step == 0, "its rows are picked")
                    sizes[d : d + 1] = [len(r) // step, step]
                    break
            else:
                d += 1
        return sizes

    def placed(self, rows: Tensor, dims: list[int]) -> Place:
        """How the tensor with these elements is brought to the axes ``dims``."""
        sizes, own = self.sizes_apart, self.varies(rows[:, 0])
        others = [d for d in range(len(sizes)) if d not in dims]
        where = [slice(None) if d in own else slice(1) for d in dims] + [0] * len(others)
        a = rows.view(*sizes, -1).permute(*dims, *others, -1)[tuple(where)]
        order = _order(a)
        first, turn = [a.shape[d] for d in order], [order.index(d) for d in range(a.dim())]
        return Place(first, turn, [sizes[d] for d in dims])

    def context(self) -> None:
        """A contraction of the weights with values."""
        p = self.p
        assert p.weights is not None
        need(len(p.vectors_at) == 1, "several vectors")
        why = "nothing is weighed"
        for first in self.graph.values[p.weights].users:
            try:
                ids, out, values, _ = self.chain(first, p.weights)
                self.weighs(ids, values, out)
                path = self.path(ids)
            except (Left, RuntimeError, LookupError, TypeError) as error:
                why = why if "output" in str(error) else str(error)
                continue
            p.context, p.values, p.end = out, values, max(ids)
            p.late |= ids
            self.hand_out(path)
            return
        raise Left(why)

    def path(self, ids: set[int]) -> list[int]:
        """The weights, and views of them on the way to the context."""
        found = [int(self.p.weights or 0)]
        for i in sorted(ids):
            n = self.graph.nodes[i]
            if n.name not in CONTRACTIONS | PRODUCTS and n.operands()[0] == found[-1]:
                found.append(n.out[0])
        return found

    def hand_out(self, path: list[int]) -> None:
        """Which view of the weights the context is made of where others hold one."""
        p, values, own = self.p, self.graph.values, {*self.p.late, self.p.end}
        read = [v for v in path if not own.issuperset(values[v].users)]
        if not self.graph.nodes[p.at].state.grad or read in ([], path[:1]):
            return
        need(len(read) == 1, "several views of its weights are read")
        ids = {int(values[v].maker or 0) for v in path[1 : path.index(read[0]) + 1]}
        places = self.run(ids, {path[0]: self.numbers(path[0])}, read[0])
        need(places.numel() == len(self.which), "its weights are repeated")
        order, _ = p.weights_way
        at = torch.arange(len(self.which)).view(p.sizes).permute(order).reshape(-1)
        p.weights, p.weights_way = read[0], self.way(read[0], at[places.long().reshape(-1)])

    def weighs(self, ids: set[int], values: int, out: int) -> None:
        """Which axes are which where ``out`` is the weighted sum of values: tried on numbers."""
        p = self.p
        sizes, (turned, layout) = iter(p.sizes), p.weights_way
        b, q, k = (math.prod(itertools.islice(sizes, n)) for n in p.groups)
        w = torch.rand(b, q, k, dtype=torch.float64, generator=self.generator)
        weights, x = w.view(p.sizes).permute(turned).reshape(layout), self.random(values)
        got = self.run(ids, {int(p.weights or 0): weights, values: x}, out)
        shape = [n for n in x.shape if n != 1]
        need(x.numel() % (b * k) == 0, "is no weighted sum")
        for turn in itertools.permutations(range(len(shape))):
            mine = torch.bmm(w, x.reshape(shape).permute(turn).reshape(b, k, -1))
            for order in itertools.permutations(range(3)):
                seen = mine.permute(order)
                if seen.numel() == got.numel() and torch.allclose(seen.reshape(got.shape), got):
                    p.values_way, p.context_way = ([*turn], shape), ([*order], [*got.shape])
                    return
        raise Left("is no weighted sum")

    def may_run(self) -> None:
        """Nobody reads what is put off, or writes to what it needs, before the operator runs."""
        graph, p, values = self.graph, self.p, self.graph.values
        own = {*p.late, p.end}
        needed = {p.values, *(mask.number for mask, _ in p.masks), *p.assumed}
        for i in sorted(own, reverse=True):  # what others need, too, is made at once
            out, single = graph.nodes[i].out, graph.nodes[i].single
            read = needed.intersection(out) or not all(own.issuperset(values[v].users) for v in out)
            if i < p.at and (read or not single):
                own.discard(i)
                p.before.add(i)
        p.late = own - {p.end}
        need(values[self.total].maker in own, "its sum is needed")
        need(not own & self.pinned, "autocast or gradients change within it")
        soft = {p.weights} if p.context is not None else set()
        p.first = p.end
        for i in sorted(p.late):
            n = graph.nodes[i]
            soft.update(n.out if soft.intersection(n.refs()) else ())
            early = [j for v in n.out if v in soft for j in values[v].users if j not in own]
            p.first = min([p.first, *early])
        made = [values[v].maker for v in needed if v >= 0]
        late = [i for i in made if i is not None and i >= p.first and i not in own]
        need(not late, "its weights are needed early")
        for i in sorted(p.late):
            n = graph.nodes[i]
            for v in (*n.out, *(after for _, after in n.writes)):
                others = {*values[v].users} - own
                fine = v in soft
                p.views |= {i} if others and v in soft - {p.weights} else set()
                names = ", ".join(graph.nodes[j].name for j in others)
                need(fine or not others, f"its values are needed by {names}")
        given = {v.storage for v in values if v.maker is None}
        read_at = {i: self.storages(graph.nodes[i].refs()) for i in own | p.before}
        for i in {*range(min(read_at), p.end)} - own:
            wrote = self.storages(v for v, _ in graph.nodes[i].writes)
            before = {j for j in own if j < i and read_at[j] & wrote}
            # What was there before might be the same as an input in another call.
            need(all(j < p.at for j in before) and not wrote & given, "something is written to")
            if before - self.pinned:
                self.pinned |= before
                raise _Written
        # The operator saves what it reads, where a call may have saved a copy.
        outer = [v for i in own for v in graph.nodes[i].refs() if values[v].maker not in own]
        later = self.storages(v for n in graph.nodes[p.end :] for v, _ in n.writes)
        saved = self.storages(outer) if graph.nodes[p.at].state.grad else set()
        need(not saved & later, "what it reads is written to later")
        for i in [i for i in own if graph.nodes[i].writes]:
            wrote = self.storages(v for v, _ in graph.nodes[i].writes)
            alike = [v for v in values if v.storage in wrote and v.maker not in own]
            need(not any(v.maker is None or max(v.users, default=0) > i for v in alike),
                 "what it writes to is read")  # fmt: skip

    def storages(self, numbers: Iterable[int]) -> set[int | None]:
        """Where tensors are that are not gone."""
        return {self.graph.values[v].storage for v in numbers} - {None}


def _drops(n: Node) -> bool:
    """Whether a dropout drops anything."""
    named = {"p": 0.5, "training": True, **dict(zip(("p", "training"), n.args[1:], strict=False))}
    named |= n.kwargs
    return bool(named["p"] and named["training"])


def _order(a: Tensor) -> list[int]:
    """The axes of consecutive numbers, as they lie in memory."""
    for order in itertools.permutations(range(a.dim())):
        if torch.equal(a.permute(order).reshape(-1), torch.arange(a.numel())):
            return list(order)
    raise Left("its rows are picked")
