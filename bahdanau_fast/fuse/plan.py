"""The operator on the inputs of a piece, as one generated function: all is decided once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import run
from bahdanau_fast.call import Call
from bahdanau_fast.fuse.caches import scaled
from bahdanau_fast.fuse.find import Addend, Piece, Place, find
from bahdanau_fast.fuse.graph import Graph, Ref, Sizes, need
from bahdanau_fast.fuse.probe import small_sizes
from bahdanau_fast.reference import TANH

__all__ = ["Plan", "find_plan", "plan"]

# Elements of the activated sum below which a memory of projected keys costs more than it saves.
_SMALL = 1 << 18
# Features of the keys that the operator projects itself, at most.
_FEATURES = 64


class Plan(NamedTuple):
    """What computes a piece."""

    # Of a module's caches, what puts the weights where the user holds them, and the inputs:
    # (context or scores, weights or None).
    run: Callable[..., tuple[Tensor, Tensor | None]]
    inputs: list[int]  # numbers of the tensors that it takes
    source: str


class _Symbol(int):
    """A size that is read of an input whenever a plan runs; so are products of it."""

    source: str

    def __new__(cls, size: int, source: str) -> _Symbol:
        made = super().__new__(cls, size)
        made.source = source
        return made

    def __repr__(self) -> str:
        return self.source

    def __mul__(self, other: int) -> _Symbol:
        return _Symbol(int(self) * int(other), f"{self!r} * {other!r}")

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> _Symbol:
        return _Symbol(int(self) // int(other), f"({self!r}) // ({other!r})")


class _Code(NamedTuple):
    """Source of a tensor, and its shape; what changes nothing is left out."""

    source: str
    shape: list[int]
    before: _Code | None = None  # of which this is a reshape

    def reshape(self, shape: list[int]) -> _Code:
        code = self.before or self
        return (
            code if shape == code.shape else _Code(f"{code.source}.reshape({shape})", shape, code)
        )

    def expand(self, shape: list[int]) -> _Code:
        return self if shape == self.shape else _Code(f"{self.source}.expand({shape})", shape)

    def permute(self, order: list[int]) -> _Code:
        if order == sorted(order):
            return self
        return _Code(f"{self.source}.permute({order})", [self.shape[i] for i in order])

    def narrow(self, axis: int, begin: int, length: int) -> _Code:
        if self.shape[axis] == length:
            return self
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return _Code(f"{self.source}.narrow({axis}, {begin}, {length})", shape)


def plan(graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int]) -> Plan:
    """Of a piece, with ``size`` of each small one."""
    return _Planner(graph, piece, sizes, size).plan()


def find_plan(
    graph: Graph, at: int, sizes: Sizes, calls: range, kept: Collection[int] = ()
) -> tuple[Piece, Plan]:
    """The piece around an activation, as :func:`find` has it, and its plan."""
    made, total = [], graph.values[graph.nodes[at].out[0]].shape
    for each in (sizes, small_sizes(graph, at, sizes)) if sizes.small else (sizes,):
        need(math.prod(each.shape(total)) <= 1 << 24, "is too large to be tried")
        piece = find(graph, at, each, calls, kept)
        made.append((piece, plan(graph, piece, each, each.full)))
    # What is the same at both has counted nothing but constants.
    need(made[0][1].source == made[-1][1].source, "what it counts is a size of its data")
    return made[0]


def laid(x: Tensor) -> Tensor:
    """``x``, whose gradient is to be contiguous: what made it may be slow with another one."""
    view = x.view_as(x)
    if view.requires_grad:
        view.register_hook(Tensor.contiguous)
    return view


def _symbols(graph: Graph) -> dict[Any, Any]:
    """Expressions of a compiler's sizes; of each symbol in them an input and its axis."""
    found: dict[Any, Any] = {}
    for number, value in enumerate(graph.values):
        sizes: Any = value.tensor.shape  # type: ignore[union-attr]
        for axis, (size, n) in enumerate(zip(value.shape, sizes, strict=False)):
            expr: Any = n if type(n) is int else n.node.expr
            need(found.setdefault(size, expr) == expr, "two of its sizes are equal by chance")
            if value.maker is None and getattr(expr, "is_Symbol", False):
                found.setdefault(expr, (number, axis))
    return found


