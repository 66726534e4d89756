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

from bahdanau_fast.graphs.attend import FusedAttend, FusedScore, laid, pooled
from bahdanau_fast.graphs.caches import Shared
from bahdanau_fast.graphs.find import find
from bahdanau_fast.graphs.graph import Graph, Ref, SmallSizes, require
from bahdanau_fast.graphs.piece import Addend, Broadcast, Piece
from bahdanau_fast.graphs.probe import small_sizes
from bahdanau_fast.reference import TANH, ScoreTerms

__all__ = ["FusedPlan", "find_plan", "plan"]

# Elements of the activated sum below which a memory of projected keys costs more than it saves.
_SMALL = 1 << 18
# The number of features of keys that the operator projects itself.
_FEATURES = 64


class FusedPlan(NamedTuple):
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
        symbol = super().__new__(cls, size)
        symbol.source = source
        return symbol

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
    graph: Graph, piece: Piece, sizes: SmallSizes, size: Callable[[int], int], shared: Shared
) -> FusedPlan:
    """The plan of a piece, with ``size`` of each small one; ``shared`` with other graphs."""
    return _Planner(graph, piece, sizes, size, shared).plan()


def find_plan(
    graph: Graph, anchor: int, shared: Shared, checked: bool = False
) -> tuple[Piece, FusedPlan, SmallSizes]:
    """The piece around an activation, as :func:`find` has it, its plan, and sizes to prove it."""
    plans, total = [], graph.values[graph.nodes[anchor].out[0]].shape
    first = small_sizes(graph, anchor)
    for sizes in (first, small_sizes(graph, anchor, first)) if first.small else (first,):
        require(math.prod(sizes.shape(total)) <= 1 << 24, "is too large to be tried")
        piece = find(graph, anchor, sizes, None, checked)
        plans.append((piece, plan(graph, piece, sizes, sizes.full, shared), sizes))
    # What is the same at both has counted nothing but constants.
    require(plans[0][1].text == plans[-1][1].text, "what it counts is a size of its data")
    return plans[0]


def _symbols(graph: Graph) -> dict[Any, Any]:
    """Expressions of a compiler's sizes; of each symbol in them an input and its axis."""
    symbols: dict[Any, Any] = {}
    for number, value in enumerate(graph.values):
        sizes: Any = value.tensor.shape  # type: ignore[union-attr]
        for axis, (size, n) in enumerate(zip(value.shape, sizes, strict=False)):
            expr: Any = n if type(n) is int else n.node.expr
            same = symbols.setdefault(size, expr) == expr
            require(same, "two of its sizes are equal by chance")
            if value.maker is None and getattr(expr, "is_Symbol", False):
                symbols.setdefault(expr, (number, axis))
    return symbols


