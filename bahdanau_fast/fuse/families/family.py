"""What :func:`bahdanau_fast.fuse` knows about a kind of attention module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

from torch import Tensor, nn

from bahdanau_fast.call import Located
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import (
    apply_layer,
    is_unchanged,
    plain_convolution,
    plain_parameters,
)
from bahdanau_fast.reference import Inside

__all__ = [
    "Draw",
    "Family",
    "Roles",
    "applied",
    "arguments",
    "children",
    "linear_of",
    "located",
    "roles",
    "scoring",
]

# Draws a random input of a shape; every call of a rehearsal draws the same.
Draw = Callable[..., Tensor]
Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """A kind of module, and one way to read its layers; instances are equal by their fields.

    Attributes:
        title: whose modules they are.
        how: what the replaced forward does.
        layers: the class of each child and parameter, by name.
        optional: likewise, of those that may be missing. Any other is a reason to leave a module
            alone.
        counts: numbers of arguments of ``forward``.
    """

    title: ClassVar[str]
    how: ClassVar[str]
    layers: ClassVar[dict[str, type]] = {}
    optional: ClassVar[dict[str, type]] = {}
    counts: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def readings(cls, module: nn.Module) -> Iterable[Family] | str:
        """The ways in which a module may be of this family; why it is not, if it looks like one.

        Args:
            module: any.
        """
        found = children(module)
        if not cls.layers.keys() <= found.keys():
            return ()
        if not cls.fits(module):
            return f"its forward takes ({', '.join(arguments(module))})"
        for name, child in found.items():
            kind = cls.layers.get(name) or cls.optional.get(name)
            if kind is None:
                return f"it has {name}, a {type(child).__name__}, besides"
            if not isinstance(child if kind is not nn.Linear else linear_of(child), kind):
                return f"its {name} is a {type(child).__name__}"
        reason = cls.objection(module)
        return (cls(),) if reason is None else reason

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether the module's ``forward`` takes as many arguments.

        Args:
            module: any.
        """
        return len(arguments(module)) in cls.counts

    @classmethod
    def objection(cls, module: nn.Module) -> str | None:
        """An option of the module that is not served.

        Args:
            module: with the layers of the family.
        """
        return None

    def forward(self, module: Any, step: Step, *inputs: Any) -> Any:
        """What the module's own ``forward`` returns, or NotImplemented for a call not served.

        Args:
            module: of the family.
            step: of the module.
            inputs: of its forward, in its order.
        """
        raise NotImplementedError

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """Run a few steps by ``module.forward`` on small inputs; outputs and kept tensors by name.

        Args:
            module: a copy of the module, in fp64.
            draw: makes the inputs.
        """
        raise NotImplementedError


def children(module: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Child modules and own parameters by name; those that are None are left out."""
    own = {**module._modules, **module._parameters}
    return {name: child for name, child in own.items() if child is not None}


def arguments(module: nn.Module) -> list[str]:
    """Names of the arguments of the class's ``forward``."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def linear_of(layer: object) -> nn.Linear | None:
    """The ``nn.Linear`` that a layer is, or is a wrapper of; None for another layer."""
    if isinstance(layer, nn.Linear):
        return layer
    if isinstance(layer, nn.Module) and not layer._parameters:
        inner = list(layer._modules.values())
        if len(inner) == 1 and isinstance(inner[0], nn.Linear):
            return inner[0]
    return None


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``; of an unmodified wrapper of an ``nn.Linear``, that of the inner layer.

    Args:
        layer: any.
        x: its input.
    """
    inner = linear_of(layer)
    return apply_layer(inner if inner is not None and is_unchanged(layer) else layer, x)


def scoring(layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight (1,H) and bias of an unmodified layer; None where it has to be called.

    Args:
        layer: an ``nn.Linear``, or a wrapper of one.
    """
    inner = linear_of(layer)
    parameters = plain_parameters(inner)
    if parameters is None or not (inner is layer or is_unchanged(layer)):
        return None
    return parameters["weight"], parameters["bias"]


def located(layer: nn.Module, location: Tensor, w_f: Tensor) -> tuple[Inside, Located | None]:
    """What a convolution of the location adds inside the tanh: by the operator, or called.

    Args:
        layer: a convolution along the keys, of one dimension or two, or a wrapper of one.
        location: (B,inputs,Tk).
        w_f: (H,C).
    """
    inner = layer
    while len(inner._modules) == 1:
        (child,) = inner._modules.values()
        if child is None or not is_unchanged(inner):
            break
        inner = child
    plain = plain_convolution(inner)
    if plain is not None:
        return Inside(None, w_f), Located(location, *plain)
    if isinstance(inner, nn.Conv2d):
        return Inside(layer(location.unsqueeze(2)).squeeze(2).transpose(1, 2), w_f), None
    return Inside(layer(location).transpose(1, 2), w_f), None


@dataclass(frozen=True)
class Roles:
    """Names of the three layers."""

    query: str
    key: str
    score: str


def roles(module: nn.Module, *others: type) -> list[Roles]:
    """The roles that three Linear layers may have by their sizes; none for other layers.

    Args:
        module: any.
        others: classes of further children.
    """
    layers = {
        name: child for name, child in children(module).items() if not isinstance(child, others)
    }
    linears = {n: layer for n, layer in layers.items() if isinstance(layer, nn.Linear)}
    if len(linears) != 3 or len(layers) != 3:
        return []
    found = []
    for score, layer in linears.items():
        both = [name for name in linears if name != score]
        hidden = {linears[name].out_features for name in both}
        # A lazy layer has no input size yet.
        if layer.out_features == 1 and hidden == {layer.in_features or max(hidden)}:
            # The one whose name says so first.
            both.sort(key=lambda name: not any(word in name.lower() for word in _QUERY))
            found += [Roles(query, key, score) for query, key in permutations(both)]
    return found


_QUERY = ("w_q", "query", "wa", "dec", "hidden")