class _Planner:
    def __init__(
        self, graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int]
    ) -> None:
        self.graph, self.p, self.sizes, self._size = graph, piece, sizes, size
        self._symbols = _symbols(graph) if graph.symbols else {}
        self.inputs: list[int] = []
        axes = iter(self.all(piece.sizes))
        self.b, self.q, self.k = (math.prod(itertools.islice(axes, n)) for n in piece.groups)
        self.hidden = self.size(piece.hidden)
        self.grad = graph.nodes[piece.at].state.grad

    def size(self, n: int) -> int:
        found, known = self._size(n), self._symbols
        expr = known.get(found, found)
        if type(expr) is int:
            return found
        read = {s: f"{self.name(known[s][0])}.shape[{known[s][1]}]" for s in expr.free_symbols}
        axes = {s: s.func(source, integer=True) for s, source in read.items()}
        return _Symbol(found, f"({expr.xreplace(axes)})")

    def all(self, sizes: Iterable[int]) -> list[int]:
        return [self.size(n) for n in sizes]

    def name(self, number: int) -> str:
        if number not in self.inputs:
            self.inputs.append(int(number))
        return f"x{int(number)}"

    def input(self, number: int) -> _Code:
        shape = self.sizes.shape(self.graph.values[number].shape)
        return _Code(self.name(number), self.all(shape))

    def placed(self, number: int, place: Place) -> _Code:
        """At the axes of queries or keys, those that it lacks of size one."""
        code, value = self.input(number), self.graph.values[number]
        if place.turn != sorted(place.turn) and value.requires_grad and self.grad:
            code = _Code(f"laid({code.source})", code.shape)
        return code.reshape(self.all(place.first)).permute(place.turn)

    def whole(self, code: _Code, place: Place, *shape: int) -> str:
        """(b,*shape), with the axes that it lacks repeated."""
        code = code.expand([*self.all(place.whole), code.shape[-1]])
        return code.reshape([self.b, *shape]).source

    def weight(self, each: Addend) -> str:
        """(H,F), of a tensor that may hold more."""
        assert each.w is not None
        assert each.w_at is not None
        code, at = self.input(each.w), each.w_at
        first, shape = int(at[0, 0]), [self.hidden, self.size(at.shape[1])]
        down = int(at[1, 0]) - first
        across = int(at[0, 1]) - first if at.shape[1] > 1 else 1
        need(1 in (down, across), "its weight is picked")
        step, part = (down, shape) if across == 1 else (across, shape[::-1])
        wide = self.size(step)
        code = code.reshape([math.prod(code.shape) // wide, wide])
        for axis, begin in enumerate(divmod(first, step)):
            code = code.narrow(axis, begin, part[axis])
        return code.source if across == 1 else f"{code.source}.t()"

    def vectors(self) -> list[str]:
        """(H,) or (1,H) each."""
        code = self.input(self.p.vector)
        if code.shape in ([self.hidden], [1, self.hidden]):
            return [code.source]
        code = code.reshape([math.prod(code.shape)])
        return [code.narrow(0, begin, self.hidden).source for begin in self.p.vectors_at]

    def addend(self, each: Addend, projected: bool) -> _Code:
        """With the axes that it lacks of size one."""
        code = self.placed(each.x, each.place)
        if each.w is not None and projected:
            given = ", ".join([code.source, self.weight(each), *self.biases(each)])
            return _Code(f"linear({given})", [*code.shape[:-1], self.hidden])
        if each.factor != 1.0:
            return _Code(f"({code.source} * {each.factor})", code.shape)
        return code

    def biases(self, each: Addend) -> list[str]:
        return [] if each.bias is None else [self.name(each.bias)]

    def side(self, addends: list[Addend], length: int, inside: bool) -> tuple[str, str, list[str]]:
        """Queries or keys, with the weight and bias where the operator projects them inside."""
        need(addends, "no query")
        first = addends[0]
        inside = inside and len(addends) == 1 and first.w is not None
        codes = [self.addend(each, not inside) for each in addends]
        shape = [max(sizes) for sizes in zip(*(code.shape for code in codes), strict=True)]
        source = " + ".join(code.source for code in codes)
        code = _Code(f"({source})", shape) if len(codes) > 1 else codes[0]
        x = self.whole(code, first.place, length, shape[-1])
        return (x, self.weight(first), self.biases(first)) if inside else (x, "None", [])

    def plan(self) -> Plan:
        p, inside = self.p, "INSIDE"
        keys = [each for each in p.addends if each.key]
        queries = [each for each in p.addends if not each.key]
        narrow = [e for e in keys if e.bias is None and e.rows.shape[1] <= _FEATURES]
        if narrow and len(keys) == 2 and all(e.w is not None for e in keys):
            each = min(narrow, key=lambda e: e.rows.shape[1])
            keys = [other for other in keys if other is not each]
            features, w_f, _ = self.side([each], self.k, True)
            inside += f"._replace(features={features}, w_f={w_f})"
        k, w_k, of_keys = self.side(keys, self.k, True)
        small = self.b * self.q * self.k * self.hidden < _SMALL
        # A sum of both biases is another tensor in each call, which no cache would know again.
        alone = not of_keys or not any(map(self.biases, queries))
        q, w_q, of_queries = self.side(
            queries, self.q, p.context is not None and w_k != "None" and (small or alone)
        )
        bias = " + ".join([*of_queries, *of_keys]) or "None"
        if p.context is None:
            lines = self.scores(w_k, bias, inside)
        else:
            lines = self.attend(w_q, w_k, bias, inside, small)
        lines = [f"q, k = {q}, {k}", *lines]
        given = ", ".join(f"x{number}" for number in self.inputs)
        source = f"def planned(caches, give, {given}):\n    " + "\n    ".join(lines)
        # By identity plain tanh is told from the rest.
        other = TANH._replace(activation=p.activation, negative_slope=p.slope)
        names: dict[str, Any] = dict(
            INSIDE=TANH if other == TANH else other, SimpleNamespace=SimpleNamespace,
            linear=F.linear, laid=laid, Call=Call, run=run, scaled=scaled, torch=torch,
        )  # fmt: skip
        exec(source, names)
        return Plan(names["planned"], self.inputs, source)

    def laid(self, code: _Code, number: int, way: tuple[list[int], list[int]]) -> str:
        """A result as the user has it."""
        order, shape = way
        code = code.permute(order).reshape(self.all(shape))
        # To ask first is quicker than a needless ``to``.
        dtype = self.graph.values[number].dtype
        return f"(x if (x := {code.source}).dtype is {dtype} else x.to({dtype}))"

    def scores(self, w_k: str, bias: str, inside: str) -> list[str]:
        p, vectors = self.p, self.vectors()
        n = len(vectors)
        given = f"q, k, k, v, None, {w_k}, {bias}, inside={inside}, scores_only=True"
        source = f"run.scores(Call({given}))"
        for _, by in p.after:
            source += f" + {self.name(by)}" + ".reshape([-1])[i]" * (n > 1)
        lines = [f"v = {vectors[0]}"]
        if n > 1:  # each has its part of the batch
            lines = [f"parts = q.chunk({n}), k.chunk({n}), [{', '.join(vectors)}], range({n})"]
            source = f"torch.cat([{source} for q, k, v, i in zip(*parts)])"
        code = _Code(f"({source})", [self.b, self.q, self.k]).reshape(self.all(p.sizes))
        return [*lines, f"return {self.laid(code, p.scores, p.scores_way)}, None"]

    def attend(self, w_q: str, w_k: str, bias: str, inside: str, small: bool) -> list[str]:
        p = self.p
        assert p.context is not None
        assert p.weights is not None
        (v,) = self.vectors()
        masks = [
            self.whole(self.placed(number, place), place, self.q, self.k)
            for number, place in p.masks
        ]
        lines = [f"m = {' | '.join(masks)}"] if masks else []
        # Of what is added no weight depends: only its gradient, zero, is there.
        by = (
            (how, self.name(by) if type(by) is Ref else by)
            for how, by in p.after if how != "+" or (self.grad and type(by) is Ref)
        )  # fmt: skip
        after = f"({''.join(f'({how!r}, {each}), ' for how, each in by)})"
        known = f"caches.of({v}, {w_k}, {after})"
        new = f"None, {v}" if after == "()" else f"None, scaled({v}, {after})"
        lines += [f"cache, v = {new if small else known}"]
        x, (turn, shape) = self.input(p.values), p.values_way
        n = math.prod(x.shape) // (self.b * self.k)
        x = x.reshape(self.all(shape)).permute(turn).reshape([self.b, self.k, n])
        # A row with nothing to look at is NaN in plain code.
        lost = ".masked_fill(m.all(-1, keepdim=True), torch.nan)" * (p.fill == -math.inf)
        weights = _Code(f"w{lost}", [self.b, self.q, self.k]).reshape(self.all(p.sizes))
        w = self.laid(weights, p.weights, p.weights_way)
        c = self.laid(_Code(f"c{lost}", [self.b, self.q, n]), p.context, p.context_way)
        # Laid out inside, so that the context is a function of the weights that the user holds.
        lines += [
            f"ends = iter((lambda w: give({w}), lambda c: {c}))",
            "shape = SimpleNamespace(restore=lambda result: next(ends)(result))",
            f"return run.attend(Call(q, k, {x.source}, v, {w_q}, {w_k}, {bias}, None, "
            f"{'~m' if masks else 'None'}, cache=cache, shape=shape, inside={inside}))",
        ]
        return lines
