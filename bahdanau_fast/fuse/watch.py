"""Watching a module compute: what looks like additive attention is promised, then fused."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bahdanau_fast.fuse.axes import Layout, Unruled, shape_of
from bahdanau_fast.fuse.promise import Cell, Promise, now, sources
from bahdanau_fast.fuse.rules import RULES
from bahdanau_fast.fuse.values import Scores, Sum
from bahdanau_fast.memory.key_cache import KeyCache, Source, may_share

__all__ = ["Caches", "Watch", "is_watched", "put_values", "within"]

# Elements of the activated sum from which on the fused operator pays for the watch, which is some
# 0.5 ms of Python a call. On a GPU less than that is saved at 52 million, more at 2147 million.
# measured: gpu-h100.csv, "cuda: step-256 (256,1,400,512), full, forward, bfloat16" beside
# "d2l eager: step-256 (256,1,400,512), full, forward, bfloat16", and
# "triton: parallel-16 (16,512,512,512), projected, forward, bfloat16" beside
# "d2l eager: parallel-16 (16,512,512,512), projected, forward, bfloat16".
# not measured: sizes between, and the watch on such a host; rows of fused modules would tell.
LEAST, LEAST_ON_GPU = 1 << 18, 1 << 27

# Beside those whose name ends in an underscore.
_WRITING = {
    *("__setitem__", "numpy", "__array__", "data_ptr", "__dlpack__", "share_memory_"),
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("matmul", "and", "or", "xor", "lshift", "rshift")),
}
_UNKNOWN: Any = object()
_here = threading.local()


class Caches:
    """What calls of one module derive from tensors that stay the same, for each vector."""

    def __init__(self) -> None:
        self._caches: dict[Any, KeyCache] = {}
        self._vectors: dict[Any, tuple[Any, Tensor]] = {}

    def of(
        self, w_k: Tensor | None, vector: Tensor, after: tuple[tuple[str, Any], ...]
    ) -> tuple[KeyCache | None, Tensor]:
        """A cache of projected keys, and the vector with what follows its scores.

        Args:
            w_k: weight of the keys, or None.
            vector: (H,).
            after: as in :class:`Scores`; of what was added no weight depends, its gradient is zero.
        """
        grad = torch.is_grad_enabled()
        after = tuple(
            [
                (how, by)
                for how, by in after
                if how != "+" or (grad and isinstance(by, Tensor) and by.requires_grad)
            ]
        )
        cache = self.cache(vector, w_k)
        if cache is None:
            return None, _scaled(vector, after)
        given = [vector, *(by for _, by in after if isinstance(by, Tensor))]
        # The same tensor at each step, for the gradients of steps to meet; of leaves alone: others
        # may belong to a graph that is gone.
        shared = grad and after and len(given) < 3 and all(t.is_leaf for t in given)
        shared = shared and not any(how != "+" and isinstance(by, Tensor) for how, by in after)
        if not shared or not all(may_share(t, t, None) for t in given):
            return cache, _scaled(vector, after)
        numbers = tuple(by for _, by in after if not isinstance(by, Tensor))
        state = (*numbers, *Source.of(vector, None, given[-1], "cpu").state)
        known = self._vectors.get(cache)
        if known is None or known[0] != state:
            known = self._vectors[cache] = state, _scaled(vector, after)
        return cache, known[1]

    def cache(self, vector: Tensor, w_k: Tensor | None) -> KeyCache | None:
        """A cache of projected keys for a vector."""
        if type(vector) not in (Tensor, nn.Parameter):
            return None
        key = (vector.data_ptr(), None if w_k is None else w_k.data_ptr())
        found = self._caches.get(key)
        if found is None:
            if len(self._caches) > 16:
                self._caches.clear()
                self._vectors.clear()
            found = self._caches[key] = KeyCache()
        return found


def _scaled(vector: Tensor, after: tuple[tuple[str, Any], ...]) -> Tensor:
    for how, by in after:
        # Of what was added no weight depends: its gradient is zero. Sums save no tensors, so that
        # any number of backward passes may come through.
        if how == "+":
            vector = torch.add(vector, by, alpha=0)
        elif isinstance(by, Tensor):
            vector = vector * by if how == "*" else vector / by
        else:
            zero = vector.new_zeros(())
            vector = torch.add(zero, vector, alpha=by if how == "*" else 1 / by)
    return vector


class Watch(TorchFunctionMode):
    """What torch's functions are called with, inside.

    Args:
        caches: of the module.
        least: elements of a sum from which on it is promised.
        told: takes what is found, with the place; None where nobody asks.
    """

    def __init__(self, caches: Caches, least: int, told: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.caches, self.paid = caches, False
        self._least, self._told = least, told
        self._cells: list[weakref.ref[Cell]] = []
        self._promises: list[weakref.ref[Promise]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = RULES.get(func, _UNKNOWN)
        if known is _UNKNOWN:
            known = RULES[func] = (_write, True) if _writes(func) else None
        kwargs = kwargs or {}
        if kwargs and "out" in kwargs and kwargs["out"] is None:
            kwargs = {name: each for name, each in kwargs.items() if name != "out"}
        if kwargs and "out" in kwargs:
            self.write(kwargs["out"])
        elif known is not None and (known[1] or Promise in types):
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return known[0](self, *args, **kwargs)
            except Unruled:
                pass
        at = _inplace(func)
        if at is not None and (args[at : at + 1] == (True,) or kwargs.get("inplace")):
            self.write(None)
        return func(*args, **kwargs)

    @property
    def autocast(self) -> bool:
        """Whether products have a dtype of their own."""
        return torch._C._is_any_autocast_enabled()

    def promise(self, state: Any, layout: Layout, like: Tensor) -> Promise:
        """A promise of a new value."""
        cell = Cell(state, layout, self._needed)
        self._cells.append(weakref.ref(cell))
        made = Promise.of(cell, layout, shape_of(layout, state.sizes), like)
        self._promises.append(weakref.ref(made))
        return made

    def view(self, x: Promise, layout: Layout, detached: bool = False) -> Promise:
        """Another view of what a promise is of."""
        shape = shape_of(layout, x.cell.state.sizes)
        made = Promise.of(x.cell, layout, shape, x, x, detached or x.detached)
        self._promises.append(weakref.ref(made))
        return made

    def write(self, target: Any) -> None:
        """Before somebody writes to a tensor: what depends on it is computed."""
        if type(target) is Promise:
            target = target.cell.compute()
        storage = _storage(target) if isinstance(target, Tensor) else None
        for ref in self._cells:
            cell = ref()
            if (
                cell is not None
                and cell.value is None
                and (storage is None or any(_storage(x) == storage for x in sources(cell.state)))
            ):
                cell.compute()

    def pays(self, elements: int, on_cpu: bool) -> bool:
        """Whether a sum of so many elements is worth an operator."""
        least = self._least if on_cpu or not self._least else LEAST_ON_GPU
        pays = elements >= least
        self.paid = self.paid or pays
        return pays

    def found(self, scores: Scores) -> None:
        """Scores, or weights, were recognised."""
        if self._told is not None:
            self._told(scores, None)

    def _needed(self, state: Any) -> None:
        if self._told is not None and type(state) is Sum and state.activation is not None:
            self._told(state, "its values are needed")

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns, in tensors with values."""
        with within(self):
            with self:
                result = forward(*args, **kwargs)
            return _kept(result)

    def escaped(self) -> bool:
        """Whether somebody still holds a promise."""
        return any([ref() is not None for ref in self._promises])


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def is_watched() -> Any:
    """Whether this thread is under a watch, or in a module of one: the innermost."""
    return getattr(_here, "inside", None)


