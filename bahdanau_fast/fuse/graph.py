"""What a call did: torch's functions with their arguments, noted while the user's code runs.

The code runs once, as it is. Of the notes, calls can be carried out again on tensors of our own, at
the sizes of the call or at small ones: torch's functions alone, none of the user's code.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from bahdanau_fast.fuse.late import QUERIES

__all__ = ["ACTIVATIONS", "SIZED", "Graph", "Left", "Node", "Recorder", "Ref", "Sizes", "State",
           "Value", "mapped", "need", "state", "tensors"]  # fmt: skip

ACTIVATIONS = {"tanh", "relu", "leaky_relu"}
_HERE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
# Results of so many elements, larger than what they are made of, are not kept alive.
_LARGE = 1 << 20
_PRIME = 101  # the first number of a size that is a symbol


class Left(Exception):
    """This is not fused; the message says why."""

    near = False  # whether there is a sum against a vector: at other sizes it may be fused


def need(condition: Any, why: str) -> None:
    """Leave what does not hold."""
    if not condition:
        raise Left(why)


class Ref(int):
    """A tensor in noted arguments, by its number."""


class State(NamedTuple):
    """What of torch's state decides what a call computes."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    inference: bool


def state() -> State:
    """Of this thread, now."""
    kinds = ("cpu", "cuda") if torch._C._is_any_autocast_enabled() else ()
    on = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
    return State(torch.is_grad_enabled(), on, torch.is_inference_mode_enabled())


class Value:
    """A tensor of a call: what it is, and itself while that is known."""

    def __init__(self, x: Tensor, maker: Any, large: bool, constant: bool, size: Any) -> None:
        self.usual = usual = x.layout is torch.strided and not x.is_nested
        given: Any = (x.shape, x.stride()) if usual else ((), ())
        self.shape, strides = (tuple(map(size, each)) for each in given)
        # Axes as they lie in memory.
        self.order = sorted(range(len(strides)), key=lambda d: -(strides[d] or math.inf))
        self.dtype, self.device, self.kind = x.dtype, x.device, type(x)
        self.requires_grad, self.numel = x.requires_grad, math.prod(self.shape)
        self._storage = x.untyped_storage()._cdata if usual else None
        self.maker = maker  # number of the call that made it
        self.users: list[int] = []  # of the calls that read it
        self.constant = constant and all(type(n) is int for n in given[0])  # of parameters alone
        self.large = large  # not kept alive
        self._tensor, self._kept = weakref.ref(x), None if large else x

    def laid(self, x: Tensor) -> Tensor:
        """Dense, with the axes as this one's in memory, for views of it."""
        back = [self.order.index(d) for d in range(x.dim())]
        return x.permute(self.order).contiguous().permute(back)

    def loosen(self) -> None:
        """Keep the tensor alive no longer."""
        self._kept = None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor itself; None where it is gone."""
        return self._tensor()

    @property
    def storage(self) -> int | None:
        """Where it is; None once it is gone, and another tensor may be there."""
        return None if self.tensor is None else self._storage


class Node(NamedTuple):
    """A call of a function of torch; tensors are numbers."""

    func: Any
    name: str  # without underscores, as of ``add_`` and ``__add__``
    args: Any
    kwargs: Any
    out: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]  # (before, after) of what it wrote to
    single: bool  # whether its result is one tensor
    state: State
    pinned: bool = False  # it stays as it is, by hooks on what is saved or by numbers in it
    place: str = ""  # file and line of the user's code
    seconds: float = 0.0

    def refs(self) -> list[int]:
        """Numbers of its tensors."""
        return tensors((self.args, self.kwargs))

    def operands(self) -> list[int]:
        """Numbers of those that are not there for their shape or type alone, as in ``view_as``."""
        return self.refs()[: 1 if self.name.endswith("_as") else None]


def mapped(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with ``f`` of everything in its tuples, lists, dictionaries and slices."""
    if isinstance(x, (tuple, list)):
        kind: Any = next(k for k in (torch.Size, tuple, list) if isinstance(x, k))
        return kind([mapped(f, each) for each in x])
    if isinstance(x, dict):
        return {name: mapped(f, each) for name, each in x.items()}
    if isinstance(x, slice):
        return slice(*[mapped(f, each) for each in (x.start, x.stop, x.step)])
    return f(x)


