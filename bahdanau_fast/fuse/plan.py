"""The operator on the inputs of a piece, as one generated function: all is decided once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import run
from bahdanau_fast.call import Call
from bahdanau_fast.fuse.caches import scaled
from bahdanau_fast.fuse.find import Addend, Piece, Place
from bahdanau_fast.fuse.graph import Graph, Ref, Sizes, need
from bahdanau_fast.reference import TANH

__all__ = ["Dim", "Plan", "plan"]

# Elements of the activated sum below which a memory of projected keys costs more than it saves.
_SMALL = 1 << 18
# Features of the keys that the operator projects itself, at most.
_FEATURES = 64


class Dim(int):
    """A size that has a name in the source of a plan; so have products of it."""

    source: str

    def __new__(cls, size: int, source: str) -> Dim:
        """A size of a name."""
        made = super().__new__(cls, size)
        made.source = source
        return made

    def __repr__(self) -> str:
        return self.source

    def __mul__(self, other: int) -> Dim:
        return Dim(int(self) * int(other), f"{self!r} * {other!r}")

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Dim:
        return Dim(int(self) // int(other), f"({self!r}) // ({other!r})")


class Plan(NamedTuple):
    """What computes a piece.

    Attributes:
        run: of a module's caches, what puts the weights where the user holds them, and the inputs:
            (context or scores, weights or None).
        inputs: numbers of the tensors that it takes.
        dims: sizes that it takes behind them.
        source: of the function.
    """

    run: Callable[..., tuple[Tensor, Tensor | None]]
    inputs: list[int]
    dims: list[Dim]
    source: str


class Laid:
    """Puts first the weights, then the context of a call into the layout of the user's own."""

    def __init__(self, weights: Callable[..., Tensor], context: Callable[..., Tensor]) -> None:
        self._next = [context, weights]

    def restore(self, result: Tensor) -> Tensor:
        """The next of the two."""
        return self._next.pop()(result)


class _Code(NamedTuple):
    """Source of a tensor, and its shape; what changes nothing is left out."""

    source: str
    shape: list[int]

    def reshape(self, shape: list[int]) -> _Code:
        return self if shape == self.shape else _Code(f"{self.source}.reshape({shape})", shape)

    def permute(self, order: list[int]) -> _Code:
        if order == sorted(order):
            return self
        return _Code(f"{self.source}.permute({order})", [self.shape[i] for i in order])

    def expand(self, shape: list[int]) -> _Code:
        return self if shape == self.shape else _Code(f"{self.source}.expand({shape})", shape)

    def narrow(self, axis: int, begin: int, length: int) -> _Code:
        if self.shape[axis] == length:
            return self
        shape = [length if i == axis else n for i, n in enumerate(self.shape)]
        return _Code(f"{self.source}.narrow({axis}, {begin}, {length})", shape)


def plan(graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int]) -> Plan:
    """Of a piece, at some sizes.

    Args:
        graph: that the piece is of.
        piece: what was found.
        sizes: the small ones at which it was found.
        size: the size in place of a small one.
    """
    return _Planner(graph, piece, sizes, size).plan()


