"""What follows the scores: numbers, masks in anybody's style, a softmax by name or by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Graph, Node, Ref, require
from bahdanau_fast.graphs.piece import Piece, ScoreMask
from bahdanau_fast.graphs.probe import PRODUCTS, QUOTIENTS, VIEWS, Probe, trace_back

# A filled score of at most this is hidden by the softmax: beside scores of a bounded activation, of
# which the sum of the vector is the largest, and beside any others.
_HIDDEN, _HIDDEN_BELOW_ALL = -1e4, -1e8
# Calls that make masks of binary tensors, element by element.
_BY_ELEMENT = VIEWS | PRODUCTS | {
    *("add", "sub", "rsub", "neg", "to", "type", "type_as", "double", "half", "bfloat16", "log"),
    *("int", "long", "masked_fill", "where", "ones_like", "zeros_like", "full", "full_like"),
    *("new_full", "expand", "expand_as", "repeat", "broadcast_to", "clone", "tensor", "detach"),
    *("as_tensor", "new_tensor", "scalar_tensor"),
}  # fmt: skip
_CASTS = {"to", "type_as", "type", "clone"}
_SUMS = {"sum", "add", "expand", "expand_as", "detach"}
_OPERATIONS = {"add": "+", **dict.fromkeys(PRODUCTS, "*"), **dict.fromkeys(QUOTIENTS, "/")}


class Softmax(Probe):
    """From scores to their weights."""

    p: Piece
    end: int  # only calls before this one are read
    index: Tensor  # the scores' indices, moved as the scores are by calls up to now
    key_index: Tensor | None = None  # (scores,), the key of a score within its row
    checked: bool  # calls of the operator may test whether a mask is binary

    def softmax(self) -> None:
        """Go on from the scores to their weights."""
        p, v = self.p, self.p.scores
        require(not p.masks, "is multiplied")
        p.deferred.add(p.end)
        while p.weights is None or self._unnormalised(v):
            v = self._step(v)
        hides = {mask.hides for mask in p.masks}
        p.unconditional = p.hidden_rows_match and hides <= {"true", "false"}
        untested = p.unconditional and not p.assumed_binary
        require(self.checked or untested, "its mask is not of truths alone")

    def _step(self, v: int) -> int:
        """Take the next call behind the scores, or behind the exponentials."""
        p, (v, i) = self.p, self._next_reader(v)
        n = self.graph.nodes[i]
        p.deferred.add(i)
        (out,) = n.out
        if p.weights is not None:
            require(self._masked(n, v), "is changed otherwise")
            p.weights = out
        elif n.name == "softmax":
            self._softmax_over(n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else None))
            p.weights = out
        elif n.name == "exp":
            p.weights, p.hidden_rows_match = out, False
        elif n.name in VIEWS | _CASTS and len(n.operands()) == 1:
            require(self.graph.values[out].dtype is self.graph.values[v].dtype, "is cast")
            before, self.index = self.index, self.run([i], {v: self.index}, out).long()
            require(self.index.numel() == before.numel(), "is cut")
        elif not self._masked(n, v):
            self._add_score_op(n, v)
        return out

    def _add_score_op(self, n: Node, v: int) -> None:
        """Scores are added to, multiplied or divided by one number."""
        p, refs = self.p, n.refs
        by = n.args[1] if len(n.args) > 1 else None
        if len(n.args) == 2 and type(n.args[0]) in (int, float):
            by = n.args[0]
        value = self.graph.values[refs[-1]]  # the scores again where it is a number
        one = type(by) in (int, float) or (value.numel == 1 and len(value.shape) < 2)
        how = _OPERATIONS.get(n.name)
        usual = one and not n.writes and not n.kwargs and refs[0] == v
        require(usual and how and (by is n.args[-1] or how != "/"), f"is changed by {n.name}")
        # Its gradient is a sum over the vector's, which 16 bits round.
        learnt = type(by) is Ref and how != "+" and n.state.grad and value.requires_grad
        wide = self.graph.values[n.out[0]].dtype.itemsize > 2
        require(wide or not learnt, "is scaled in 16 bits")
        if p.masks:  # what is far below zero stays so
            factor: Any = by if type(by) in (int, float) and how != "+" else 0
            far = -1.0 if p.fill is None else p.fill
            far = far * factor if how == "*" or not factor else far / factor
            require(far <= _HIDDEN, "is changed behind a mask")
            p.fill = far
        p.score_ops.append((str(how), by))

    def _next_reader(self, v: int) -> tuple[int, int]:
        """The call that reads a tensor next, and what it reads of it."""
        p, nodes, values = self.p, self.graph.nodes, self.graph.values
        users = [i for i in values[v].users if v in nodes[i].operands()]
        users = [i for i in users if not (p.is_pooling and nodes[i].name == "output")]
        names = [nodes[i].name for i in users]
        if len(users) == 2 and names[0] == "detach":  # of ``scores.data``, which is written to
            (alias,) = nodes[users[0]].out
            fills = values[alias].users
            require(len(fills) == 1 and fills[0] < users[1], "is read elsewhere")
            fill = nodes[fills[0]]
            require(fill.writes and not values[fill.out[0]].users, "is read elsewhere")
            require(self._masked(fill, alias), "is changed otherwise")
            p.deferred |= {users[0], fills[0]}
            p.hidden_rows_match &= not fill.state.grad or p.fill == -math.inf
            users = users[1:]
        elif len(users) == 2 and {*names} & {"max", "amax"} and "sub" in names:
            i, j = sorted(users)  # the largest is subtracted, which changes no weight
            views, ids = self._views(i)
            first, *others = nodes[j].refs
            require(first == v and others[-1] in views, "is read elsewhere")
            p.deferred |= ids | {i, j}
            (v,) = nodes[j].out
            users = values[v].users
        require(len(users) == 1 and users[0] < self.end, "is read elsewhere")
        require(len(nodes[users[0]].out) == 1, f"its values are needed by {nodes[users[0]].name}")
        return v, users[0]

    def _views(self, i: int) -> tuple[list[int], set[int]]:
        """Results of a call and views of them, and the calls that make these."""
        views, ids = [*self.graph.nodes[i].out], set()
        for v in views:
            for j in self.graph.values[v].users:
                n = self.graph.nodes[j]
                if n.name in VIEWS | {"detach", "expand", "expand_as"} and n.refs[0] == v:
                    ids.add(j)
                    views += n.out
        return views, ids

    def _softmax_over(self, dim: Any) -> None:
        index = self.index
        dim = int(index.dim() not in (0, 1, 3)) if dim is None else dim  # torch's old default
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        require(type(dim) is int, "is summed over several axes")
        numbers = torch.arange(index.shape[dim]).view(-1, *[1] * ((-dim - 1) % index.dim()))
        self.key_index = self._by_score(numbers)

    def _by_score(self, x: Tensor) -> Tensor:
        """(scores,): the elements of a tensor that broadcasts with the scores as they are now."""
        elements = torch.empty(self.index.numel(), dtype=torch.long)
        elements[self.index.reshape(-1)] = x.long().expand(self.index.shape).reshape(-1)
        return elements

    def _unnormalised(self, v: int) -> bool:
        """Whether weights do not sum to one yet; they may be divided by their sum."""
        nodes, values = self.graph.nodes, self.graph.values
        users = sorted(values[v].users)
        quotient = nodes[users[-1]] if len(users) > 1 else None
        if quotient is not None and quotient.name in QUOTIENTS and quotient.refs[0] == v:
            self._divided(v, users[-1], int(quotient.refs[-1]))
            return False
        if self.key_index is None:
            return True
        # Hidden after the softmax, and divided to sum to one again.
        i = users[0] if len(users) == 1 else self.end
        if i >= self.end or nodes[i].name not in PRODUCTS:
            return False
        factor, alike = self._factor(nodes[i], v), values[nodes[i].out[0]].numel == values[v].numel
        return alike and factor is not None and self._possible_values(factor) is not None

    def _divided(self, v: int, quotient: int, total: int) -> None:
        """Exponentials are divided by their sum over some axes."""
        p, (out,) = self.p, self.graph.nodes[quotient].out
        ids, leaves = trace_back(self.graph, total, moves=lambda _, n: n.name in VIEWS | _SUMS)
        require(leaves == [v], "is divided otherwise")
        ids.add(quotient)
        x = self.random(v) + 0.5
        sums = x / self.run(ids, {v: x}, out)
        key_index = torch.empty(x.shape)
        for group in sums.reshape(-1).round(decimals=6).unique():
            members = (sums - group).abs() < 1e-5
            require(math.isclose(x[members].sum(), group, rel_tol=1e-5), "is no softmax")
            key_index[members] = torch.arange(int(members.sum())).to(key_index)
        before, self.key_index = self.key_index, self._by_score(key_index)
        require(before is None or torch.equal(before, self.key_index), "is no softmax")
        p.deferred |= ids
        p.weights, p.hidden_rows_match = out, False

    def _masked(self, n: Node, v: int) -> bool:
        """Whether a call hides some of the scores."""
        args, p, values = n.args, self.p, self.graph.values
        if n.name in ("masked_fill", "setitem") and args[0] == v:
            named = [n.kwargs[k] for k in ("mask", "value") if k in n.kwargs]
            return self._fill(n, v, "true", *args[1:], *named)
        if n.name == "where" and len(args) == 3:
            mask, b, a = args
            if n.func is Tensor.where:
                b, mask = mask, b
            if type(b) is Ref and b == v:
                return self._fill(n, v, "false", mask, a)
            return type(a) is Ref and a == v and self._fill(n, v, "true", mask, b)
        factor = self._factor(n, v)
        if factor is None or n.name not in PRODUCTS | {"add", "sub"}:
            return False
        choices = self._possible_values(factor)
        if choices is None:
            return False
        numbers, assumed, ids = choices
        far = [x for x in numbers if x != 0.0]
        if n.name in PRODUCTS:
            require(numbers == {0.0, 1.0}, "is multiplied")
            self._add_mask(factor, "zero")
            if p.weights is None:  # and something far below is added then
                users = values[n.out[0]].users
                added = len(users) == 1 and self.graph.nodes[users[0]].name in ("add", "sub")
                require(added, "is multiplied")
        else:
            sign = -1.0 if n.name == "sub" else 1.0
            dtype = values[n.out[0]].dtype
            require(len(far) == 1 and self._hides(sign * far[0], dtype), "is added to")
            if not any(mask.hides == "zero" for mask in p.masks):
                p.hidden_rows_match &= math.isinf(far[0])
            p.fill = -math.inf if math.isinf(far[0]) else p.fill
            self._add_mask(factor, "nonzero")
        p.assumed_binary |= assumed
        p.mask_calls |= ids
        return True

    def _factor(self, n: Node, v: int) -> int | None:
        """The other tensor that a call computes with, where it may be a mask."""
        refs = n.refs
        if len(refs) != 2 or v not in refs or n.kwargs or (n.name == "sub" and refs[0] != v):
            return None
        other = int(refs[refs[0] == v])
        return None if self.graph.values[other].numel == 1 else other

    def _fill(self, n: Node, v: int, hides: str, mask: Any, fill: Any) -> bool:
        """Scores become a number where a mask says so."""
        p, values = self.p, self.graph.values
        if type(fill) is Ref:
            numbers, assumed, ids = self._possible_values(fill) or (set(), set(), set())
            require(len(numbers) == 1 and not assumed, "fills with several numbers")
            fill = numbers.pop()
            p.mask_calls |= ids
            like = {v}  # calls that have a shape or dtype of the scores are put off as these are
            for i in sorted(ids):
                if like.intersection(self.graph.nodes[i].refs):
                    p.deferred.add(i)
                    like.update(self.graph.nodes[i].out)
        require(type(fill) in (int, float), "fills with several numbers")
        # As it is in the scores: a large number is infinite in 16 bits.
        fill = float(torch.tensor(fill, dtype=values[n.out[0]].dtype))
        require(self._hides(fill, values[n.out[0]].dtype), "fills with what may be seen")
        usual = type(mask) not in (int, float, tuple) and p.fill in (None, fill)
        require(usual and values[mask].dtype is torch.bool, "is filled otherwise")
        p.fill = fill
        self._add_mask(mask, hides, n.name == "setitem")
        return True

    def _hides(self, fill: float, dtype: torch.dtype) -> bool:
        """Whether scores of this size have no weight beside any that may come."""
        ops = [(how, by) for how, by in self.p.score_ops if how != "+"]
        bounded = self.p.activation in ("tanh", "sigmoid") and all(
            type(by) is not Ref for _, by in ops
        )
        factors = [by if how == "*" else 1 / by for how, by in ops if bounded]
        least = _HIDDEN * max(1.0, abs(math.prod(factors))) if bounded else _HIDDEN_BELOW_ALL
        return fill <= max(least, torch.finfo(dtype).min)

    def _add_mask(self, number: int, hides: str, by_index: bool = False) -> None:
        elements = self.indices(number)
        if by_index:  # of the first axes
            elements = elements.view(*elements.shape, *[1] * (self.index.dim() - elements.dim()))
        self.p.masks.append(ScoreMask(int(number), hides, self._by_score(elements)))

    def _possible_values(self, number: int) -> tuple[set[float], set[int], set[int]] | None:
        """The values that a tensor may have, as it is made of binary tensors, element by element.

        Then those of them that are not boolean, which must hold 0 and 1 alone, and the calls; None
        where it is made of anything else.
        """
        values = self.graph.values
        ids, leaves = trace_back(self.graph, number, moves=_is_by_element)
        assumed = {v for v in leaves if values[v].dtype is not torch.bool}
        if len(leaves) > 3 or any(values[v].requires_grad or values[v].constant for v in assumed):
            return None
        # Shapes and dtypes alone of these: no random number of the user's may be drawn for them.
        like = {v for i in ids for v in self.graph.nodes[i].refs} - {*leaves}
        like = {v for v in like if values[v].maker not in ids}
        drawn = {v: self.random(v).to(values[v].device, values[v].dtype) for v in like}
        numbers = set[float]()
        for choice in itertools.product((0, 1), repeat=len(leaves)):
            feed = {
                v: torch.full(self.shape(v), c, dtype=values[v].dtype, device=values[v].device)
                for v, c in zip(leaves, choice, strict=True)
            }
            (x,) = self.graph.evaluate(ids, drawn | feed, [number], self.sizes)
            numbers.update(x.unique().tolist())
        return numbers, assumed, ids


def _is_by_element(graph: Graph, node: Node) -> bool:
    truths = graph.values[node.out[0]].dtype is torch.bool
    return node.name in _BY_ELEMENT and not truths and not node.pinned