def tensors(x: Any) -> list[Any]:
    """The tensors, or their numbers, in some arguments."""
    found: list[Any] = []
    mapped(lambda t: found.append(t) or t if isinstance(t, (Tensor, Ref)) else t, x)  # type: ignore[func-returns-value]
    return found


def name_of(func: Any) -> str:
    """Of a function; of the attribute where it reads one."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name == "__get__" else name


class Graph:
    """The calls, in their order, and the tensors in them, by number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.symbols: dict[Any, int] = {}  # a number for each size that is a compiler's symbol
        self._numbers: dict[int, int] = {}

    def find(self, x: Tensor) -> Ref | None:
        """The number of a tensor."""
        known = self._numbers.get(id(x))
        return None if known is None or self.values[known].tensor is not x else Ref(known)

    def number(self, x: Tensor) -> Ref:
        """The number of a tensor, an old or a new one."""
        known = self.find(x)
        return self.add(x, constant=isinstance(x, nn.Parameter)) if known is None else known

    def noted(self, given: Any) -> Any:
        """Some arguments, with numbers for the tensors."""
        return mapped(lambda x: self.number(x) if isinstance(x, Tensor) else x, given)

    def add(
        self, x: Tensor, maker: int | None = None, large: bool = False, constant: bool = False
    ) -> Ref:
        """A new number for a tensor: it is new, or has been written to."""
        number = self._numbers[id(x)] = len(self.values)
        self.values.append(Value(x, maker, large, constant, self.size))
        return Ref(number)

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
        """The next call."""
        for ref in dict.fromkeys(node.refs()):
            self.values[ref].users.append(len(self.nodes))
        self.nodes.append(node)

    def evaluate(
        self, ids: Iterable[int], feed: dict[int, Tensor], want: list[int], sizes: Sizes
    ) -> list[Tensor]:
        """Some tensors, as calls make them of other ones, whose sizes are these."""
        env, order = dict(feed), sorted(ids)
        last = {v: i for i in order for v in self.nodes[i].refs() if v not in {*want, *feed}}

        def fill(x: Any) -> Any:
            if type(x) is Ref and x not in env:
                env[x] = sizes.cut(self.values[x])
            return env[x] if type(x) is Ref else x

        for i in order:
            node = self.nodes[i]
            args, kwargs = sizes.arguments(node)
            for before, after in node.writes:
                env[after] = env[before] = fill(Ref(before)).clone()
            out = node.func(*mapped(fill, args), **mapped(fill, kwargs))
            made = [out] if node.single else tensors(out)
            env.update(zip(node.out, made, strict=False))
            for v in [v for v in node.refs() if last.get(v) == i]:
                env.pop(v, None)  # as the user's code lets go of it
        return [env[number] for number in want]


class Recorder(TorchFunctionMode):
    """Notes what is called inside, and which modules made which calls."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.spans: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUERIES or torch._C._are_functorch_transforms_active():
            return func(*args, **kwargs)
        graph, at, own_name = self.graph, len(self.graph.nodes), name_of(func)
        name, given = own_name.strip("_"), tensors((args, kwargs))
        versions = [_version(t) for t in given]
        noted = graph.noted((args, kwargs))
        before, hooked = state(), torch._C._autograd._top_saved_tensors_default_hooks(True)
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        wrote = [
            t for t, v in zip(given, versions, strict=True)
            if _version(t) != v or name in _LENT
            or (v < 0 and t is result and own_name.endswith("_"))  # inference counts no versions
        ]  # fmt: skip
        writes = tuple((graph.number(t), graph.add(t, at)) for t in wrote)
        refs = tensors(noted)
        constant, values = graph.constant(refs), [graph.values[ref] for ref in refs]
        out = []
        for t in tensors(result) if isinstance(result, (Tensor, tuple, list)) else ():
            n, known = t.numel(), graph.find(t)
            large = n >= _LARGE and (
                any(v.large for v in values)
                or all(v.numel < n and not v.constant for v in values)  # no layer's result
            )
            out.append(graph.add(t, at, large, constant) if known is None else known)
        single, place = isinstance(result, Tensor), _place() if name in ACTIVATIONS else ""
        rest = tuple(out), writes, single, before, hooked is not None, place, seconds
        graph.append(Node(func, name, noted[0], noted[1], *rest))
        return result


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _place() -> str:
    """File and line of the user's code that is running."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_HERE) and not path.is_relative_to(_TORCH):
            return f"{path.name}:{line}"
    return ""