@contextmanager
def within(what: Any) -> Iterator[None]:
    """Inside, no other watch begins."""
    before, _here.inside = is_watched(), what
    try:
        yield
    finally:
        _here.inside = before


def _write(watch: Watch, target: Any = None, *_: Any, **__: Any) -> None:
    watch.write(target)
    raise Unruled


@functools.cache
def _inplace(function: Any) -> int | None:
    """Which argument of a function of ``torch.nn.functional`` is ``inplace``."""
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def _writes(function: Any) -> bool:
    """Whether a function writes to a tensor, or lets others do so."""
    name, schema = getattr(function, "__name__", ""), getattr(function, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING


def _kept(x: Any) -> Any:
    """A result with values in the place of promises."""
    kind = type(x)
    if kind is Promise:
        return now(x)
    if kind in (tuple, list):
        return kind(map(_kept, x))
    if kind is dict:
        return {name: _kept(each) for name, each in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return kind(*map(_kept, x))
    if isinstance(x, dict):  # of a class of its own
        for name, each in x.items():
            if (value := _kept(each)) is not each:
                x[name] = value
    elif hasattr(x, "__dataclass_fields__"):
        for name, each in vars(x).items():
            if (value := _kept(each)) is not each:
                object.__setattr__(x, name, value)
    return x


def put_values(module: nn.Module) -> None:
    """Give attributes of a module that are promises their values."""
    for each in module.modules():
        own = vars(each)
        for name, value in own.items():
            if type(value) in (Promise, list, dict, tuple) and name[0] != "_":
                own[name] = _in_place(value)
        for name, value in each._buffers.items():
            if type(value) is Promise:
                each._buffers[name] = _kept(value)


def _in_place(x: Any) -> Any:
    if type(x) is list:
        x[:] = map(_in_place, x)
        return x
    if type(x) is dict:
        x.update({name: _in_place(each) for name, each in x.items()})
        return x
    return _kept(x)
