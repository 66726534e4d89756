"""What a call did: torch's functions with their arguments, noted while the user's code runs.

The code runs once, as it is. Of the notes, calls can be carried out again on tensors of our own, at
the sizes of the call or at small ones: torch's functions alone, none of the user's code.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from bahdanau_fast.fuse.late import QUERIES

__all__ = ["ACTIVATIONS", "Graph", "Left", "Node", "Recorder", "Ref", "Sizes", "State", "Value",
           "mapped", "need", "state", "tensors"]  # fmt: skip

ACTIVATIONS = {name + end: name for name in ("tanh", "relu", "leaky_relu") for end in ("", "_")}
_HERE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
# Results of so many elements, larger than what they are made of, are not kept alive.
_LARGE = 1 << 20


class Left(Exception):
    """This is not fused; the message says why.

    Attributes:
        near: whether there is a sum against a vector, so that at other sizes it may be fused.
    """

    near = False


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
    on = torch._C._is_any_autocast_enabled()
    kinds = ("cpu", "cuda") if on else ()
    autocast = tuple(
        (k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)
    )
    return State(torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled())


class Value:
    """A tensor of a call: what it is, and itself while that is known."""

    def __init__(self, x: Tensor, maker: int | None, large: bool, constant: bool) -> None:
        self.usual = usual = x.layout is torch.strided and not x.is_nested
        sizes: Any = x.shape if usual else ()
        self.shape = tuple(n if type(n) is int else n.node.hint for n in sizes)
        self.dtype, self.device, self.kind = x.dtype, x.device, type(x)
        self.requires_grad, self.numel = x.requires_grad, math.prod(self.shape)
        self.storage = x.untyped_storage()._cdata if usual else None
        self.maker = maker  # number of the call that made it
        self.users: list[int] = []  # of the calls that read it
        self.constant = constant  # made of parameters alone
        self.large = large  # not kept alive
        self._get: Callable[[], Tensor | None] = weakref.ref(x) if large else lambda: x

    def loosen(self) -> None:
        """Keep the tensor alive no longer."""
        x = self.tensor
        self._get = (lambda: None) if x is None else weakref.ref(x)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor itself; None where it is gone."""
        return self._get()


class Node(NamedTuple):
    """A call of a function of torch; tensors are numbers."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    out: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]  # (before, after) of what it wrote to
    single: bool  # whether its result is one tensor
    state: State
    hooked: bool = False  # whether there were hooks on what is saved
    place: str = ""  # file and line of the user's code
    seconds: float = 0.0

    def refs(self) -> list[int]:
        """Numbers of its tensors."""
        return tensors((self.args, self.kwargs))


def mapped(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with ``f`` of everything in its tuples, lists, dictionaries and slices."""
    if isinstance(x, tuple):
        parts = [mapped(f, each) for each in x]
        return type(x)._make(parts) if hasattr(x, "_fields") else tuple(parts)  # type: ignore[attr-defined]
    if isinstance(x, list):
        return [mapped(f, each) for each in x]
    if isinstance(x, dict):
        return {name: mapped(f, each) for name, each in x.items()}
    if isinstance(x, slice):
        return slice(*[mapped(f, each) for each in (x.start, x.stop, x.step)])
    return f(x)


