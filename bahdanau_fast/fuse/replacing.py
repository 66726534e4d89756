"""Replacing a module's ``forward`` in place, and putting it back.

The class of the module becomes a subclass of it, of the same name, with another ``forward``: the
module's attributes, parameters, buffers and hooks are not touched, and ``copy``, ``pickle`` and
``nn.DataParallel``, which make modules anew from class and attributes, keep working.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import suppress
from inspect import isfunction
from typing import Any

import torch
from torch import nn

from bahdanau_fast.fuse.families.family import Family
from bahdanau_fast.fuse.step import NotServed, Step

__all__ = ["family_of", "put_back", "replace"]

_STEP = "_bahdanau_fast_step"
_EMPTY = inspect.Parameter.empty


class _Fused(nn.Module):
    """In front of the class of a module whose ``forward`` is replaced.

    Attributes:
        _methods: of the class when it was replaced, ``forward`` among them.
        _wrappers: classes of the layers that hold layers, which the family's forward looks into.
    """

    _family: Family
    _original: type[nn.Module]
    _methods: dict[str, Any]
    _wrappers: tuple[type[nn.Module], ...]

    def _is_patched(self) -> bool:
        """Whether a method is another one since, on the instance or its class, or a wrapper is."""
        if tuple(_wrappers(self)) != self._wrappers:
            return True
        own, original, compiling = self.__dict__, self._original, torch.compiler.is_compiling()
        for name, method in self._methods.items():
            if name in own or getattr(original, name, None) is not method:
                return True
            if compiling and name != "forward":  # compiled code is guarded by what it would call
                found = getattr(getattr(self, name), "__code__", None)
                if found is not getattr(method, "__code__", None):
                    return True
        return False

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"torch.jit.script compiles a module's own code, which {type(self).__name__} has again "
            "after bahdanau_fast.unfuse(model): call that first"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, kept, *others = tuple(super().__reduce_ex__(protocol))
        state = {name: each for name, each in kept.items() if name != _STEP}
        return (_make, (self._original, self._family, self._wrappers), state, *others)


def _wrappers(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Classes of the layers inside a module that hold layers."""
    for layer in module._modules.values():
        if layer is not None and layer._modules:
            yield type(layer)
            yield from _wrappers(layer)


def _make(original: type[nn.Module], family: Family, wrappers: tuple[type, ...]) -> nn.Module:
    """An empty module of a replaced class, for ``copy`` and ``pickle`` to fill."""
    made: nn.Module = object.__new__(_fused_class(original, family, wrappers))
    made.__dict__[_STEP] = Step()
    return made


def _fused_class(original: Any, family: Family, wrappers: tuple[type, ...]) -> Any:
    """The class of a replaced module.

    Args:
        original: class of the module.
        family: of the module.
        wrappers: classes of its layers that hold layers.
    """
    methods = _methods_of(original)
    known = _classes.get((original, family, wrappers))
    if known is not None and known._methods == methods:
        return known
    own = original.forward
    names = [(p.name, p.default) for p in inspect.signature(own).parameters.values()][1:]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args
        if kwargs:
            named = {name: kwargs.get(name, default) for name, default in names[len(args) :]}
            if not kwargs.keys() <= named.keys() or any(v is _EMPTY for v in named.values()):
                return original.forward(self, *args, **kwargs)  # which raises
            inputs = (*args, *named.values())
        result = NotImplemented
        if not self._is_patched():
            with suppress(NotServed):
                result = family.forward(self, getattr(self, _STEP), *inputs)
        return original.forward(self, *args, **kwargs) if result is NotImplemented else result

    body = {
        "forward": forward,
        "_family": family,
        "_original": original,
        "_methods": methods,
        "_wrappers": wrappers,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    made = type(original)(original.__name__, (_Fused, original), body)
    _classes[original, family, wrappers] = made
    return made


def _methods_of(kind: type[nn.Module]) -> dict[str, Any]:
    """The methods that a class adds to ``nn.Module``, by name."""
    own = [vars(each) for each in kind.__mro__ if each not in nn.Module.__mro__]
    names = {name for each in own for name, value in each.items() if isfunction(value)}
    return {name: getattr(kind, name) for name in names}


# One class for all modules of a class and family, so that copies are of the same class.
_classes: dict[tuple[Any, Family, tuple[type, ...]], Any] = {}


def replace(module: nn.Module, family: Family) -> None:
    """Make a module's ``forward`` that of a family.

    Args:
        module: any but a replaced one.
        family: whose reading of the module's layers it takes.
    """
    module.__class__ = _fused_class(type(module), family, tuple(_wrappers(module)))
    module.__dict__[_STEP] = Step()


def family_of(module: nn.Module) -> Family | None:
    """The family of a replaced module; None for another."""
    return module._family if isinstance(module, _Fused) else None


def put_back(module: nn.Module) -> None:
    """Give a replaced module its own class, and so its ``forward``, back.

    Args:
        module: a replaced one.
    """
    assert isinstance(module, _Fused)
    module.__dict__.pop(_STEP, None)
    module.__class__ = module._original  # type: ignore[assignment]
