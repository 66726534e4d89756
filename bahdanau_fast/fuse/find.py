"""Finding additive attention in what a call did, back and forth from an activation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast.fuse.graph import ACTIVATIONS, Graph, Left, Sizes, need
from bahdanau_fast.fuse.probe import CONTRACTIONS, PRODUCTS, QUOTIENTS, VIEWS, Probe, back

__all__ = ["Addend", "Piece", "Place", "find", "summed"]

# A filled score of at most this is hidden by the softmax.
_HIDDEN = -1e4
# Scores that are made of one sum, at most: more are logits over something.
_VECTORS = 16

#: An order of axes, and the shape that they are brought to then.
Way = tuple[list[int], list[int]]


def _no_way() -> Way:
    return [], []


class Place(NamedTuple):
    """How a tensor is brought to some axes of the scores, with its features behind them."""

    first: list[int]  # it is reshaped to this,
    turn: list[int]  # its axes are put into this order,
    own: list[int]  # those that it lacks get a size of one,
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
    end: int = -1  # the call in place of which the operator runs
    vector: int = -1
    vectors_at: list[int] = field(default_factory=list)  # the first element of each
    hidden: int = 0
    sizes: list[int] = field(default_factory=list)  # axes of the scores: batch, queries, keys
    groups: tuple[int, int, int] = (0, 0, 0)  # how many axes of each
    after: list[tuple[str, Any]] = field(default_factory=list)  # follows the scores
    masks: list[tuple[int, Place]] = field(default_factory=list)
    fill: float | None = None
    scores: int = -1
    weights: int | None = None
    context: int | None = None
    values: int = -1
    scores_way: Way = field(default_factory=_no_way)
    weights_way: Way = field(default_factory=_no_way)
    context_way: Way = field(default_factory=_no_way)  # of (b,tq,features)
    # To be (b,tk,features), or those of each vector.
    values_way: Way = field(default_factory=_no_way)
    soft: set[int] = field(default_factory=set)  # weights and views of them, which others may read

    def length(self, group: int) -> int:
        """b, tq or tk."""
        begin = sum(self.groups[:group])
        return math.prod(self.sizes[begin : begin + self.groups[group]])


def summed(graph: Graph, at: int) -> tuple[bool, bool]:
    """Whether a call activates a sum of several things, and one that repeats some of them."""
    todo = graph.nodes[at].refs()[:1]
    several, leaves = False, []
    for v in todo:
        found = back(graph, v)[1]
        several |= len(found) > 1
        makers = [graph.values[leaf].maker for leaf in found if len(todo) < 16]
        nodes = [graph.nodes[i] for i in makers if i is not None]
        todo += [ref for node in nodes if node.name in CONTRACTIONS for ref in node.refs()]
        leaves += [graph.values[leaf] for leaf in found]
    rows = [v.numel // max(v.shape[-1], 1) for v in leaves if v.shape and not v.constant]
    total = graph.values[todo[0]] if todo else None
    return several, total is not None and bool(total.shape) and any(
        n < total.numel // max(total.shape[-1], 1) for n in rows
    )  # fmt: skip


class _Written(Exception):
    """What these calls read is written to before the operator would run."""

    def __init__(self, calls: set[int]) -> None:
        self.calls = calls


def find(graph: Graph, at: int, sizes: Sizes, calls: range, kept: Collection[int] = ()) -> Piece:
    """The additive attention around an activation, in some of the calls.

    Args:
        graph: the calls.
        at: the activation.
        sizes: at which to look.
        calls: of the module.
        kept: those whose results are kept by somebody.

    Raises:
        Left: there is none, or it is of a kind that is not fused.
    """
    need(all(i < at for i in kept), "something of it is kept after the call")
    now = graph.nodes[at].state  # another one is inside an autograd.Function, or without gradients
    pinned = {*range(calls.start), *kept, *(i for i in calls if graph.nodes[i].state != now)}
    while True:
        finder = _Finder(graph, at, sizes, pinned, calls.stop)
        try:
            return finder.piece()
        except _Written as found:
            pinned |= found.calls
        except Left as why:
            why.near = finder.near
            raise


class _Finder(Probe):
    """The steps of :func:`find`."""

    def __init__(self, graph: Graph, at: int, sizes: Sizes, pinned: set[int], end: int) -> None:
        super().__init__(graph, sizes, pinned)
        node, self.end, self.near = graph.nodes[at], end, False
        numbers = [x for x in (*node.args[1:2], *node.kwargs.values()) if type(x) in (int, float)]
        name = ACTIVATIONS[node.name]
        slope = float(numbers[0]) if numbers and name == "leaky_relu" else 0.01
        out = node.writes[0][1] if node.writes else node.out[0]
        self.p = Piece(at, name, slope, out, late={at})
        self.total = int(node.refs()[0])
        self.masks: list[tuple[int, Tensor]] = []
        self.key_at: Tensor | None = None
        self.tail: set[int] = set()

    def piece(self) -> Piece:
        p = self.p
        self.near = not self.graph.values[p.activated].numel
        need(not self.near, "has no elements")
        self.contraction()
        self.sum()
        # One key shows no broadcast, more of them may.
        maps = [each.rows[:, 0] for each in p.addends if not self.is_bias(each)]
        n = len(self.rows.unique())
        broad = any(len(m.unique()) < n for m in maps) or 1 in self.shape(self.total)
        self.near = broad and len(p.vectors_at) <= _VECTORS
        self.softmax()
        self.axes()
        order = p.weights_way[0]
        grad, one = self.graph.nodes[p.at].state.grad, len(p.vectors_at) == 1
        # A gradient of the weights comes through them, which a reshape alone lets it do.
        if p.weights is not None and one and (order == sorted(order) or not grad):
            self.context()
        if p.context is None:
            self.forget_softmax()
        p.late.discard(p.end)
        self.makes_at_once()
        self.may_run()
        return p

    def chain(self, i: int, v: int) -> tuple[set[int], int, int, int | None]:
        """From a call to a contraction: the calls, its result, what it is with, and a bias."""
        ids: set[int] = set()
        other = bias = None
        while len(ids) < 6:
            n = self.graph.nodes[i]
            known = n.name in VIEWS | PRODUCTS | CONTRACTIONS or (
                n.name == "dropout" and n.out[0] == v
            )
            need(known and n.single and not n.writes and i < self.end,
                 f"its values are needed by {n.name}")  # fmt: skip
            more = [ref for ref in n.refs() if ref != v and n.name not in ("view_as", "reshape_as")]
            if n.name in ("linear", "conv1d", "conv2d") and len(more) == 2:
                bias = more.pop()
            need(len(more) + (other is not None) < 2, "no contraction with a vector")
            other = more[0] if more else other
            ids.add(i)
            v = n.out[0]
            if n.name in CONTRACTIONS and other is not None:
                return ids, v, other, bias
            later = [j for j in self.graph.values[v].users if j > i]
            need(later, "no contraction with a vector")
            i = later[0]
        raise Left("no contraction with a vector")

    def contraction(self) -> None:
        """Forward from the activation to its sum against a vector."""
        p, users = self.p, self.graph.values[self.p.activated].users
        need(users, "its values are kept")
        others = []
        for user in users:
            try:
                ids, p.scores, vector, self.bias = self.chain(user, p.activated)
                break
            except Left as why:
                others.append(why)
        else:
            raise others[0]
        self.axis, rows, w_axis, rows_w = self.contracted(
            ids, p.activated, vector, p.scores, self.bias
        )
        self.rows, self.many = rows.reshape(-1), rows.numel()
        more, p.vector, every = self.whole(vector, w_axis)
        p.hidden = every.shape[1]
        need(p.hidden > 1, "has one hidden feature")
        vectors = every[rows_w.reshape(-1)]
        need((vectors.diff() == 1).all(), "no vector in a row")
        begins, self.which = vectors[:, 0].unique(return_inverse=True)
        p.vectors_at = begins.tolist()
        need(len((self.rows * len(begins) + self.which).unique()) == self.many, "is summed twice")
        p.late |= ids | more
        p.end = max(ids)

    def sum(self) -> None:
        """Back from the activation: the addends, and what projects them."""
        ids, leaves = back(self.graph, self.total, self.pinned)
        need(len(leaves) < 7, "too many addends")
        self.p.late |= ids
        for v, at, factor in self.elements(ids, leaves, self.total):
            need((at >= 0).all(), "not all of it is added to")
            rows = at.movedim(self.axis, -1).reshape(-1, self.p.hidden)[self.rows]
            found = self.projected(v, rows) if factor == 1.0 else None
            self.p.addends += found or [Addend(v, rows, factor)]

    def projected(self, v: int, at: Tensor) -> list[Addend] | None:
        """The addends that a product with a matrix stands for; None where it is no such product."""
        graph, p, i = self.graph, self.p, self.graph.values[v].maker
        if i is None or i in self.pinned or len({*graph.values[v].users}) > 1:
            return None
        node, refs = graph.nodes[i], list(dict.fromkeys(graph.nodes[i].refs()))
        usual = node.name in CONTRACTIONS - {"sum"} and node.single and not node.writes
        if not usual or node.hooked or node.state != graph.nodes[p.at].state:
            return None
        bias = refs.pop(0 if node.name == "addmm" else 2) if len(refs) == 3 else None
        for x, w in (refs, refs[::-1]) if len(refs) == 2 else ():
            try:
                d, rows_x, e, rows_w = self.contracted({i}, x, w, v, bias)
            except (Left, RuntimeError):
                return None
            rows, outs = rows_x.reshape(-1)[at], rows_w.reshape(-1)[at]
            more, source, w_at = self.whole(w, e)
            begins = w_at[:, 0][outs]  # it may be repeated
            if (rows == rows[:, :1]).all() and (begins == begins[:1]).all():
                break
        else:
            return None
        ids, parts = self.parts(x, d)
        if any(factor != 1.0 for _, _, factor, _ in parts):
            return None
        rows, w_at = rows[:, 0], w_at[outs[0]]
        found = [Addend(y, y_at[rows], 1.0, source, w_at[:, c]) for y, y_at, _, c in parts]
        if bias is not None:
            n = math.prod(self.shape(bias))
            numbers = torch.arange(1.0, n + 1, dtype=torch.float64).view(self.shape(bias))
            got = self.run({i}, self.zeros(refs) | {bias: numbers}, v)
            elements = got.round().long().reshape(-1)[at] - 1
            if torch.equal(elements, torch.arange(p.hidden).expand_as(elements)):
                found[0].bias = bias
            else:
                found.append(Addend(bias, elements))
        p.late |= {i} | more | ids
        return found

    def softmax(self) -> None:
        """Behind the scores: numbers, masks, softmax."""
        graph, p, v = self.graph, self.p, self.p.scores
        self.forget_softmax()
        self.index = torch.arange(self.many).view(self.shape(v))
        try:
            while p.weights is None:
                i = graph.values[v].users[0]
                n = graph.nodes[i]
                need(len(graph.values[v].users) == 1 and i < self.end, "is read elsewhere")
                need(n.single and not n.hooked and n.refs()[0] == v, "is used otherwise")
                self.follow(i, v)
                self.tail.add(i)
                v = n.writes[0][1] if n.writes else n.out[0]
        except (Left, LookupError):
            self.forget_softmax()

    def follow(self, i: int, v: int) -> None:
        """One call behind the scores."""
        graph, p, n, index = self.graph, self.p, self.graph.nodes[i], self.index
        refs, by = n.refs(), n.args[1] if len(n.args) > 1 else None
        by_one = type(by) in (int, float)
        if len(refs) == 2 and len(n.args) == 2 and not n.kwargs:
            by_one = graph.values[refs[1]].numel == 1 and len(graph.values[refs[1]].shape) < 2
        if n.name in ("masked_fill", "masked_fill_"):
            fill, mask = n.args[2], graph.values[refs[1]]
            need(type(fill) in (int, float) and fill <= _HIDDEN, "fills with what is seen")
            need(mask.dtype is torch.bool and p.fill in (None, float(fill)), "is filled otherwise")
            shape = self.shape(refs[1])
            numbers = torch.arange(math.prod(shape)).view(shape)
            self.masks.append((refs[1], self.of_scores(numbers)))
            p.fill = float(fill)
        elif n.name == "softmax":
            dim = n.args[1] if len(n.args) > 1 else n.kwargs["dim"]
            numbers = torch.arange(index.shape[dim]).view([-1, *[1] * ((-dim - 1) % index.dim())])
            self.key_at, p.weights = self.of_scores(numbers), n.out[0]
        elif n.name in VIEWS and len(refs) == 1:
            self.index = self.run([i], {v: index}, n.out[0])
            need(self.index.numel() == index.numel(), "is cut")
        else:
            adds = n.name in ("add", "__add__") and not n.kwargs
            need(by_one and not self.masks and not n.writes, "is changed otherwise")
            need(adds or n.name in PRODUCTS | QUOTIENTS, "is changed otherwise")
            p.after.append(("+" if adds else "*" if n.name in PRODUCTS else "/", by))

    def of_scores(self, numbers: Tensor) -> Tensor:
        """What is there at each score, of something that broadcasts with them as they are now."""
        found = torch.empty(self.many, dtype=torch.long)
        found[self.index.reshape(-1)] = numbers.expand(self.index.shape).reshape(-1)
        return found

    def forget_softmax(self) -> None:
        """The scores alone."""
        self.p.weights, self.p.fill, self.p.masks = None, None, []
        self.p.after = [] if self.bias is None else [("+", self.bias)]
        self.masks, self.key_at, self.tail = [], None, set()

    def axes(self) -> None:
        """Who is a query, who a key: by the axes of the scores along which each addend changes."""
        p = self.p
        maps = [each.rows[:, 0] for each in p.addends]
        self.sizes_apart = sizes = self.taken_apart([*maps, self.which])
        every, vectors = {*range(len(sizes))}, self.varies(self.which)
        axes = [self.varies(m) for m in maps]
        broad = {s for s, e in zip(axes, p.addends, strict=True) if not self.is_bias(e)}
        need(len(broad) > 1, "nothing is broadcast, or there is no query")
        largest = sorted({s for s in axes if not any(s < other for other in axes)}, key=sorted)
        need(len(largest) < 3, "more than queries and keys")
        keys = largest[-1]
        queries = largest[0] if len(largest) > 1 else frozenset().union(*(broad - {keys}))
        if self.key_at is not None:
            over = self.varies(self.key_at)
            queries, keys = (queries, keys) if over == keys - queries else (keys, queries)
            if over != keys - queries or over & vectors:
                self.forget_softmax()
        ones = {d for d, n in enumerate(sizes) if n == 1}
        need(len(vectors) < 2 and len(p.vectors_at) <= _VECTORS, "many vectors")
        need(queries | keys | vectors | ones == every, "an axis of neither")
        need(keys - queries - vectors, "nothing is broadcast")
        batch = [*vectors, *sorted((queries & keys) - vectors), *ones]
        groups = batch, sorted(queries - keys - vectors), sorted(keys - queries - vectors)
        order = [d for group in groups for d in group]
        p.sizes, p.groups = [sizes[d] for d in order], tuple(map(len, groups))  # type: ignore[assignment]
        for each, own in zip(p.addends, axes, strict=True):
            each.key = not own - vectors <= queries
            each.place = self.placed(each.rows, own, [*batch, *groups[2 if each.key else 1]])
        canon = torch.arange(self.many).view(p.sizes)
        canon = canon.permute([order.index(d) for d in range(len(sizes))]).reshape(-1)
        p.scores_way = self.turned(canon), list(self.shape(p.scores))
        p.masks = [(v, self.placed(m[:, None], self.varies(m), order)) for v, m in self.masks]
        if p.weights is not None:
            p.weights_way = self.turned(canon[self.index.reshape(-1)]), list(self.index.shape)

    def varies(self, m: Tensor) -> frozenset[int]:
        """The axes of the scores along which something changes."""
        m = m.view(self.sizes_apart)
        return frozenset(d for d in range(m.dim()) if (m.diff(dim=d) != 0).any())

    def is_bias(self, each: Addend) -> bool:
        constant = self.graph.values[each.x].constant
        return each.w is None and constant and bool((each.rows == each.rows[:1]).all())

    def taken_apart(self, maps: list[Tensor]) -> list[int]:
        """Sizes of the axes of the scores, those that hold several taken apart."""
        sizes = [n for n in self.shape(self.p.scores) if n != 1] or [1]
        todo = True
        while todo:
            todo = False
            for m, d in itertools.product(maps, range(len(sizes))):
                r = m.view(sizes).movedim(d, 0).reshape(sizes[d], -1)[:, 0]
                if 1 < len(r.unique()) < len(r):
                    runs = int((r != r[0]).nonzero()[0])
                    step = runs if runs > 1 else int((r[1:] == r[0]).nonzero()[0]) + 1
                    need(len(r) % step == 0, "its rows are picked")
                    sizes[d : d + 1] = [len(r) // step, step]
                    todo = True
                    break
        return sizes

    def placed(self, rows: Tensor, own: frozenset[int], dims: list[int]) -> Place:
        """How the tensor with these elements is brought to the axes ``dims``."""
        sizes = self.sizes_apart
        seen = [d for d in dims if d in own]
        a = rows.view(*sizes, -1)[tuple(slice(None) if d in own else 0 for d in range(len(sizes)))]
        a = a.permute([*(sorted(seen).index(d) for d in seen), len(seen)])
        back_to = _turn(a)
        first = [a.shape[back_to.index(i)] for i in range(a.dim())]
        return Place(
            first, back_to, [sizes[d] if d in own else 1 for d in dims], [sizes[d] for d in dims]
        )

    def turned(self, a: Tensor) -> list[int]:
        """The order of axes in which the scores show as ``a``."""
        whole = torch.arange(len(a)).view(self.p.sizes)
        orders = itertools.permutations(range(whole.dim()))
        found = [order for order in orders if torch.equal(whole.permute(order).reshape(-1), a)]
        need(found, "its scores are picked")
        return list(found[0])

    def context(self) -> None:
        """A contraction of the weights with values."""
        p = self.p
        assert p.weights is not None
        for first in self.graph.values[p.weights].users:
            try:
                ids, out, values, _ = self.chain(first, p.weights)
                self.weighs(ids, values, out)
            except (Left, RuntimeError):
                continue
            p.context, p.values, p.end = out, values, max(ids)
            p.late |= self.tail | ids
            return

    def weighs(self, ids: set[int], values: int, out: int) -> None:
        """Which axes are which where ``out`` is the weighted sum of values: tried on numbers."""
        p = self.p
        b, q, k = (p.length(i) for i in range(3))
        w = torch.rand(b, q, k, dtype=torch.float64, generator=self.generator)
        x = self.random(values)
        turned, layout = p.weights_way
        weights = w.view(p.sizes).permute(turned).reshape(layout)
        got = self.run(ids, {p.weights: weights, values: x}, out)  # type: ignore[dict-item]
        shape = [n for n in x.shape if n != 1]
        shared = (
            b if x.numel() // k % b == 0 else b // len(p.vectors_at)
        )  # the same for each vector
        need(x.numel() % (shared * k) == 0, "is no weighted sum")
        for turn in itertools.permutations(range(len(shape))):
            y = x.reshape(shape).permute(turn).reshape(shared, k, -1)
            mine = torch.bmm(w, y.repeat(b // shared, 1, 1))
            for order in itertools.permutations(range(3)):
                seen = mine.permute(order)
                if seen.numel() == got.numel() and torch.allclose(seen.reshape(got.shape), got):
                    p.values_way, p.context_way = (
                        (list(turn), shape),
                        (list(order), list(got.shape)),
                    )
                    return
        raise Left("is no weighted sum")

    def makes_at_once(self) -> None:
        """What is in front of the activation, and needed by others, too, is not put off."""
        p, values = self.p, self.graph.values
        needed = {p.values, *(v for v, _ in p.masks)}
        p.before = {i for i in p.late if not self.graph.nodes[i].single}
        while True:
            p.late -= p.before
            own = {*p.late, p.end}
            read = {
                i for i in p.late if i < p.at for v in self.graph.nodes[i].out
                if v in needed or not own.issuperset(values[v].users)
            }  # fmt: skip
            if not read:
                break
            p.before |= read
        need(values[self.total].maker in p.late, "its sum is needed")

    def may_run(self) -> None:
        """Nobody reads what is put off, or writes to what it needs, before the operator runs."""
        graph, p, own = self.graph, self.p, {*self.p.late, self.p.end}
        if p.context is not None:
            p.soft = {p.weights}  # type: ignore[arg-type]
            for i in sorted(p.late):
                p.soft |= {*graph.nodes[i].out} if p.soft & {*graph.nodes[i].refs()} else set()
        now = graph.nodes[p.end].state
        for i in own:
            node = graph.nodes[i]
            need(node.state == now and not node.hooked, "autocast or gradients change within it")
            for v in (*node.out, *(after for _, after in node.writes)) if i != p.end else ():
                others = {j for j in graph.values[v].users if j not in own}
                fine = v in p.soft and all(j > p.end for j in others)
                need(fine or not others, "its values are needed by "
                     + ", ".join(graph.nodes[j].name for j in others))  # fmt: skip
        storage = [value.storage for value in graph.values]
        read = {i: {storage[v] for v in graph.nodes[i].refs()} for i in own | p.before}
        given = {v.storage for v in graph.values if v.maker is None}
        for i in {*range(min(read), p.end)} - own:
            wrote = {storage[v] for v, _ in graph.nodes[i].writes}
            early = {j for j in own if j < i and read[j] & wrote}
            # What was there before might be the same as an input in another call.
            need(all(j < p.at for j in early) and not wrote & given, "something is written to")
            if early - {*self.pinned}:
                raise _Written(early)
        for i in own:
            for at in {storage[before] for before, _ in graph.nodes[i].writes}:
                alike = [v for v in graph.values if v.storage == at and v.maker not in own]
                need(not any(v.maker is None or max(v.users, default=0) > i for v in alike),
                     "what it writes to is read")  # fmt: skip


def _turn(a: Tensor) -> list[int]:
    """The order of axes in which consecutive numbers, in some shape, show as ``a``."""
    for turn in itertools.permutations(range(a.dim())):
        order = [turn.index(i) for i in range(a.dim())]
        numbers = torch.arange(a.numel()).view([a.shape[i] for i in turn])
        if torch.equal(numbers.permute(order), a):
            return order
    raise Left("its rows are picked")
