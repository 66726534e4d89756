"""Modules in place: the class becomes a subclass of it, of the same name, in front of its forward.

Attributes, parameters, buffers and hooks are not touched, and ``copy``, ``pickle`` and
``nn.DataParallel``, which make modules anew from class and attributes, keep working. First calls
run as they are and are looked at (:mod:`.look`). Where they show additive attention, torch's own
compiler captures the user's forward and guards it, and what was captured runs eagerly, with the
operator in it (:mod:`.capture`). Whatever else is done with a module runs the user's forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from bahdanau_fast import checks
from bahdanau_fast.fuse.report import Record
from bahdanau_fast.modules.base import Unscriptable

_RECORD = "_bahdanau_fast"


class _InFront(Unscriptable):
    """In front of the class of a module."""

    _original: type[nn.Module]
    _instead = "its own code is back after bahdanau_fast.unfuse(model): call that first"

    def __init_subclass__(cls, **_: Any) -> None:
        """No registry of the user's hears of it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced = tuple(super().__reduce_ex__(protocol))
        if len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced  # in a way of the user's
        attributes = dict(reduced[2])
        record = attributes.pop(_RECORD, None)
        settings = None if record is None else (record.name, record.shared.always)
        return (_make, (self._original, settings), attributes, *reduced[3:])


def _make(original: type[nn.Module], settings: tuple[str, bool] | None) -> nn.Module:
    """An empty module with a class in front, for ``copy`` and ``pickle`` to fill."""
    module: nn.Module = object.__new__(_class_of(original))
    if settings is not None:
        module.__dict__[_RECORD] = Record(settings[0], original.__name__, settings[1])
    return module


# One class for all modules of a class, so that copies are of the same class.
_classes: dict[Any, Any] = {}


def _class_of(original: Any) -> Any:
    """The class in front of another one."""
    if original in _classes:
        return _classes[original]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original.forward
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        record = self.__dict__.get(_RECORD)
        if record is None or record.rests(args) or not _is_plain(self):
            return plain(self, *args, **kwargs)
        record.calls.append(None)  # before reading whether another thread is done
        try:
            if record.done:
                return plain(self, *args, **kwargs)
            if record.way is None:
                record.way = _first_way(record)
            return record.way(self, plain, args, kwargs)
        finally:
            record.calls.pop()
            if record.done and not record.calls:
                put_back(self)

    counted: Any = forward
    counted.__code__ = counted.__code__.replace()  # by which torch's compiler counts graphs
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(original, name) for name in names}
    body |= {"forward": forward, "_original": original}
    _classes[original] = type(original)(original.__name__, (_InFront, original), body)
    return _classes[original]


def _first_way(record: Record) -> Any:
    """How a module is called from now on; the finder is imported with the first call."""
    if record.state == "looked":
        from bahdanau_fast.fuse.capture import Capture

        return Capture(record)
    from bahdanau_fast.fuse.look import Look

    return Look(record)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call may be another than the user's: nobody traces it, or saves tensors his way."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not checks.in_transform(False)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and (torch._C._len_torch_function_stack() == 0 or _known_modes())
        and not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        and "_is_replica" not in module.__dict__
    )


def _known_modes() -> bool:
    """Whether modes of torch's functions are those of default devices, or our own look."""
    modes = torch.overrides._get_current_function_mode_stack()
    ours = type(modes[-1]).__module__.startswith(__package__.partition(".")[0])
    return ours or all(isinstance(mode, DeviceContext) for mode in modes)


def watch(module: nn.Module, record: Record) -> None:
    """Be in front of a module from its next call on."""
    module.__class__ = _class_of(type(module))
    module.__dict__[_RECORD] = record


def record_of(module: nn.Module) -> Record | None:
    """Of a module with a class in front; None for another, and for one that is left for good."""
    record = module.__dict__.get(_RECORD) if isinstance(module, _InFront) else None
    return None if record is None or record.done else record


def put_back(module: nn.Module) -> None:
    """Give a module its own class, and so its ``forward``, back."""
    if isinstance(module, _InFront):
        module.__dict__.pop(_RECORD, None)
        if type(module) is _classes.get(module._original):  # else it is a subclass of the user's
            module.__class__ = module._original  # type: ignore[assignment]