class _Planner:
    def __init__(
        self, graph: Graph, piece: Piece, sizes: Sizes, size: Callable[[int], int]
    ) -> None:
        self.graph, self.p, self.sizes, self._size = graph, piece, sizes, size
        self.inputs: list[int] = []
        self.dims: dict[str, Dim] = {}
        self.b, self.q, self.k = (
            math.prod(map(self.size, piece.sizes[sum(piece.groups[:g]) :][: piece.groups[g]]))
            for g in range(3)
        )
        self.hidden = self.size(piece.hidden)
        self.small = self.b * self.q * self.k * self.hidden < _SMALL

    def size(self, n: int) -> int:
        found = self._size(n)
        if type(found) is Dim:
            self.dims[found.source] = found
        return found

    def all(self, sizes: list[int] | tuple[int, ...]) -> list[int]:
        return [self.size(n) for n in sizes]

    def name(self, number: int) -> str:
        if number not in self.inputs:
            self.inputs.append(int(number))
        return f"x{int(number)}"

    def input(self, number: int) -> _Code:
        shape = self.sizes.shape(self.graph.values[number].shape)
        return _Code(self.name(number), self.all(shape))

    def placed(self, code: _Code, place: Place, features: int | None) -> _Code:
        """Brought to the axes of queries or keys, those that it lacks of size one."""
        tail = [] if features is None else [features]
        first = self.all(place.first)
        code = code.reshape(first).permute(place.turn)
        return code.reshape([*self.all(place.own), *tail])

    def whole(self, code: _Code, place: Place, length: int, features: int) -> _Code:
        """(b,length,features)."""
        code = code.expand([*self.all(place.whole), features])
        return code.reshape([self.b, length, features])

    def weight(self, each: Addend) -> str:
        """(H,F), of a tensor that may hold more."""
        at = each.w_at
        assert each.w is not None
        assert at is not None
        down = int(at[1, 0] - at[0, 0])
        across = int(at[0, 1] - at[0, 0]) if at.shape[1] > 1 else 1
        code, first = self.input(each.w), int(at[0, 0])
        rows, columns = self.hidden, self.size(at.shape[1])
        numel = math.prod(code.shape)
        if across == 1:
            wide = self.size(down)
            begin, left = divmod(first, down)
            code = code.reshape([numel // wide, wide])
            code = code.narrow(0, self.size(begin), rows).narrow(1, self.size(left), columns)
            return code.source
        need(down == 1, "its weight is picked")
        wide = self.size(across)
        begin, left = divmod(first, across)
        code = code.reshape([numel // wide, wide])
        code = code.narrow(0, self.size(begin), columns).narrow(1, self.size(left), rows)
        return f"{code.source}.t()"

    def vector(self) -> str:
        """(H,) or (1,H); a list of several."""
        code, begins = self.input(self.p.vector), self.p.vectors_at
        if code.shape in ([self.hidden], [1, self.hidden]):
            return code.source
        code = code.reshape([math.prod(code.shape)])
        each = [code.narrow(0, begin, self.hidden).source for begin in begins]
        return each[0] if len(each) == 1 else f"[{', '.join(each)}]"

    def addend(self, each: Addend) -> _Code:
        """Projected, with the axes that it lacks of size one."""
        assert each.place is not None
        features = self.size(each.rows.shape[1])
        code = self.placed(self.input(each.x), each.place, features)
        if each.w is not None:
            bias = "None" if each.bias is None else self.name(each.bias)
            source = f"linear({code.source}, {self.weight(each)}, {bias})"
            code = _Code(source, [*code.shape[:-1], self.hidden])
        if each.factor != 1.0:
            code = _Code(f"({code.source} * {each.factor})", code.shape)
        return code

    def total(self, addends: list[Addend], length: int) -> str:
        """(b,length,H), the sum of some addends."""
        need(addends, "no query")
        codes = [self.addend(each) for each in addends]
        shape = [max(sizes) for sizes in zip(*(code.shape for code in codes), strict=True)]
        source = " + ".join(code.source for code in codes)
        code = _Code(f"({source})" if len(codes) > 1 else source, shape)
        assert addends[0].place is not None
        return self.whole(code, addends[0].place, length, self.hidden).source

    def raw(self, each: Addend, length: int) -> str:
        """(b,length,F), not projected."""
        assert each.place is not None
        features = self.size(each.rows.shape[1])
        code = self.placed(self.input(each.x), each.place, features)
        return self.whole(code, each.place, length, features).source

    def plan(self) -> Plan:
        p = self.p
        keys = [each for each in p.addends if each.key]
        queries = [each for each in p.addends if not each.key]
        w_q = w_k = bias = features = "None"
        lines = []
        projected = [each for each in keys if each.w is not None and each.factor == 1.0]
        if len(keys) == 2 and len(projected) == 2 and p.activation:
            narrow = [e for e in keys if e.rows.shape[1] <= _FEATURES and e.bias is None]
            if narrow:
                each = min(narrow, key=lambda e: e.rows.shape[1])
                features = f"({self.raw(each, self.k)}, {self.weight(each)})"
                keys.remove(each)
        if len(keys) == 1 and keys[0] in projected:
            (each,) = keys
            k, w_k = self.raw(each, self.k), self.weight(each)
            bias = "None" if each.bias is None else self.name(each.bias)
        else:
            k = self.total(keys, self.k)
        only = queries[0] if queries else None
        inside = p.context is not None and w_k != "None" and len(queries) == 1
        if inside and only is not None and only.w is not None and only.factor == 1.0 and (
            self.small or only.bias is None or bias == "None"
        ):  # fmt: skip
            q, w_q = self.raw(only, self.q), self.weight(only)
            biases = [] if only.bias is None else [self.name(only.bias)]
            bias = " + ".join(biases + [bias] * (bias != "None")) or "None"
        else:
            q = self.total(queries, self.q)
        lines += [f"q = {q}", f"k = {k}", f"v = {self.vector()}", "inside = TANH"]
        if features != "None" or p.activation != "tanh":
            lines += [f"features, w_f = {features if features != 'None' else '(None, None)'}"]
            lines += [
                "inside = TANH._replace(features=features, w_f=w_f, "
                f"activation={p.activation!r}, negative_slope={p.slope})"
            ]
        after = [(how, self.name(by) if type(by) is Ref else by) for how, by in p.after]
        if p.context is None:
            lines += self.scores(w_k, bias, after)
        else:
            lines += self.attend(w_q, w_k, bias, after)
        given = [*(f"x{number}" for number in self.inputs), *self.dims]
        source = f"def planned(caches, give, {', '.join(given)}):\n    " + "\n    ".join(lines)
        names = dict(
            Laid=Laid,
            linear=F.linear, Call=Call, run=run, scaled=scaled,
            TANH=TANH, torch=torch,
        )  # fmt: skip
        exec(source, names)
        return Plan(names["planned"], self.inputs, [*self.dims.values()], source)  # type: ignore[arg-type]

    def dtype(self, number: int) -> str:
        return str(self.graph.values[number].dtype)

    def laid(self, code: _Code, way: tuple[list[int], list[int]], sizes: list[int]) -> str:
        """In the layout of the user's own result."""
        order, shape = way
        return code.reshape(sizes).permute(order).reshape(self.all(shape)).source

    def scores(self, w_k: str, bias: str, after: list[tuple[str, Any]]) -> list[str]:
        p = self.p
        given = f"q, k, k, v, None, {w_k}, {bias}, inside=inside, scores_only=True"
        body = [f"s = run.scores(Call({given}))"]
        body += [f"s = s + {self.by(by)}" for _, by in after]
        lines = self.repeated(body, ("q", "k"), ("s",))
        dtype = self.dtype(p.scores)
        lines += [f"s = s if s.dtype is {dtype} else s.to({dtype})"]
        code = self.laid(_Code("s", [self.b, self.q, self.k]), p.scores_way, self.all(p.sizes))
        return [*lines, f"return {code}, None"]

    def by(self, by: Any) -> str:
        """What follows the scores; of several vectors, the part of one."""
        one = len(self.p.vectors_at) == 1 or not str(by).startswith("x")
        return str(by) if one else f"({by}.reshape([-1])[i] if {by}.numel() > 1 else {by})"

    def repeated(self, body: list[str], given: tuple[str, ...], made: tuple[str, ...]) -> list[str]:
        """Lines for each vector, on its part of the batch; results are put together."""
        n = len(self.p.vectors_at)
        if n == 1:
            return body
        parts = [f"{name}s = {name}.reshape({n}, -1, *{name}.shape[1:])" for name in given]
        inner = [f"{name} = {name}s[i]" for name in given] + body
        return [
            *parts, f"vectors, found = v, [{', '.join('[]' for _ in made)}]",
            "for i, v in enumerate(vectors):", *(f"    {line}" for line in inner),
            *(f"    found[{j}].append({name})" for j, name in enumerate(made)),
            f"{', '.join(made)}, = map(torch.cat, found)",
        ]  # fmt: skip

    def attend(self, w_q: str, w_k: str, bias: str, after: list[tuple[str, Any]]) -> list[str]:
        p, lines = self.p, []
        assert p.context is not None
        assert p.weights is not None
        sizes, n_vectors = self.all(p.sizes), len(p.vectors_at)
        given: tuple[str, ...] = ("q", "k", "x")
        if p.masks:
            masks = [
                self.placed(self.input(v), place, 1)
                .expand([*sizes, 1])
                .reshape([self.b, self.q, self.k])
                .source
                for v, place in p.masks
            ]
            lines += [f"m = {' | '.join(masks)}"]
            given = (*given, "m")
        values = self.input(p.values)
        turn, shape = p.values_way
        rows = math.prod(values.shape) // self.k
        batch = self.b if rows % self.b == 0 else self.b // n_vectors
        n = rows // batch
        values = values.reshape(self.all(shape)).permute(turn).reshape([batch, self.k, n])
        values = _Code(values.source, values.shape) if batch == self.b else _Code(
            f"{values.source}.repeat({self.b // batch}, 1, 1)", [self.b, self.k, n]
        )  # fmt: skip
        lines += [f"x = {values.source}"]
        follows = "(" + "".join(f"({how!r}, {self.by(by)}), " for how, by in after) + ")"
        if self.small:
            kept = "how != '+' or torch.is_grad_enabled()"
            body = ["cache = None"]
            if after:
                body += [f"v = scaled(v, [(how, by) for how, by in {follows} if {kept}])"]
        else:
            body = [f"cache, v = caches.of(v, {w_k}, {follows})"]
        mask = "~m" if p.masks else "None"
        made = {"c": _Code("c", [self.b, self.q, n]), "w": _Code("w", [self.b, self.q, self.k])}
        ends = dict.fromkeys(made, "")
        for name, number in (("c", p.context), ("w", p.weights)):
            source, dtype = name, self.dtype(number)
            if p.fill == -math.inf:  # a row with nothing to look at is NaN in plain code
                source = f"{name}.masked_fill(m.all(-1, keepdim=True), torch.nan)"
            code = _Code(f"({source}).to({dtype})", made[name].shape)
            way, axes = (p.context_way, code.shape) if name == "c" else (p.weights_way, sizes)
            ends[name] = self.laid(code, way, axes) if n_vectors == 1 else code.source
        # Laid out inside, so that the context is a function of the weights that the user holds.
        given_to = f"give({ends['w']})" if n_vectors == 1 else ends["w"]
        shape = f"Laid(lambda w: {given_to}, lambda c: {ends['c']})"
        body += [
            f"c, w = run.attend(Call(q, k, x, v, {w_q}, {w_k}, {bias}, None, {mask}, cache=cache, "
            f"shape={shape}, inside=inside))"
        ]
        lines += self.repeated(body, given, ("c", "w"))
        if n_vectors == 1:
            return [*lines, "return c, w"]
        context = self.laid(made["c"], p.context_way, made["c"].shape)
        return [*lines, f"return {context}, give({self.laid(made['w'], p.weights_way, sizes)})"]