def tensors(x: Any) -> list[Any]:
    """The tensors, or their numbers, in some arguments."""
    found: list[Any] = []
    mapped(lambda t: found.append(t) if isinstance(t, (Tensor, Ref)) else None, x)
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
        self._numbers: dict[int, int] = {}
        self._large: list[Value] = []

    def find(self, x: Tensor) -> Ref | None:
        """The number of a tensor."""
        known = self._numbers.get(id(x))
        return None if known is None or self.values[known].tensor is not x else Ref(known)

    def number(self, x: Tensor) -> Ref:
        """The number of a tensor, an old or a new one."""
        known = self.find(x)
        return self.add(x, constant=isinstance(x, nn.Parameter)) if known is None else known

    def add(
        self, x: Tensor, maker: int | None = None, large: bool = False, constant: bool = False
    ) -> Ref:
        """A new number for a tensor: it is new, or has been written to."""
        for value in self._large:  # another tensor may have the storage of one that is gone
            value.storage = None if value.tensor is None else value.storage
        number = self._numbers[id(x)] = len(self.values)
        self.values.append(Value(x, maker, large, constant))
        if large:
            self._large.append(self.values[number])
        return Ref(number)

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
        env = dict(feed)

        def fill(x: Any) -> Any:
            if type(x) is Ref and x not in env:
                env[x] = sizes.cut(self.values[x])
            return env[x] if type(x) is Ref else x

        for i in sorted(ids):
            node = self.nodes[i]
            args, kwargs = sizes.arguments(node)
            for before, after in node.writes:
                env[after] = env[before] = fill(Ref(before)).clone()
            out = node.func(*mapped(fill, args), **mapped(fill, kwargs))
            made = [out] if node.single else tensors(out)
            env.update(zip(node.out, made, strict=False))
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
        graph, name, at = self.graph, name_of(func), len(self.graph.nodes)
        given = tensors((args, kwargs))
        versions = [_version(t) for t in given]
        noted = mapped(lambda x: graph.number(x) if isinstance(x, Tensor) else x, (args, kwargs))
        before, hooked = state(), torch._C._autograd._top_saved_tensors_default_hooks(True)
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        old = [_version(t) == v and name not in _LENT for t, v in zip(given, versions, strict=True)]
        wrote = [t for t, same in zip(given, old, strict=True) if not same]
        writes = tuple((graph.number(t), graph.add(t, at)) for t in wrote)
        refs = tensors(noted)
        constant, values = graph.constant(refs), [graph.values[ref] for ref in refs]
        out = []
        for t in tensors(result) if isinstance(result, (Tensor, tuple, list)) else ():
            large = t.numel() >= _LARGE and (
                any(v.large for v in values) or all(v.numel < t.numel() for v in values)
            )
            known = graph.find(t)
            out.append(graph.add(t, at, large, constant) if known is None else known)
        single, place = isinstance(result, Tensor), _place() if name in ACTIVATIONS else ""
        args, kwargs = noted
        rest = before, hooked is not None, place, seconds
        graph.append(Node(func, name, args, kwargs, tuple(out), writes, single, *rest))
        return result


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _place() -> str:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_HERE) and not path.is_relative_to(_TORCH):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Functions after which anybody may write to a tensor.
_LENT = {"numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage"}
# Functions whose integers are sizes.
_SIZED = {
    *("view", "reshape", "expand", "repeat", "broadcast_to", "unflatten", "new_zeros", "new_ones"),
    *("repeat_interleave", "new_full", "zeros", "ones", "full"),
}
_SMALL = (2, 3, 5, 7, 11, 13, 17, 19, 23)
_LEAST = 5  # smaller sizes stay: they may number an axis


class Sizes:
    """Other sizes for the calls of a graph: each size of the call stands for one of these.

    Where two axes have the same size, both change alike. Those of parameters stay.

    Attributes:
        small: the size in place of one of the call.
    """

    def __init__(self, small: dict[int, int]) -> None:
        self.small = small
        self._full = {new: old for old, new in small.items()}

    @classmethod
    def of(cls, values: Collection[Value], fixed: set[int]) -> Sizes:
        """As small as different sizes of some tensors may be; those of parameters stay.

        Args:
            values: the tensors.
            fixed: more sizes that stay.
        """
        fixed = fixed | {n for v in values if v.constant for n in v.shape}
        every = {n for v in values for n in v.shape}
        taken = {n for n in every if n < _LEAST or n in fixed}
        bases = [n for n in taken if 1 < n < _LEAST]
        small: dict[int, int] = {}
        for n in sorted(every - taken):
            pair = next(((a, n // a) for a in bases if n % a == 0 and n // a in bases), None)
            if pair is not None:
                new = math.prod(small.get(each, each) for each in pair)
            else:
                new = next((p for p in _SMALL if p < n and p not in taken), n)
                bases.append(n)
            if new in taken:
                return cls({})
            small[n] = new
            taken.add(new)
        return cls(small)

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """In place of one of the call."""
        return tuple(self.small.get(n, n) for n in shape)

    def full(self, n: int) -> int:
        """The size of the call for one of these."""
        return self._full.get(n, n)

    def arguments(self, node: Node) -> tuple[Any, Any]:
        """Of a call, with these sizes."""
        if not self.small:
            return node.args, node.kwargs
        args = node.args
        if args and type(args[0]) in (list, tuple) and len(args[0]) in self.small:
            parts = args[0]  # one tensor, again and again
            if len(set(parts)) == 1 and type(parts[0]) is Ref:
                args = (parts[: self.small[len(parts)]], *args[1:])
        if node.name not in _SIZED:
            return args, node.kwargs
        given = args, node.kwargs
        args, kwargs = mapped(lambda x: self.small.get(x, x) if type(x) is int else x, given)
        return args, kwargs

    def cut(self, value: Value) -> Tensor:
        """A tensor of the call, detached, as much of it as these sizes hold."""
        x = value.tensor
        if x is None:
            raise Left("what it is made of is gone after the call")
        if isinstance(x, FakeTensor):  # a compiler's, that stands for any
            drawn = torch.randn(self.shape(value.shape), device=value.device)
            return (drawn if value.dtype.is_floating_point else drawn < -0.5).to(value.dtype)
        x = x.detach()
        for axis, (n, new) in enumerate(zip(value.shape, self.shape(value.shape), strict=True)):
            x = x if n == new else x.narrow(axis, 0, new)
        return x
