"""What follows the scores: numbers, masks in anybody's style, a softmax by name or by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast.graphs.graph import Node, Ref, need
from bahdanau_fast.graphs.probe import PRODUCTS, QUOTIENTS, VIEWS, Probe

__all__ = ["Mask", "Softmax", "Weighing"]

# A filled score of at most this is hidden by the softmax.
_HIDDEN = -1e4
# Calls that make masks of truths, element by element.
_BY_ELEMENT = VIEWS | PRODUCTS | {
    *("add", "sub", "rsub", "neg", "to", "type", "type_as", "double", "half", "bfloat16", "log"),
    *("int", "long", "masked_fill", "where", "ones_like", "zeros_like", "full", "full_like"),
    *("new_full", "expand", "expand_as", "repeat", "broadcast_to", "clone", "tensor", "detach"),
}  # fmt: skip
_CASTS = {"to", "type_as", "type", "clone"}
_SUMS = {"sum", "add", "expand", "expand_as", "detach"}
_FOR_SHAPE = {"ones_like", "zeros_like", "full_like", "new_full"}
_OPERATIONS = {"add": "+", **dict.fromkeys(PRODUCTS, "*"), **dict.fromkeys(QUOTIENTS, "/")}


class Mask(NamedTuple):
    """A tensor that hides scores, by its number."""

    number: int
    # "true": where it is; "false": where it is not; "far": where it is far below zero, as it is or
    # "subtracted"; "zero": where it is zero.
    hides: str
    at: Tensor  # (scores,): which element of it each score has


@dataclass
class Weighing:
    """What makes weights of scores."""

    index: Tensor  # which score is where in the weights
    after: list[tuple[str, Any]] = field(default_factory=list)  # (operation, by what)
    masks: list[Mask] = field(default_factory=list)
    fill: float | None = None  # what hidden scores become
    weights: int | None = None
    key_at: Any = None  # (scores,), the place among the keys of each
    exact: bool = True  # rows with nothing to look at are as the operator has them
    assumed: set[int] = field(default_factory=set)  # tensors that hold nothing but zero and one
    truths: set[int] = field(default_factory=set)  # calls that make masks of truths
    ids: set[int] = field(default_factory=set)


class Softmax(Probe):
    """From scores to their weights."""

    end: int  # calls before this one are looked at

    def weighing(self, scores: int, index: Tensor) -> Weighing:
        """What follows scores that are at ``index``."""
        self.w, v = Weighing(index), scores
        while self.w.weights is None or self._unnormalised(v):
            v = self._softmax(v)
        return self.w

    def _softmax(self, v: int) -> int:
        """The next call behind the scores, or the exponentials."""
        w, (v, i) = self.w, self._next(v)
        n = self.graph.nodes[i]
        w.ids.add(i)
        (out,) = n.out
        by = n.args[1] if len(n.args) > 1 else None
        if w.weights is not None:
            need(self._masked(n, v), "is changed otherwise")
            w.weights = out
        elif n.name == "softmax":
            self._over(n.kwargs.get("dim", by))
            w.weights = out
        elif n.name == "exp":
            w.weights, w.exact = out, False
        elif n.name in VIEWS | _CASTS and len(n.operands()) == 1:
            need(self.graph.values[out].dtype is self.graph.values[v].dtype, "is cast")
            before, w.index = w.index, self.run([i], {v: w.index}, out).long()
            need(w.index.numel() == before.numel(), "is cut")
        elif not self._masked(n, v):
            refs = n.refs()
            if len(n.args) == 2 and type(n.args[0]) in (int, float):
                by = n.args[0]
            value = self.graph.values[refs[-1]]  # the scores again where it is a number
            one = type(by) in (int, float) or (value.numel == 1 and len(value.shape) < 2)
            how = _OPERATIONS.get(n.name)
            usual = one and not n.writes and not n.kwargs and refs[0] == v
            need(usual and how and (by is n.args[-1] or how != "/"), f"is changed by {n.name}")
            # Its gradient is a sum over the vector's, which 16 bits round.
            learnt = type(by) is Ref and how != "+" and n.state.grad and value.requires_grad
            need(not learnt or self.graph.values[out].dtype.itemsize > 2, "is scaled in 16 bits")
            if w.masks:  # what is far below zero stays so
                factor: Any = by if type(by) in (int, float) and how != "+" else 0
                far = -1.0 if w.fill is None else w.fill
                far = far * factor if how == "*" or not factor else far / factor
                need(far <= _HIDDEN, "is changed behind a mask")
                w.fill = far
            w.after.append((str(how), by))
        return out

    def _next(self, v: int) -> tuple[int, int]:
        """The call that reads a tensor next, and what it reads of it."""
        w, nodes, values = self.w, self.graph.nodes, self.graph.values
        read = [i for i in values[v].users if v in nodes[i].operands()]
        users = [i for i in read if nodes[i].name not in _FOR_SHAPE]
        names = [nodes[i].name for i in users]
        if len(users) == 2 and names[0] == "detach":  # of ``scores.data``, which is written to
            (alias,) = nodes[users[0]].out
            fills = values[alias].users
            need(len(fills) == 1 and fills[0] < users[1], "is read elsewhere")
            fill = nodes[fills[0]]
            need(fill.writes and not values[fill.out[0]].users, "is read elsewhere")
            need(self._masked(fill, alias), "is changed otherwise")
            w.ids |= {users[0], fills[0]}
            w.exact &= not fill.state.grad or w.fill == -math.inf
            users = users[1:]
        elif len(users) == 2 and {*names} & {"max", "amax"} and "sub" in names:
            i, j = sorted(users)  # the largest is subtracted, which changes no weight
            views, ids = self._views(i)
            first, *others = nodes[j].refs()
            need(first == v and others[-1] in views, "is read elsewhere")
            w.ids |= ids | {i, j}
            (v,) = nodes[j].out
            users = values[v].users
        need(len(users) == 1 and users[0] < self.end, "is read elsewhere")
        need(len(nodes[users[0]].out) == 1, f"its values are needed by {nodes[users[0]].name}")
        return v, users[0]

    def _views(self, i: int) -> tuple[list[int], set[int]]:
        """Results of a call and views of them, and the calls that make these."""
        found, ids = [*self.graph.nodes[i].out], set()
        for v in found:
            for j in self.graph.values[v].users:
                n = self.graph.nodes[j]
                if n.name in VIEWS | {"detach", "expand", "expand_as"} and n.refs()[0] == v:
                    ids.add(j)
                    found += n.out
        return found, ids

    def _over(self, dim: Any) -> None:
        index = self.w.index
        dim = int(index.dim() not in (0, 1, 3)) if dim is None else dim  # torch's of old
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        need(type(dim) is int, "is summed over several axes")
        numbers = torch.arange(index.shape[dim]).view(-1, *[1] * ((-dim - 1) % index.dim()))
        self.w.key_at = self._of_scores(numbers)

    def _of_scores(self, numbers: Tensor) -> Tensor:
        """What is there at each score, of something that broadcasts with them as they are now."""
        index = self.w.index
        found = torch.empty(index.numel(), dtype=torch.long)
        found[index.reshape(-1)] = numbers.long().expand(index.shape).reshape(-1)
        return found

    def _unnormalised(self, v: int) -> bool:
        """Whether weights do not sum to one yet; they may be divided by their sum."""
        w, nodes, values = self.w, self.graph.nodes, self.graph.values
        users = sorted(values[v].users)
        quotient = nodes[users[-1]] if len(users) > 1 else None
        if quotient is not None and quotient.name in QUOTIENTS and quotient.refs()[0] == v:
            self._divided(v, users[-1], int(quotient.refs()[-1]))
            return False
        if w.key_at is None:
            return True
        # Hidden after the softmax, and made to sum to one again.
        i = users[0] if len(users) == 1 else self.end
        if i >= self.end or nodes[i].name not in PRODUCTS:
            return False
        factor, alike = self._factor(nodes[i], v), values[nodes[i].out[0]].numel == values[v].numel
        return alike and factor is not None and self._of_truths([factor]) is not None

    def _divided(self, v: int, quotient: int, total: int) -> None:
        """Exponentials are divided by their sum over some axes."""
        w, (out,) = self.w, self.graph.nodes[quotient].out
        ids, todo = {quotient}, [total]
        while todo:
            maker = self.graph.values[todo.pop()].maker
            n = self.graph.nodes[-1 if maker is None else maker]
            need(n.name in VIEWS | _SUMS, "is divided otherwise")
            ids.add(int(maker or 0))
            todo += [t for t in n.operands() if t != v]
        x = self.random(v) + 0.5
        sums = x / self.run(ids, {v: x}, out)
        key_at = torch.empty(x.shape)
        for group in sums.reshape(-1).round(decimals=6).unique():
            there = (sums - group).abs() < 1e-5
            need(math.isclose(x[there].sum(), group, rel_tol=1e-5), "is no softmax")
            key_at[there] = torch.arange(int(there.sum())).to(key_at)
        before, w.key_at = w.key_at, self._of_scores(key_at)
        need(before is None or torch.equal(before, w.key_at), "is no softmax")
        w.ids |= ids
        w.weights, w.exact = out, False

    def _masked(self, n: Node, v: int) -> bool:
        """Whether a call hides some of the scores."""
        args, w, values = n.args, self.w, self.graph.values
        if n.name in ("masked_fill", "setitem") and args[0] == v:
            rest = [*args[1:], *(n.kwargs[k] for k in ("mask", "value") if k in n.kwargs)]
            return self._filled(v, rest[0], rest[1], "true", n.name == "setitem")
        if n.name == "where" and len(args) == 3:
            mask, b, a = args
            if n.func is Tensor.where:
                b, mask = mask, b
            if type(b) is Ref and b == v:
                return self._filled(v, mask, a, "false")
            return type(a) is Ref and a == v and self._filled(v, mask, b, "true")
        factor = self._factor(n, v)
        if factor is None or n.name not in PRODUCTS | {"add", "sub"}:
            return False
        found = self._of_truths([factor])
        if found is None:
            return False
        made, assumed, ids = found
        numbers = {x for (one,) in made for x in one.unique().tolist()}
        far = [x for x in numbers if x != 0.0]
        if n.name in PRODUCTS:
            need(numbers == {0.0, 1.0}, "is multiplied")
            self._hide(factor, "zero")
            if w.weights is None:  # and something far below is put there
                then = values[n.out[0]].users
                need(len(then) == 1 and self.graph.nodes[then[0]].name in ("add", "sub"),
                     "is multiplied")  # fmt: skip
        else:
            sign = -1.0 if n.name == "sub" else 1.0
            need(len(far) == 1 and sign * far[0] <= _HIDDEN, "is added to")
            if not any(mask.hides == "zero" for mask in w.masks):
                w.exact &= math.isinf(far[0])
            w.fill = -math.inf if math.isinf(far[0]) else w.fill
            self._hide(factor, "far" if sign > 0 else "subtracted")
        w.assumed |= assumed
        w.truths |= ids
        return True

    def _factor(self, n: Node, v: int) -> int | None:
        """With what else a call computes, where that is one tensor that may be a mask."""
        refs = n.refs()
        if len(refs) != 2 or v not in refs or n.kwargs or (n.name == "sub" and refs[0] != v):
            return None
        other = int(refs[refs[0] == v])
        return None if self.graph.values[other].numel == 1 else other

    def _filled(self, v: int, mask: Any, fill: Any, hides: str, by_index: bool = False) -> bool:
        """Scores become a number where a mask says so."""
        w = self.w
        if type(fill) not in (int, float):
            found = self._of_truths([fill])
            numbers = {x for (one,) in found[0] for x in one.unique().tolist()} if found else set()
            need(len(numbers) == 1 and found and not found[1], "fills with several numbers")
            fill = numbers.pop()
            w.ids |= {
                i for i in self.graph.values[v].users if self.graph.nodes[i].name in _FOR_SHAPE
            }
        need(fill <= _HIDDEN, "fills with what is seen")
        usual = type(mask) not in (int, float, tuple) and w.fill in (None, fill)
        need(usual and self.graph.values[mask].dtype is torch.bool, "is filled otherwise")
        w.fill = float(fill)
        self._hide(mask, hides, by_index)
        return True

    def _hide(self, number: int, hides: str, by_index: bool = False) -> None:
        at = self.numbers(number)
        if by_index:  # of the first axes
            at = at.view(*at.shape, *[1] * (self.w.index.dim() - at.dim()))
        self.w.masks.append(Mask(int(number), hides, self._of_scores(at)))

    def _of_truths(self, wanted: list[int]) -> tuple[list[list[Tensor]], set[int], set[int]] | None:
        """Some tensors for each choice of the truths that they are made of.

        Then, what stands for truths, and the calls; None where something else is in them.
        """
        graph, ids, truths, todo = self.graph, set[int](), set[int](), [*wanted]
        assumed = set[int]()
        while todo:
            x = todo.pop()
            value = graph.values[x]
            maker = None if value.maker is None else graph.nodes[value.maker]
            if value.dtype is torch.bool:
                truths.add(x)
            elif maker is not None and maker.name in _BY_ELEMENT:
                ids.add(value.maker)
                todo += [] if maker.name in _FOR_SHAPE else maker.operands()
            elif value.requires_grad or value.constant:
                return None
            else:
                assumed.add(x)
        if len(truths | assumed) > 3:
            return None
        made = []
        every = [*truths, *assumed]
        for choice in itertools.product((0, 1), repeat=len(every)):
            feed = {
                v: torch.full(self.shape(v), c, dtype=graph.values[v].dtype)
                for v, c in zip(every, choice, strict=True)
            }
            given = {v for i in ids for v in graph.nodes[i].refs()} - feed.keys()
            feed |= {v: self.random(v) for v in given if graph.values[v].maker not in ids}
            made.append(graph.evaluate(ids, feed, wanted, self.sizes))
        return made, assumed, ids
