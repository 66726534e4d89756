"""What a call computes: torch's functions with their arguments, as a graph of nodes and values.

A graph comes from ``torch.compile`` or from a first call (:mod:`.notes`). Its nodes can be carried
out again on tensors of our own, at the sizes of the call or at small ones.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

ACTIVATIONS = {"tanh", "relu", "leaky_relu", "sigmoid"}
# Functions that take of their first tensor its shape, dtype or device alone.
_LIKE = {"ones_like", "zeros_like", "full_like", "new_full", "new_tensor"}
_PRIME = 101  # the first number of a size that is a symbol


class NotFusable(Exception):
    """This is not fused; the message says why."""

    maybe_later = False  # whether it may be fused at other sizes


def reason(error: Exception) -> str:
    """Why something is not fused, by what was raised."""
    return str(error) if isinstance(error, NotFusable) else f"{type(error).__name__}: {error}"


def require(condition: Any, why: str) -> None:
    """Raise NotFusable where a condition does not hold."""
    if not condition:
        raise NotFusable(why)


class Ref(int):
    """A tensor in a node's arguments, by its number."""


class State(NamedTuple):
    """What of torch's state decides what a call computes."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    inference: bool


def state() -> State:
    """The state of this thread."""
    kinds = ("cpu", "cuda") if torch._C._is_any_autocast_enabled() else ()
    on = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
    return State(torch.is_grad_enabled(), on, torch.is_inference_mode_enabled())


class Value:
    """A tensor of a call: its kind, and what it holds where that is available."""

    def __init__(
        self, x: Tensor, maker: Any, data: Tensor | None, constant: bool, size: Any
    ) -> None:
        strided = x.layout is torch.strided and not x.is_nested
        sizes: Any = (x.shape, x.stride()) if strided else ((), ())
        self.shape, strides = (tuple(map(size, numbers)) for numbers in sizes)
        # Axes as they lie in memory, the outermost first.
        self.order = sorted(range(len(strides)), key=lambda d: -(strides[d] or math.inf))
        self.dtype, self.device = x.dtype, x.device
        self.requires_grad, self.numel = x.requires_grad, math.prod(self.shape)
        self._storage = x.untyped_storage()._cdata if strided else None
        self.maker = maker  # the number of the node that made it
        self.users: list[int] = []  # the nodes that read it
        # Whether it is made of parameters alone.
        self.constant = constant and all(type(n) is int for n in sizes[0])
        self.data = data  # the tensor with its elements, of an input of the graph
        self._tensor = weakref.ref(x)

    def with_layout(self, x: Tensor) -> Tensor:
        """``x`` dense in the memory layout of this one, so that views of it work alike."""
        inverse = [self.order.index(d) for d in range(x.dim())]
        return x.permute(self.order).contiguous().permute(inverse)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor itself; None where it is gone."""
        return self._tensor()

    @property
    def storage(self) -> int | None:
        """Its storage; None once it is gone, since another tensor may have it then."""
        return None if self.tensor is None else self._storage


@dataclass(frozen=True)
class Node:
    """A call of a function of torch; tensors are numbers."""

    func: Any
    name: str  # without underscores, as of ``add_`` and ``__add__``
    args: Any
    kwargs: Any
    out: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]  # (before, after) of what it wrote to
    single: bool  # whether its result is one tensor
    state: State
    pinned: bool = False  # cannot be replaced: hooks see what it saves, or numbers are computed
    source: str = ""  # file and line of the user's code

    @functools.cached_property
    def refs(self) -> list[int]:
        """Numbers of its tensors."""
        return tensors((self.args, self.kwargs))

    def operands(self) -> list[int]:
        """Its tensors without those that give a shape or dtype alone, as in ``view_as``."""
        if self.name in _LIKE:
            return self.refs[1:]
        return self.refs[: 1 if self.name.endswith("_as") or self.name == "to" else None]


