"""Pooling without a query: scores ``w . tanh(V x + b)`` of parameters, times a sigmoid of the same.

    w . (tanh(V x + b) * sigmoid(U x + d))

A network of two layers computes the same. The softmax over the rows of x tells them apart.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bahdanau_fast.graphs.axes import ScoreAxes
from bahdanau_fast.graphs.graph import Graph, Node
from bahdanau_fast.graphs.piece import Addend
from bahdanau_fast.graphs.probe import CONTRACTIONS, PRODUCTS, trace_back

_ACTIVATIONS = {"tanh", "relu"}  # the gate is of tanh alone


def activates_projection(graph: Graph, anchor: int) -> bool:
    """Whether a call activates a product with a parameter, as which pooling begins."""
    node, values = graph.nodes[anchor], graph.values
    usual = node.name in _ACTIVATIONS and node.refs and node.source
    leaves = trace_back(graph, node.refs[0])[1] if usual else []
    nodes = [graph.nodes[i] for i in (values[v].maker for v in leaves) if i is not None]
    return any(
        n.name in CONTRACTIONS and any(values[v].constant for v in n.operands()) for n in nodes
    )


def drops(n: Node) -> bool:
    """Whether a call is a dropout that drops anything."""
    options = {"p": 0.5, "training": True, **dict(zip(("p", "training"), n.args[1:], strict=False))}
    options |= n.kwargs
    return bool(n.name == "dropout" and options["p"] and options["training"])


def _idle(n: Node) -> bool:
    """Whether a call is a dropout that changes nothing."""
    return n.name == "dropout" and not drops(n) and not n.writes and n.single


class Pooling(ScoreAxes):
    """Reads the gate, and whether a query is missing."""

    end: int
    maybe_later: bool

    def gated(self) -> tuple[int, int | None]:
        """What is summed against the vector; what the sigmoid in it is of, if it has one."""
        p, nodes, values = self.p, self.graph.nodes, self.graph.values
        i, v, ids, none = p.anchor, p.activated, set[int](), (p.activated, None)
        while True:
            i = min((j for j in values[v].users if j > i), default=self.end)
            if p.activation != "tanh" or i >= self.end:
                return none
            n, (out, *_) = nodes[i], (*nodes[i].out, -1)
            ids.add(i)
            if not _idle(n):
                break
            v = out  # which may be the same tensor
        if drops(n):  # in evaluation it is none
            self.maybe_later = any(nodes[j].name in PRODUCTS for j in values[out].users)
        others = [ref for ref in n.operands() if ref != v]
        if n.name not in PRODUCTS or n.writes or not n.single or len(others) != 1:
            return none
        more, (other, *_) = trace_back(self.graph, others[0], self.pinned, lambda _, m: _idle(m))
        maker, alike = values[other].maker, self.shape(other) == self.shape(v) == self.shape(out)
        if maker is None or maker in self.pinned or not alike:
            return none
        if nodes[maker].name != "sigmoid" or nodes[maker].writes:
            return none
        more |= {j for j in values[other].users if _idle(nodes[j])}
        p.deferred |= ids | more | {maker}
        return out, nodes[maker].refs[0]

    def find_pooling(self) -> bool:
        """Whether rows are projected by parameters and nothing is added, nor gated by others."""
        p, values = self.p, self.graph.values
        sides = [self._with_bias(side) for side in (p.addends, p.gate) if side]
        if p.activation not in _ACTIVATIONS or any(len(side) > 1 for side in sides):
            return False
        (first, *_), *_ = terms = sides
        weights = [p.vector, *(-1 if e.w is None else e.w for (e,) in terms)]
        p.is_pooling = (
            all(v >= 0 and values[v].constant for v in weights)
            and all(e.x == first.x and torch.equal(e.rows, first.rows) for (e,) in terms)
            and p.vector_starts == [*range(0, values[p.vector].numel, p.hidden)]
        )
        p.addends, *gates = sides if p.is_pooling else [p.addends, p.gate]
        p.gate = gates[0] if gates else []
        return p.is_pooling

    def _with_bias(self, addends: list[Addend]) -> list[Addend]:
        """A projection, with a vector that is added to it as its bias."""
        first, *others = sorted(addends, key=lambda e: e.w is None)
        if len(others) != 1 or first.w is None or first.bias is not None:
            return addends
        (b,), value = others, self.graph.values[others[0].x]
        alike = b.w is None and b.factor == 1.0 and value.constant and value.numel == self.p.hidden
        if not alike or not (b.rows == torch.arange(self.p.hidden)).all():
            return addends
        return [replace(first, bias=b.x)]