class _Planner:
    def __init__(
        self, graph: Graph, piece: Piece, sizes: SmallSizes, size: Callable[[int], int],
        shared: Shared,
    ) -> None:  # fmt: skip
        self.graph, self.p, self.sizes, self._size, self.shared = graph, piece, sizes, size, shared
        self._symbols = _symbols(graph) if graph.symbols else {}
        self.code = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self.code)
        self._inputs: dict[int, Any] = {}  # proxies of fx, by number
        by = [number for _, number in piece.after if type(number) is Ref]
        symbols = [source[0] for source in self._symbols.values() if type(source) is tuple]
        parts = [n for e in piece.addends + piece.gate for n in (e.x, e.w, e.bias) if n is not None]
        masks = [mask.number for mask in piece.masks]
        numbers = [*parts, piece.vector, piece.values, *by, *masks, *piece.assumed, *symbols]
        for i, number in enumerate(dict.fromkeys(int(n) for n in numbers if n >= 0)):
            node = self.code.placeholder(f"x{i}")
            self._inputs[number] = fx.Proxy(node, self._tracer)
        axes = iter(self.all(piece.sizes))
        self.b, self.q, self.k = (math.prod(itertools.islice(axes, n)) for n in piece.groups)
        self.hidden = self.size(piece.hidden)
        self.grad = graph.nodes[piece.anchor].state.grad

    def size(self, n: int) -> int:
        size, symbols = self._size(n), self._symbols
        expr = symbols.get(size, size)
        if type(expr) is int:
            return size
        read = {s: self._inputs[symbols[s][0]].size(symbols[s][1]) for s in expr.free_symbols}
        return _Symbol(size, sympy_interp(PythonReferenceAnalysis, read, expr))

    def all(self, sizes: Iterable[int]) -> list[int]:
        return [self.size(n) for n in sizes]

    def input(self, number: int) -> _Code:
        shape = self.sizes.shape(self.graph.values[number].shape)
        return _Code(self._inputs[int(number)], self.all(shape))

    def call(self, function: Any, *args: Any) -> Any:
        result: Any = self._tracer.create_proxy("call_function", function, args, {})
        return result

    def placed(self, number: int, to: Broadcast) -> _Code:
        """At the axes of queries or keys, those that it lacks of size one."""
        code, value = self.input(number), self.graph.values[number]
        if to.order != sorted(to.order) and value.requires_grad and self.grad:
            code = _Code(self.call(laid, code.x), code.shape)
        return code.reshape(self.all(to.shape)).permute(to.order)

    def weight(self, addend: Addend) -> Any:
        """(H,F), of a tensor that may hold more."""
        assert addend.w is not None
        assert addend.w_index is not None
        code, index = self.input(addend.w), addend.w_index
        first, shape = int(index[0, 0]), [self.hidden, self.size(index.shape[1])]
        down = int(index[1, 0]) - first
        across = int(index[0, 1]) - first if index.shape[1] > 1 else 1
        require(1 in (down, across), "its weight is picked")
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
        return [code.narrow(0, begin, self.hidden).x for begin in self.p.vector_starts]

    def addend(self, addend: Addend, projected: bool) -> _Code:
        """With the axes that it lacks of size one."""
        code = self.placed(addend.x, addend.broadcast)
        if addend.w is not None and projected:
            x = F.linear(code.x, self.weight(addend), *self.biases(addend))
            return _Code(x, [*code.shape[:-1], self.hidden])
        return code if addend.factor == 1.0 else _Code(code.x * addend.factor, code.shape)

    def biases(self, addend: Addend) -> list[Any]:
        return [] if addend.bias is None else [self._inputs[int(addend.bias)]]

    def side(self, addends: list[Addend], length: int, inside: bool) -> tuple[Any, Any, list[Any]]:
        """Queries or keys, with the weight and bias where the operator projects them inside."""
        if not addends:  # pooling by another activation: additive attention to a query of zeros
            return self._inputs[self.p.vector].new_zeros([self.b, length, self.hidden]), None, []
        first = addends[0]
        inside = inside and len(addends) == 1 and first.w is not None
        codes = [self.addend(addend, not inside) for addend in addends]
        shape = [max(sizes) for sizes in zip(*(code.shape for code in codes), strict=True)]
        total = functools.reduce(operator.add, (code.x for code in codes))
        code = _Code(total, shape).expand([*self.all(first.broadcast.expanded), shape[-1]])
        x = code.reshape([self.b, length, shape[-1]]).x
        return (x, self.weight(first), self.biases(first)) if inside else (x, None, [])

    def plan(self) -> FusedPlan:
        p = self.p
        if p.pools and p.activation == "tanh":
            return self.finished(self.pooling())
        score_terms = TANH._replace(activation=p.activation, negative_slope=p.slope)
        # By identity plain tanh is told from the rest.
        score_terms = TANH if score_terms == TANH else score_terms
        keys = [addend for addend in p.addends if addend.key]
        queries = [addend for addend in p.addends if not addend.key]
        narrow = [e for e in keys if e.bias is None and e.rows.shape[1] <= _FEATURES]
        features = w_f = None
        if narrow and len(keys) == 2 and all(e.w is not None for e in keys):
            narrowest = min(narrow, key=lambda e: e.rows.shape[1])
            keys = [addend for addend in keys if addend is not narrowest]
            features, w_f, _ = self.side([narrowest], self.k, True)
        k, w_k, key_biases = self.side(keys, self.k, True)
        small = self.b * self.q * self.k * self.hidden < _SMALL
        # A sum of both biases is another tensor in each call, which no cache would know again.
        alone = not key_biases or not any(map(self.biases, queries))
        q, w_q, query_biases = self.side(
            queries, self.q, p.context is not None and w_k is not None and (small or alone)
        )
        biases = [*query_biases, *key_biases]
        bias = functools.reduce(operator.add, biases) if biases else None
        terms = q, k, w_q, w_k, bias, features, w_f
        outputs = (self.scores if p.context is None else self.attend)(score_terms, small, terms)
        return self.finished(outputs)

    def finished(self, outputs: tuple[Any, ...]) -> FusedPlan:
        """The graph with these outputs, and without inputs that nothing reads."""
        self.code.output(tuple(x.node if isinstance(x, fx.Proxy) else x for x in outputs))
        inputs = []
        for number, x in self._inputs.items():
            if x.node.users:
                inputs.append(number)
            else:
                self.code.erase_node(x.node)
        targets = [repr(n.target) for n in self.code.nodes if isinstance(n.target, FusedScore)]
        return FusedPlan(self.code, inputs, "\n".join([str(self.code), *targets]))

    def scores(self, score_terms: ScoreTerms, small: bool, terms: Any) -> tuple[Any, ...]:
        p, vectors = self.p, self.vectors()
        n, (q, k, _, w_k, bias, *of_keys) = len(vectors), terms
        score = FusedScore(self.shared, score_terms, small or n > 1)
        # Each vector has its part of the batch.
        chunks = (q.chunk(n), k.chunk(n)) if n > 1 else ([q], [k])
        scores = []
        for i, v in enumerate(vectors):
            q_i, k_i = (chunk[i] for chunk in chunks)
            x = self.call(score, q_i, k_i, v, w_k, bias, *of_keys)
            x = functools.reduce(operator.mul, self.masks(), x)  # factors
            for _, by in p.after:
                added = self._inputs[by]
                x = x + (added.reshape([-1])[i] if n > 1 else added)
            scores.append(x)
        x = scores[0] if n == 1 else torch.cat(scores)
        return self.placed_scores(_Code(x, [self.b, self.q, self.k]))

    def pooling(self) -> tuple[Any, ...]:
        """Scores without a query; several vectors are the batch."""
        p, (first,) = self.p, self.p.addends
        x = self.placed(first.x, first.broadcast)
        tensors: list[Any] = [x.reshape([1, self.k, x.shape[-1]]).x]
        for addend in (first, *p.gate):
            (bias,) = self.biases(addend) or [None]
            tensors += [self.weight(addend), None if bias is None else bias.reshape([-1])]
        tensors += [None] * (2 * (not p.gate))
        vectors = self.input(p.vector).reshape([self.b, self.hidden]).x
        biases = [self._inputs[by].reshape([-1]) for _, by in p.after]
        scores = self.call(pooled, *tensors, vectors, *(biases or [None]))
        return self.placed_scores(_Code(scores, [1, self.b, self.k]))

    def placed_scores(self, code: _Code) -> tuple[Any, ...]:
        """As the user has them."""
        p, (order, shape) = self.p, self.p.scores_axes
        code = code.reshape(self.all(p.sizes)).permute(order).reshape(self.all(shape))
        return code.x.to(self.graph.values[p.scores].dtype), None

    def attend(self, score_terms: ScoreTerms, small: bool, terms: Any) -> tuple[Any, ...]:
        p, values = self.p, self.graph.values
        assert p.context is not None
        assert p.weights is not None
        (v,) = self.vectors()
        mask = functools.reduce(operator.and_, self.masks()) if p.masks else None
        checks = [] if p.exact or mask is None else [mask.any(-1)]
        for number in sorted(p.assumed):
            x = self._inputs[number]
            checks.append((x == 0) | (x == 1))
        tests = [check.all() for check in checks]
        if not p.certain:  # what is no number shows through a mask that is added
            tests.append((terms[0].sum() + terms[1].sum()).isfinite())
        # No weight depends on what is added: it only gets its gradient, zero.
        after = [(how, by) for how, by in p.after if how != "+" or (self.grad and type(by) is Ref)]
        operands = tuple(self._inputs[int(by)] for _, by in after if type(by) is Ref)
        x, (order, shape) = self.input(p.values), p.values_axes
        n = math.prod(x.shape) // (self.b * self.k)
        x = x.reshape(self.all(shape)).permute(order).reshape([self.b, self.k, n])
        attend = FusedAttend(
            self.shared, score_terms, small,
            after=tuple((how, None if type(by) is Ref else by) for how, by in after),
            loses=p.fill == -math.inf,
            orders=(tuple(p.weights_axes[0]), tuple(p.context_axes[0])),
            dtypes=(values[p.weights].dtype, values[p.context].dtype),
        )  # fmt: skip
        shapes = (p.sizes, p.weights_axes[1], p.context_axes[1])
        sizes = [[*map(_source, self.all(shape))] for shape in shapes]
        results = self.call(attend, *terms, x.x, v, mask, tuple(tests), operands, *sizes)
        return results[0], results[1]

    def masks(self) -> list[Any]:
        """Of each mask what is seen, (b,q,k) or (b,1,k)."""
        tests: dict[str, Any] = {
            "true": operator.invert,
            "false": lambda m: m,
            "factor": lambda m: m,
            "far": lambda m: m == 0,
            "subtracted": lambda m: m == 0,
            "zero": lambda m: m != 0,
        }
        masks = []
        for mask in self.p.masks:
            code, (b, q, _) = self.placed(mask.number, mask.broadcast), self.p.groups
            code = code.reshape(code.shape[:-1])
            alone = code.shape[b : b + q] == [1] * q  # the same for all queries
            whole = self.all(mask.broadcast.expanded)
            whole[b : b + q] = [1] * q if alone else whole[b : b + q]
            code = code.expand(whole).reshape([self.b, 1 if alone else self.q, self.k])
            masks.append(tests[mask.hides](code.x))
        return masks
