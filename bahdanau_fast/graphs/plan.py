"""The operator on the inputs of a piece, as a graph: all is decided once."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from bahdanau_fast.graphs.attend import Attend, Score, laid
from bahdanau_fast.graphs.caches import Shared
from bahdanau_fast.graphs.find import Addend, Piece, Place, find
from bahdanau_fast.graphs.graph import Graph, Ref, Sizes, need
from bahdanau_fast.graphs.probe import small_sizes
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Plan", "find_plan", "plan"]

# Elements of the activated sum below which a memory of projected keys costs more than it saves.
_SMALL = 1 << 18
# Features of the keys that the operator projects itself, at most.
_FEATURES = 64


class Plan(NamedTuple):
    """What computes a piece: a graph of inputs that gives what the piece does."""

    graph: fx.Graph
    inputs: list[int]  # numbers of the tensors that it takes
    text: str  # equal where plans are

    @property
    def run(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The graph as a function."""
        return fx.GraphModule({}, self.graph).forward


class _Symbol(int):
    """A size that is read of an input whenever a plan runs; so are products of it."""

    source: Any

    def __new__(cls, size: int, source: Any) -> _Symbol:
        made = super().__new__(cls, size)
        made.source = source
        return made

    def __mul__(self, other: int) -> _Symbol:
        return _Symbol(int(self) * int(other), self.source * _source(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> _Symbol:
        return _Symbol(int(self) // int(other), self.source // _source(other))


def _source(size: int) -> Any:
    return size.source if isinstance(size, _Symbol) else int(size)


class _Code(NamedTuple):
    """What makes a tensor, and its shape; what changes nothing is left out."""

    x: Any  # a proxy of fx
    shape: list[int]
    before: _Code | None = None  # of which this is a reshape

    def reshape(self, shape: list[int]) -> _Code:
        code = self.before or self
        if shape == code.shape:
            return code
        return _Code(code.x.reshape([*map(_source, shape)]), shape, code)

    def expand(self, shape: list[int]) -> _Code:
        return self if shape == self.shape else _Code(self.x.expand([*map(_source, shape)]), shape)

    def permute(self, order: list[int]) -> _Code:
        if order == sorted(order):
            return self
        return _Code(self.x.permute(order), [self.shape[i] for i in order])

    def narrow(self, axis: int, begin: int, length: int) -> _Code:
        if self.shape[axis] == length:
            return self
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return _Code(self.x.narrow(axis, begin, _source(length)), shape)


def plan(
    graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int], shared: Shared
) -> Plan:
    """Of a piece, with ``size`` of each small one; ``shared`` with other graphs."""
    return _Planner(graph, piece, sizes, size, shared).plan()


def find_plan(
    graph: Graph, at: int, shared: Shared, checked: bool = False
) -> tuple[Piece, Plan, Sizes]:
    """The piece around an activation, as :func:`find` has it, its plan, and sizes to prove it."""
    made, total = [], graph.values[graph.nodes[at].out[0]].shape
    sizes = small_sizes(graph, at)
    for each in (sizes, small_sizes(graph, at, sizes)) if sizes.small else (sizes,):
        need(math.prod(each.shape(total)) <= 1 << 24, "is too large to be tried")
        piece = find(graph, at, each, None, checked)
        made.append((piece, plan(graph, piece, each, each.full, shared), each))
    # What is the same at both has counted nothing but constants.
    need(made[0][1].text == made[-1][1].text, "what it counts is a size of its data")
    return made[0]


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
        self, graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int], shared: Shared
    ) -> None:
        self.graph, self.p, self.sizes, self._size, self.shared = graph, piece, sizes, size, shared
        self._symbols = _symbols(graph) if graph.symbols else {}
        self.made = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self.made)
        self._inputs: dict[int, Any] = {}  # proxies of fx, by number
        by = [number for _, number in piece.after if type(number) is Ref]
        symbols = [at[0] for at in self._symbols.values() if type(at) is tuple]
        parts = [n for e in piece.addends for n in (e.x, e.w, e.bias) if n is not None]
        masks = [mask.number for mask, _ in piece.masks]
        numbers = [*parts, piece.vector, piece.values, *by, *masks, *piece.assumed, *symbols]
        for i, number in enumerate(dict.fromkeys(int(n) for n in numbers if n >= 0)):
            node = self.made.placeholder(f"x{i}")
            self._inputs[number] = fx.Proxy(node, self._tracer)
        axes = iter(self.all(piece.sizes))
        self.b, self.q, self.k = (math.prod(itertools.islice(axes, n)) for n in piece.groups)
        self.hidden = self.size(piece.hidden)
        self.grad = graph.nodes[piece.at].state.grad

    def size(self, n: int) -> int:
        found, known = self._size(n), self._symbols
        expr = known.get(found, found)
        if type(expr) is int:
            return found
        read = {s: self._inputs[known[s][0]].size(known[s][1]) for s in expr.free_symbols}
        return _Symbol(found, sympy_interp(PythonReferenceAnalysis, read, expr))

    def all(self, sizes: Iterable[int]) -> list[int]:
        return [self.size(n) for n in sizes]

    def input(self, number: int) -> _Code:
        shape = self.sizes.shape(self.graph.values[number].shape)
        return _Code(self._inputs[int(number)], self.all(shape))

    def call(self, function: Any, *args: Any) -> Any:
        made: Any = self._tracer.create_proxy("call_function", function, args, {})
        return made

    def placed(self, number: int, place: Place) -> _Code:
        """At the axes of queries or keys, those that it lacks of size one."""
        code, value = self.input(number), self.graph.values[number]
        if place.turn != sorted(place.turn) and value.requires_grad and self.grad:
            code = _Code(self.call(laid, code.x), code.shape)
        return code.reshape(self.all(place.first)).permute(place.turn)

    def whole(self, code: _Code, place: Place, *shape: int) -> Any:
        """(b,*shape), with the axes that it lacks repeated."""
        code = code.expand([*self.all(place.whole), code.shape[-1]])
        return code.reshape([self.b, *shape]).x

    def weight(self, each: Addend) -> Any:
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
        return code.x if across == 1 else code.x.t()

    def vectors(self) -> list[Any]:
        """(H,) or (1,H) each."""
        code = self.input(self.p.vector)
        if code.shape in ([self.hidden], [1, self.hidden]):
            return [code.x]
        code = code.reshape([math.prod(code.shape)])
        return [code.narrow(0, begin, self.hidden).x for begin in self.p.vectors_at]

    def addend(self, each: Addend, projected: bool) -> _Code:
        """With the axes that it lacks of size one."""
        code = self.placed(each.x, each.place)
        if each.w is not None and projected:
            made = F.linear(code.x, self.weight(each), *self.biases(each))
            return _Code(made, [*code.shape[:-1], self.hidden])
        return code if each.factor == 1.0 else _Code(code.x * each.factor, code.shape)

    def biases(self, each: Addend) -> list[Any]:
        return [] if each.bias is None else [self._inputs[int(each.bias)]]

    def side(self, addends: list[Addend], length: int, inside: bool) -> tuple[Any, Any, list[Any]]:
        """Queries or keys, with the weight and bias where the operator projects them inside."""
        need(addends, "no query")
        first = addends[0]
        inside = inside and len(addends) == 1 and first.w is not None
        codes = [self.addend(each, not inside) for each in addends]
        shape = [max(sizes) for sizes in zip(*(code.shape for code in codes), strict=True)]
        total = functools.reduce(operator.add, (code.x for code in codes))
        x = self.whole(_Code(total, shape), first.place, length, shape[-1])
        return (x, self.weight(first), self.biases(first)) if inside else (x, None, [])

    def plan(self) -> Plan:
        p = self.p
        inside = TANH._replace(activation=p.activation, negative_slope=p.slope)
        # By identity plain tanh is told from the rest.
        inside = TANH if inside == TANH else inside
        keys = [each for each in p.addends if each.key]
        queries = [each for each in p.addends if not each.key]
        narrow = [e for e in keys if e.bias is None and e.rows.shape[1] <= _FEATURES]
        features = w_f = None
        if narrow and len(keys) == 2 and all(e.w is not None for e in keys):
            each = min(narrow, key=lambda e: e.rows.shape[1])
            keys = [other for other in keys if other is not each]
            features, w_f, _ = self.side([each], self.k, True)
        k, w_k, of_keys = self.side(keys, self.k, True)
        small = self.b * self.q * self.k * self.hidden < _SMALL
        # A sum of both biases is another tensor in each call, which no cache would know again.
        alone = not of_keys or not any(map(self.biases, queries))
        q, w_q, of_queries = self.side(
            queries, self.q, p.context is not None and w_k is not None and (small or alone)
        )
        biases = [*of_queries, *of_keys]
        bias = functools.reduce(operator.add, biases) if biases else None
        terms = q, k, w_q, w_k, bias, features, w_f
        made = self.scores(inside, small, terms) if p.context is None else (
            self.attend(inside, small, terms)
        )  # fmt: skip
        self.made.output(tuple(x.node if isinstance(x, fx.Proxy) else x for x in made))
        inputs = []
        for number, x in self._inputs.items():
            if x.node.users:
                inputs.append(number)
            else:
                self.made.erase_node(x.node)
        told = [repr(n.target) for n in self.made.nodes if isinstance(n.target, Score)]
        return Plan(self.made, inputs, "\n".join([str(self.made), *told]))

    def scores(self, inside: Inside, small: bool, terms: Any) -> tuple[Any, ...]:
        p, vectors = self.p, self.vectors()
        n, (q, k, _, w_k, bias, *of_keys) = len(vectors), terms
        score, by = (
            Score(self.shared, inside, small or n > 1),
            [self._inputs[b] for _, b in p.after],
        )
        parts = q.chunk(n), k.chunk(n)  # each has its part of the batch
        found = []
        for i, v in enumerate(vectors):
            q_i, k_i = (q, k) if n == 1 else (parts[0][i], parts[1][i])
            x = self.call(score, q_i, k_i, v, w_k, bias, *of_keys)
            for each in by:
                x = x + (each.reshape([-1])[i] if n > 1 else each)
            found.append(x)
        if n == 1:
            for part in parts:
                self.made.erase_node(part.node)
        code = _Code(found[0] if n == 1 else torch.cat(found), [self.b, self.q, self.k])
        order, shape = p.scores_way
        code = code.reshape(self.all(p.sizes)).permute(order).reshape(self.all(shape))
        return code.x.to(self.graph.values[p.scores].dtype), None

    def attend(self, inside: Inside, small: bool, terms: Any) -> tuple[Any, ...]:
        p, values = self.p, self.graph.values
        assert p.context is not None
        assert p.weights is not None
        (v,) = self.vectors()
        seen = functools.reduce(operator.and_, self.masks()) if p.masks else None
        checks = [] if p.exact or seen is None else [seen.any(-1)]
        for number in sorted(p.assumed):
            x = self._inputs[number]
            checks.append((x == 0) | (x == 1))
        fine = [check.all() for check in checks]
        if not p.certain:  # what is no number shows through a mask that is added
            fine.append((terms[0].sum() + terms[1].sum()).isfinite())
        # Of what is added no weight depends: only its gradient, zero, is there.
        after = [(how, by) for how, by in p.after if how != "+" or (self.grad and type(by) is Ref)]
        by = [self._inputs[int(each)] for _, each in after if type(each) is Ref]
        x, (turn, shape) = self.input(p.values), p.values_way
        n = math.prod(x.shape) // (self.b * self.k)
        x = x.reshape(self.all(shape)).permute(turn).reshape([self.b, self.k, n])
        attend = Attend(
            self.shared, inside, small,
            after=tuple((how, None if type(each) is Ref else each) for how, each in after),
            loses=p.fill == -math.inf,
            orders=(tuple(p.weights_way[0]), tuple(p.context_way[0])),
            dtypes=(values[p.weights].dtype, values[p.context].dtype),
        )  # fmt: skip
        shapes = (p.sizes, p.weights_way[1], p.context_way[1])
        sizes = [[*map(_source, self.all(shape))] for shape in shapes]
        found = self.call(attend, *terms, x.x, v, seen, tuple(fine), tuple(by), *sizes)
        return found[0], found[1]

    def masks(self) -> list[Any]:
        """Of each mask what is seen, (b,q,k) or (b,1,k)."""
        tests: dict[str, Any] = {
            "true": operator.invert,
            "false": lambda m: m,
            "far": lambda m: m == 0,
            "subtracted": lambda m: m == 0,
            "zero": lambda m: m != 0,
        }
        found = []
        for mask, place in self.p.masks:
            code, (b, q, _) = self.placed(mask.number, place), self.p.groups
            code = code.reshape(code.shape[:-1])
            alone = code.shape[b : b + q] == [1] * q  # the same for all queries
            whole = self.all(place.whole)
            whole[b : b + q] = [1] * q if alone else whole[b : b + q]
            code = code.expand(whole).reshape([self.b, 1 if alone else self.q, self.k])
            found.append(tests[mask.hides](code.x))
        return found
