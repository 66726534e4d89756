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

from bahdanau_fast.graphs.attend import (
    FusedAttend,
    FusedScore,
    pooled,
    shaped,
    with_contiguous_gradient,
)
from bahdanau_fast.graphs.caches import Shared
from bahdanau_fast.graphs.find import find
from bahdanau_fast.graphs.graph import Graph, Ref, SmallSizes, require
from bahdanau_fast.graphs.piece import Addend, Broadcast, Piece
from bahdanau_fast.graphs.probe import small_sizes
from bahdanau_fast.reference import TANH, ScoreTerms

# Elements of the activated sum below which a memory of projected keys costs more than it saves.
_SMALL = 1 << 18
# The most features C of keys, W_f f, that the operator projects itself.
_MAX_FEATURES = 64


class FusedPlan(NamedTuple):
    """The graph that computes a piece by the operator: of its inputs, context and weights."""

    graph: fx.Graph
    inputs: list[int]  # by number in the graph of the piece
    text: str  # equal plans have equal texts

    @property
    def run(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The graph as a function."""
        return fx.GraphModule({}, self.graph).forward


class _SymbolicSize(int):
    """A size in the example that a plan reads of its inputs in every call, as products of it."""

    proxy: Any

    def __new__(cls, size: int, proxy: Any) -> _SymbolicSize:
        symbolic = super().__new__(cls, size)
        symbolic.proxy = proxy
        return symbolic

    def __mul__(self, other: int) -> _SymbolicSize:
        return _SymbolicSize(int(self) * int(other), self.proxy * _in_graph(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> _SymbolicSize:
        return _SymbolicSize(int(self) // int(other), self.proxy // _in_graph(other))


def _in_graph(size: int) -> Any:
    """A size as the graph of a plan has it."""
    return size.proxy if isinstance(size, _SymbolicSize) else int(size)


class _Traced(NamedTuple):
    """A tensor in the graph of a plan; methods add calls to it, but none that change nothing."""

    x: Any  # its proxy
    shape: list[int]
    reshaped: _Traced | None = None  # of which this is a reshape

    def reshape(self, shape: list[int]) -> _Traced:
        source = self.reshaped or self
        if shape == source.shape:
            return source
        return _Traced(source.x.reshape([*map(_in_graph, shape)]), shape, source)

    def expand(self, shape: list[int]) -> _Traced:
        if shape == self.shape:
            return self
        return _Traced(self.x.expand([*map(_in_graph, shape)]), shape)

    def permute(self, order: list[int]) -> _Traced:
        if order == sorted(order):
            return self
        return _Traced(self.x.permute(order), [self.shape[i] for i in order])

    def narrow(self, axis: int, begin: int, length: int) -> _Traced:
        if self.shape[axis] == length:
            return self
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return _Traced(self.x.narrow(axis, begin, _in_graph(length)), shape)


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
    # A plan that is the same at both sizes has none of them as a constant in it.
    require(plans[0][1].text == plans[-1][1].text, "what it counts is a size of its data")
    return plans[0]


def _symbolic_sizes(graph: Graph) -> tuple[dict[int, Any], dict[Any, tuple[int, int]]]:
    """The compiler's expression of every size in a graph; an input and its axis by symbol."""
    expressions: dict[int, Any] = {}
    axes: dict[Any, tuple[int, int]] = {}
    for number, value in enumerate(graph.values):
        sizes: Any = value.tensor.shape  # type: ignore[union-attr]
        for axis, (size, n) in enumerate(zip(value.shape, sizes, strict=False)):
            expression: Any = n if type(n) is int else n.node.expr
            same = expressions.setdefault(size, expression) == expression
            require(same, "two of its sizes are equal by chance")
            if value.maker is None and getattr(expression, "is_Symbol", False):
                axes.setdefault(expression, (number, axis))
    return expressions, axes


def plan(
    graph: Graph, piece: Piece, sizes: SmallSizes, size: Callable[[int], int], shared: Shared
) -> FusedPlan:
    """The plan of a piece, with ``size`` of every small one; ``shared`` with other graphs."""
    return _Planner(graph, piece, sizes, size, shared).plan()


class _Planner:
    def __init__(
        self, graph: Graph, piece: Piece, sizes: SmallSizes, size: Callable[[int], int],
        shared: Shared,
    ) -> None:  # fmt: skip
        self.graph, self.p, self.sizes, self._size, self.shared = graph, piece, sizes, size, shared
        self._expressions, self._axes = _symbolic_sizes(graph) if graph.symbols else ({}, {})
        self.code = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self.code)
        self._inputs: dict[int, Any] = {}  # proxies of fx, by number
        operands = [operand for _, operand in piece.score_ops if type(operand) is Ref]
        sized = [number for number, _ in self._axes.values()]
        added = [n for e in piece.addends + piece.gate for n in (e.x, e.w, e.bias) if n is not None]
        masks = [mask.number for mask in piece.masks]
        numbers = [*added, piece.vector, piece.values, *operands, *masks, *piece.assumed_binary]
        numbers += sized
        for i, number in enumerate(dict.fromkeys(int(n) for n in numbers if n >= 0)):
            node = self.code.placeholder(f"x{i}")
            self._inputs[number] = fx.Proxy(node, self._tracer)
        axes = iter(self.full_sizes(piece.sizes))
        self.b, self.q, self.k = (math.prod(itertools.islice(axes, n)) for n in piece.groups)
        self.hidden = self.size(piece.hidden)
        self.grad = graph.nodes[piece.anchor].state.grad

    def size(self, n: int) -> int:
        """The size of the call for a small one."""
        size = self._size(n)
        expression = self._expressions.get(size, size)
        if type(expression) is int:
            return size
        axes = {symbol: self._axes[symbol] for symbol in expression.free_symbols}
        read = {symbol: self._inputs[number].size(axis) for symbol, (number, axis) in axes.items()}
        return _SymbolicSize(size, sympy_interp(PythonReferenceAnalysis, read, expression))

    def full_sizes(self, sizes: Iterable[int]) -> list[int]:
        return [self.size(n) for n in sizes]

    def input(self, number: int) -> _Traced:
        shape = self.sizes.shape(self.graph.values[number].shape)
        return _Traced(self._inputs[int(number)], self.full_sizes(shape))

    def call(self, function: Any, *args: Any) -> Any:
        result: Any = self._tracer.create_proxy("call_function", function, args, {})
        return result

    def broadcastable(self, number: int, to: Broadcast) -> _Traced:
        """A tensor with the axes of queries or keys, those that it lacks of size one."""
        code, value = self.input(number), self.graph.values[number]
        if to.order != sorted(to.order) and value.requires_grad and self.grad:
            code = _Traced(self.call(with_contiguous_gradient, code.x), code.shape)
        return code.reshape(self.full_sizes(to.shape)).permute(to.order)

    def weight(self, addend: Addend) -> Any:
        """(H, features), of a tensor that may hold more."""
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
        """The vectors w_v, (H,) or (1,H)."""
        code = self.input(self.p.vector)
        if code.shape in ([self.hidden], [1, self.hidden]):
            return [code.x]
        code = code.reshape([math.prod(code.shape)])
        return [code.narrow(0, begin, self.hidden).x for begin in self.p.vector_starts]

    def addend(self, addend: Addend, projected: bool) -> _Traced:
        """One of the sum, ``projected`` where it has a weight, with axes as for broadcasting."""
        code = self.broadcastable(addend.x, addend.broadcast)
        if addend.w is not None and projected:
            x = F.linear(code.x, self.weight(addend), *self.biases(addend))
            return _Traced(x, [*code.shape[:-1], self.hidden])
        return code if addend.factor == 1.0 else _Traced(code.x * addend.factor, code.shape)

    def biases(self, addend: Addend) -> list[Any]:
        return [] if addend.bias is None else [self._inputs[int(addend.bias)]]

    def queries_or_keys(
        self, addends: list[Addend], length: int, by_operator: bool
    ) -> tuple[Any, Any, list[Any]]:
        """Their sum; where the operator is to project it, unprojected with the weight and bias."""
        if not addends:  # pooling by another activation: additive attention to a query of zeros
            return self._inputs[self.p.vector].new_zeros([self.b, length, self.hidden]), None, []
        first = addends[0]
        by_operator = by_operator and len(addends) == 1 and first.w is not None
        codes = [self.addend(addend, not by_operator) for addend in addends]
        shape = [max(sizes) for sizes in zip(*(code.shape for code in codes), strict=True)]
        total = functools.reduce(operator.add, (code.x for code in codes))
        code = _Traced(total, shape).expand([*self.full_sizes(first.broadcast.expanded), shape[-1]])
        x = code.reshape([self.b, length, shape[-1]]).x
        return (x, self.weight(first), self.biases(first)) if by_operator else (x, None, [])

    def plan(self) -> FusedPlan:
        p = self.p
        if p.is_pooling and p.activation == "tanh":
            return self.finish(self.pooling())
        score_terms = TANH._replace(activation=p.activation, negative_slope=p.slope)
        # By identity plain tanh is told from the rest.
        score_terms = TANH if score_terms == TANH else score_terms
        keys = [addend for addend in p.addends if addend.of_keys]
        queries = [addend for addend in p.addends if not addend.of_keys]
        narrow = [a for a in keys if a.bias is None and a.rows.shape[1] <= _MAX_FEATURES]
        features = w_f = None
        if narrow and len(keys) == 2 and all(addend.w is not None for addend in keys):
            narrowest = min(narrow, key=lambda addend: addend.rows.shape[1])
            keys = [addend for addend in keys if addend is not narrowest]
            features, w_f, _ = self.queries_or_keys([narrowest], self.k, True)
        k, w_k, key_biases = self.queries_or_keys(keys, self.k, True)
        small = self.b * self.q * self.k * self.hidden < _SMALL
        # A sum of both biases is another tensor in each call, which no cache would know again.
        one_bias = not key_biases or not any(map(self.biases, queries))
        q, w_q, query_biases = self.queries_or_keys(
            queries, self.q, p.context is not None and w_k is not None and (small or one_bias)
        )
        biases = [*query_biases, *key_biases]
        bias = functools.reduce(operator.add, biases) if biases else None
        terms = q, k, w_q, w_k, bias, features, w_f
        outputs = (self.scores if p.context is None else self.attend)(score_terms, small, terms)
        return self.finish(outputs)

    def finish(self, outputs: tuple[Any, ...]) -> FusedPlan:
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
            x = functools.reduce(operator.mul, self.visible(), x)  # factors
            for _, by in p.score_ops:
                added = self._inputs[by]
                x = x + (added.reshape([-1])[i] if n > 1 else added)
            scores.append(x)
        x = scores[0] if n == 1 else torch.cat(scores)
        return self.scores_as_written(_Traced(x, [self.b, self.q, self.k]))

    def pooling(self) -> tuple[Any, ...]:
        """Scores without a query; several vectors are the batch."""
        p, (first,) = self.p, self.p.addends
        x = self.broadcastable(first.x, first.broadcast)
        tensors: list[Any] = [x.reshape([1, self.k, x.shape[-1]]).x]
        for addend in (first, *p.gate):
            (bias,) = self.biases(addend) or [None]
            tensors += [self.weight(addend), None if bias is None else bias.reshape([-1])]
        tensors += [None] * (2 * (not p.gate))
        vectors = self.input(p.vector).reshape([self.b, self.hidden]).x
        biases = [self._inputs[by].reshape([-1]) for _, by in p.score_ops]
        scores = self.call(pooled, *tensors, vectors, *(biases or [None]))
        return self.scores_as_written(_Traced(scores, [1, self.b, self.k]))

    def scores_as_written(self, code: _Traced) -> tuple[Any, ...]:
        """Scores (b,tq,tk) with the axes and the dtype that the user's code gives them."""
        p, (order, shape) = self.p, self.p.scores_axes
        code = code.reshape(self.full_sizes(p.sizes)).permute(order)
        x = self.call(shaped, code.x, [*map(_in_graph, self.full_sizes(shape))])
        return x.to(self.graph.values[p.scores].dtype), None

    def attend(self, score_terms: ScoreTerms, small: bool, terms: Any) -> tuple[Any, ...]:
        p, values = self.p, self.graph.values
        assert p.context is not None
        assert p.weights is not None
        (v,) = self.vectors()
        mask = functools.reduce(operator.and_, self.visible()) if p.masks else None
        checks = [] if p.hidden_rows_match or mask is None else [mask.any(-1)]
        for number in sorted(p.assumed_binary):
            x = self._inputs[number]
            checks.append((x == 0) | (x == 1))
        tests = [check.all() for check in checks]
        if not p.unconditional:  # NaN and infinity show through a mask that is added
            tests.append((terms[0].sum() + terms[1].sum()).isfinite())
        # No weight depends on what is added: it only gets its gradient, zero.
        ops = [(op, by) for op, by in p.score_ops if op != "+" or (self.grad and type(by) is Ref)]
        operands = tuple(self._inputs[int(by)] for _, by in ops if type(by) is Ref)
        x, (order, shape) = self.input(p.values), p.values_axes
        n = math.prod(x.shape) // (self.b * self.k)
        x = x.reshape(self.full_sizes(shape)).permute(order).reshape([self.b, self.k, n])
        attend = FusedAttend(
            self.shared, score_terms, small,
            score_ops=tuple((op, None if type(by) is Ref else by) for op, by in ops),
            hidden_rows_nan=p.fill == -math.inf,
            orders=(tuple(p.weights_axes[0]), tuple(p.context_axes[0])),
            dtypes=(values[p.weights].dtype, values[p.context].dtype),
        )  # fmt: skip
        shapes = (p.sizes, p.weights_axes[1], p.context_axes[1])
        sizes = [[*map(_in_graph, self.full_sizes(shape))] for shape in shapes]
        results = self.call(attend, *terms, x.x, v, mask, tuple(tests), operands, *sizes)
        return results[0], results[1]

    def visible(self) -> list[Any]:
        """Of every mask the scores that it leaves visible, (b,q,k) or (b,1,k); or the factors."""
        inverse: Any = {"true": operator.invert, "zero": lambda m: m != 0}
        inverse["nonzero"] = lambda m: m == 0
        masks = []
        for mask in self.p.masks:
            code, (b, q, _) = self.broadcastable(mask.number, mask.broadcast), self.p.groups
            code = code.reshape(code.shape[:-1])
            alone = code.shape[b : b + q] == [1] * q  # the same for all queries
            whole = self.full_sizes(mask.broadcast.expanded)
            whole[b : b + q] = [1] * q if alone else whole[b : b + q]
            code = code.expand(whole).reshape([self.b, 1 if alone else self.q, self.k])
            masks.append(inverse[mask.hides](code.x) if mask.hides in inverse else code.x)
        return masks
