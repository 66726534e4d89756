"""Watching a module in place: its class becomes a subclass of it, of the same name.

Attributes, parameters, buffers and hooks are not touched, and ``copy``, ``pickle`` and
``nn.DataParallel``, which make modules anew from class and attributes, keep working.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.fuse.checking import trial
from bahdanau_fast.fuse.promise import Leaked
from bahdanau_fast.fuse.report import Record
from bahdanau_fast.fuse.watch import Watch, is_watched, put_values, within
from bahdanau_fast.modules.base import Unscriptable

__all__ = ["put_back", "record_of", "replace"]

_RECORD = "_bahdanau_fast"
# Calls of a kind that are checked before the next is fused: the first may begin what is kept.
CHECKED = 2


class _Watched(Unscriptable):
    """In front of the class of a module that is watched."""

    _original: type[nn.Module]
    _instead = "its own code is back after bahdanau_fast.unfuse(model): call that first"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, kept, *others = tuple(super().__reduce_ex__(protocol))
        state = {name: each for name, each in kept.items() if name != _RECORD}
        return (_make, (self._original, kept[_RECORD].name), state, *others)


def _make(original: type[nn.Module], name: str) -> nn.Module:
    """An empty module of a watched class, for ``copy`` and ``pickle`` to fill."""
    made: nn.Module = object.__new__(_class_of(original))
    made.__dict__[_RECORD] = Record(name, original.__name__)
    return made


# One class for all modules of a class, so that copies are of the same class.
_classes: dict[Any, Any] = {}


def _class_of(original: Any) -> Any:
    """The class of a watched module."""
    if original in _classes:
        return _classes[original]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain():
            return original.forward(self, *args, **kwargs)
        if is_watched() is not None:
            with within(self.__dict__[_RECORD]):
                return original.forward(self, *args, **kwargs)
        return _forward(self, original.forward, args, kwargs)

    body = {
        "forward": forward,
        "_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    made = _classes[original] = type(original)(original.__name__, (_Watched, original), body)
    return made


def _is_plain() -> bool:
    """Whether a call may be watched: nobody else watches, or traces, or transforms it."""
    return torch._C._len_torch_dispatch_stack() == 0 and not checks.in_transform(False)


def _forward(module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record: Record = module.__dict__[_RECORD]
    given = (*args, *kwargs.values())
    modes = module.training, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    key = (modes, *map(_sizes, given))
    pays = record.pays.get(key)
    if pays is False:
        return own(module, *args, **kwargs)
    if pays is None:
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            return own(module, *args, **kwargs)  # lazy layers get their sizes
        kind = (modes, *map(_kind, given))
        if record.checked[kind] < CHECKED:
            if not trial(record, module, own, args, kwargs):
                put_back(module)
                return own(module, *args, **kwargs)
            if record.state == "waiting":
                return own(module, *args, **kwargs)
            record.checked[kind] += 1
    watch = Watch(record.caches, record.least)
    try:
        result = watch.run(own, module, *args, **kwargs)
    except (Exception, Leaked):
        result = own(module, *args, **kwargs)  # an error of the user's comes from there
        record.leave("a part of it cannot be watched")
        put_back(module)
        return result
    if watch.escaped():
        put_values(module)
    if pays is None and record.checked[kind] >= CHECKED:
        if len(record.pays) > 4096:
            record.pays.clear()
        record.pays[key] = watch.paid
    return result


def _sizes(x: Any) -> Any:
    """What of an argument decides whether fusing pays."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return tuple(map(_sizes, x)) if isinstance(x, (tuple, list)) else _kind(x)


def _kind(x: Any) -> Any:
    """What of an argument decides about the way that a module takes."""
    if isinstance(x, Tensor):
        return x.dim(), x.dtype, x.device
    if isinstance(x, (tuple, list)):
        return type(x), *map(_kind, x[:8])
    return x if x is None or isinstance(x, (bool, str)) else type(x)


def replace(module: nn.Module, record: Record) -> None:
    """Watch a module from its next call on."""
    module.__class__ = _class_of(type(module))
    module.__dict__[_RECORD] = record


def record_of(module: nn.Module) -> Record | None:
    """Of a watched module; None for another."""
    return module.__dict__[_RECORD] if isinstance(module, _Watched) else None


def put_back(module: nn.Module) -> None:
    """Give a watched module its own class, and so its ``forward``, back."""
    if isinstance(module, _Watched):
        module.__dict__.pop(_RECORD, None)
        module.__class__ = module._original  # type: ignore[assignment]