def tree_map(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with ``f`` of all leaves of its tuples, lists, dictionaries and slices."""
    if isinstance(x, (tuple, list)):
        kind: Any = next(k for k in (torch.Size, tuple, list) if isinstance(x, k))
        return kind([tree_map(f, item) for item in x])
    if isinstance(x, dict):
        return {name: tree_map(f, item) for name, item in x.items()}
    if isinstance(x, slice):
        return slice(*[tree_map(f, item) for item in (x.start, x.stop, x.step)])
    return f(x)


def tensors(x: Any) -> list[Any]:
    """The tensors, or their numbers, in some arguments."""
    leaves: list[Any] = []

    def collect(leaf: Any) -> Any:
        leaves.extend([leaf] if isinstance(leaf, (Tensor, Ref)) else ())
        return leaf

    tree_map(collect, x)
    return leaves


class Graph:
    """Nodes in their order, and the values that they read and make, by number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.symbols: dict[Any, int] = {}  # a number for each size that is a compiler's symbol
        self._refs: dict[int, int] = {}

    def find(self, x: Tensor) -> Ref | None:
        """The number of a tensor."""
        ref = self._refs.get(id(x))
        return None if ref is None or self.values[ref].tensor is not x else Ref(ref)

    def add(
        self, x: Tensor, maker: int | None = None, data: Any = None, constant: bool = False
    ) -> Ref:
        """A new number for a tensor, which is new or has been written to."""
        ref = self._refs[id(x)] = len(self.values)
        self.values.append(Value(x, maker, data, constant, self.size))
        return Ref(ref)

    def size(self, n: Any) -> int:
        """A size as a number: symbols stand for any, so theirs are primes, as is a quotient's."""
        if type(n) is int:
            return n
        expr = n.node.expr
        number = expr.xreplace({s: self._prime(s) for s in sorted(expr.free_symbols, key=str)})
        small = expr.free_symbols and number < _PRIME
        return self._prime(expr) if small or not expr.is_polynomial() else int(number)

    def _prime(self, x: Any) -> int:
        primes = (p for p in itertools.count(_PRIME) if all(map(p.__mod__, range(2, p))))
        new = itertools.islice(primes, len(self.symbols), None)
        return self.symbols.get(x) or self.symbols.setdefault(x, next(new))

    def constant(self, refs: list[int]) -> bool:
        """Whether what is made of these is made of parameters alone."""
        return bool(refs) and all(self.values[ref].constant for ref in refs)

    def append(self, node: Node) -> None:
        """Add the next node."""
        for ref in dict.fromkeys(node.refs):
            self.values[ref].users.append(len(self.nodes))
        self.nodes.append(node)

    def evaluate(
        self, ids: Iterable[int], feed: dict[int, Tensor], outputs: list[int], sizes: SmallSizes,
        exact: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Outputs of some nodes at these sizes, from a feed of their inputs; exactly in fp64."""
        env, order = dict(feed), sorted(ids)
        last = {v: i for i in order for v in self.nodes[i].refs if v not in {*outputs, *feed}}
        fed_storages = {self.values[v].storage for v in feed}

        def fill(x: Any) -> Any:
            if type(x) is Ref and x not in env:
                env[x] = sizes.cut(self.values[x])
            return env[x] if type(x) is Ref else x

        for i in order:
            node = self.nodes[i]
            args, kwargs = sizes.arguments(node)
            for before, after in node.writes:
                fed = before not in env or self.values[before].storage in fed_storages
                env[after] = env[before] = fill(Ref(before)).clone() if fed else env[before]
            func, filled = node.func, tree_map(fill, (args, kwargs))
            if exact:
                func = Tensor.double if node.name in _CASTS else func
                filled = tree_map(_double, filled)
            out = func(*filled[0], **filled[1])
            env.update(zip(node.out, [out] if node.single else tensors(out), strict=False))
            for v in [v for v in node.refs if last.get(v) == i]:
                env.pop(v, None)  # as the user's code lets go of it
        return [env[number] for number in outputs]


def _double(x: Any) -> Any:
    floating = isinstance(x, torch.dtype) and x.is_floating_point
    return torch.float64 if floating else x


_CASTS = {"float", "half", "bfloat16"}
# Functions whose integers are sizes.
SIZED = {
    *("view", "reshape", "expand", "repeat", "broadcast_to", "unflatten", "new_zeros", "new_ones"),
    *("repeat_interleave", "new_full", "zeros", "ones", "full"),
}
_SMALL = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_LEAST = 5  # smaller sizes stay: they may number an axis


class SmallSizes(NamedTuple):
    """Other sizes for the nodes of a graph. Where two axes have the same, both change alike."""

    small: dict[int, int]  # the size in place of each one that changes

    @classmethod
    def of(
        cls, values: Collection[Value], fixed: set[int], unlike: SmallSizes | None = None
    ) -> SmallSizes:
        """As small as different sizes may be, ``unlike`` others; those of parameters stay."""
        fixed = fixed | {n for v in values if v.constant for n in v.shape}
        every = {n for v in values for n in v.shape}
        others = unlike.small if unlike else {}
        for primes in (_SMALL[i:] for i in range(6)):  # until no product is another size
            small = {n: n for n in every if n < _LEAST or n in fixed}
            bases = [n for n in small if 1 < n < _LEAST]
            for n in sorted(every - small.keys()):
                products = (itertools.combinations_with_replacement(bases, r) for r in (2, 3))
                factors = next((p for p in itertools.chain(*products) if math.prod(p) == n), None)
                if factors is not None:
                    small[n] = math.prod(map(small.__getitem__, factors))
                    continue
                bases.append(n)
                taken = {*small.values(), others.get(n)}
                small[n] = next((p for p in primes if p < n and p not in taken), n)
            if len({*small.values()}) == len(small):
                return cls({n: new for n, new in small.items() if new != n})
        return cls({})

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The small shape for one of the call."""
        return tuple(self.small.get(n, n) for n in shape)

    def full(self, n: int) -> int:
        """The size of the call for a small one."""
        return next((old for old, new in self.small.items() if new == n), n)

    def arguments(self, node: Node) -> tuple[Any, Any]:
        """The arguments of a node with these sizes."""
        args, kwargs = node.args, node.kwargs
        parts: Any = args[0] if args and type(args[0]) in (list, tuple) else ()
        if len(parts) in self.small and parts.count(parts[0]) == len(parts):  # again and again
            args = parts[: self.small[len(parts)]], *args[1:]
        if node.name in SIZED:
            full = args, kwargs
            args, kwargs = tree_map(lambda x: self.small.get(x, x) if type(x) is int else x, full)
        return args, kwargs

    def cut(self, value: Value) -> Tensor:
        """A tensor of the call, as much of it as these sizes hold; drawn where it is unknown."""
        x, shape = value.data, self.shape(value.shape)
        if x is None or x.dim() != len(shape) or any(map(operator.lt, x.shape, shape)):
            drawn = torch.randn(shape, device=value.device)
            drawn = drawn if value.dtype.is_floating_point else drawn < -0.5
            return value.with_layout(drawn.to(value.dtype))
        return value.with_layout(x.detach()[tuple(map(slice, shape))])