# Functions after which anybody may write to a tensor.
_LENT = {"numpy", "array", "data_ptr", "dlpack", "untyped_storage", "storage"}
# Functions whose integers are sizes.
SIZED = {
    *("view", "reshape", "expand", "repeat", "broadcast_to", "unflatten", "new_zeros", "new_ones"),
    *("repeat_interleave", "new_full", "zeros", "ones", "full"),
}
_SMALL = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_LEAST = 5  # smaller sizes stay: they may number an axis


class Sizes(NamedTuple):
    """Other sizes for the calls of a graph. Where two axes have the same, both change alike."""

    small: dict[int, int]  # in place of each that changes, another one

    @classmethod
    def of(cls, values: Collection[Value], fixed: set[int], unlike: Sizes | None = None) -> Sizes:
        """As small as different sizes may be, ``unlike`` others; those of parameters stay."""
        fixed = fixed | {n for v in values if v.constant for n in v.shape}
        every = {n for v in values for n in v.shape}
        others = unlike.small if unlike else {}
        for primes in (_SMALL[i:] for i in range(6)):  # until no product is another size
            small = {n: n for n in every if n < _LEAST or n in fixed}
            bases = [n for n in small if 1 < n < _LEAST]
            for n in sorted(every - small.keys()):
                products = (itertools.combinations_with_replacement(bases, r) for r in (2, 3))
                parts = next((p for p in itertools.chain(*products) if math.prod(p) == n), None)
                if parts is not None:
                    small[n] = math.prod(small[each] for each in parts)
                    continue
                bases.append(n)
                taken = {*small.values(), others.get(n)}
                small[n] = next((p for p in primes if p < n and p not in taken), n)
            if len({*small.values()}) == len(small):
                return cls({n: new for n, new in small.items() if new != n})
        return cls({})

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """In place of one of the call."""
        return tuple(self.small.get(n, n) for n in shape)

    def full(self, n: int) -> int:
        """The size of the call for one of these."""
        return next((old for old, new in self.small.items() if new == n), n)

    def arguments(self, node: Node) -> tuple[Any, Any]:
        """Of a call, with these sizes."""
        args, kwargs = node.args, node.kwargs
        parts: Any = args[0] if args and type(args[0]) in (list, tuple) else ()
        if len(parts) in self.small and parts.count(parts[0]) == len(parts):  # again and again
            args = parts[: self.small[len(parts)]], *args[1:]
        if node.name in SIZED:
            given = args, kwargs
            args, kwargs = mapped(lambda x: self.small.get(x, x) if type(x) is int else x, given)
        return args, kwargs

    def cut(self, value: Value) -> Tensor:
        """A tensor of the call, detached, as much of it as these sizes hold."""
        x, shape = value.tensor, self.shape(value.shape)
        if x is None:
            raise Left("what it is made of is gone after the call")
        if isinstance(x, FakeTensor):  # a compiler's, that stands for any
            drawn = torch.randn(shape, device=value.device)
            return (drawn if value.dtype.is_floating_point else drawn < -0.5).to(value.dtype)
        if shape == value.shape:
            return x.detach()
        return value.laid(x.detach()[tuple(map(slice, shape))])
