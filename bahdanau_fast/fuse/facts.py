"""What torch's compiler does not guard of a module: hooks, layers and methods that are replaced."""

from __future__ import annotations

import random
from typing import Any

from torch import nn

_everywhere = nn.modules.module


class ModuleFacts:
    """A module as it was.

    Attributes:
        watched: whether hooks look at gradients within it, or it is not captured as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = [*module.modules()]
        self._instances = [m.__dict__ for m in modules]
        self._layers = [(m._modules, [*m._modules.values()]) for m in modules if m._modules]
        # pylint's and mypy's types of hooks differ: they are dictionaries.
        hooks: list[Any] = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        hooks += [_everywhere._global_forward_hooks, _everywhere._global_forward_pre_hooks]
        backward: list[Any] = [_everywhere._global_backward_hooks]
        backward += [_everywhere._global_backward_pre_hooks]
        backward += [d for m in modules for d in (m._backward_hooks, m._backward_pre_hooks)]
        self._hooks, self._backward = hooks, backward
        kinds = dict.fromkeys(kind for m in modules for kind in type(m).__mro__)
        dicts = [vars(kind) for kind in kinds if not is_of_torch(kind) and kind is not object]
        methods = [(d, name, f) for d in dicts for name, f in d.items()]
        self._methods = [method for method in methods if hasattr(method[2], "__get__")]
        torchs = [vars(kind) for kind in kinds if is_of_torch(kind) and "forward" in vars(kind)]
        self._methods += [(d, "forward", d["forward"]) for d in torchs]
        self._names = frozenset({"forward", *(name for _, name, _ in self._methods)})
        self._hooked, self._replaced = self._hooks_now(), self._replaced_now()
        # Its compiler takes numbers of Python's generators from elsewhere.
        draws = any(isinstance(x, random.Random) for d in self._instances for x in d.values())
        self.watched = draws or any(self._backward) or any(map(_is_special, module.parameters()))
        self._looked = any(self._backward)

    def _hooks_now(self) -> list[Any]:
        return [hook for hooks in self._hooks for hook in hooks.values()]

    def _replaced_now(self) -> list[Any]:
        dicts = self._instances
        return [(name, d[name]) for d in dicts for name in sorted(self._names.intersection(d))]

    def hold(self) -> bool:
        """Whether all is as it was."""
        return (
            (self._hooked == self._hooks_now() if self._hooked else not any(self._hooks))
            and any(self._backward) == self._looked
            and all([_same(d, layers) for d, layers in self._layers])
            and all([d.get(name) is method for d, name, method in self._methods])
            and (
                self._replaced == self._replaced_now()
                if self._replaced
                else all(map(self._names.isdisjoint, self._instances))
            )
        )


def _is_special(parameter: nn.Parameter) -> bool:
    """Whether a parameter has no size yet, or is of inference mode."""
    return isinstance(parameter, nn.UninitializedParameter) or parameter.is_inference()


def _same(now: Any, before: list[Any]) -> bool:
    """Whether a dictionary has the same objects."""
    return len(now) == len(before) and all(
        a is b for a, b in zip(now.values(), before, strict=True)
    )


def is_of_torch(kind: Any) -> bool:
    """Whether a class or function is torch's."""
    return str(kind.__module__).partition(".")[0] == "torch"
