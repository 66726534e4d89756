"""Modules of three Linear layers, whatever their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast.fuse.families.family import (
    Draw,
    Family,
    Outputs,
    Roles,
    arguments,
    roles,
    scoring,
)
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.layers import apply_layer
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Course", "OneState", "TwoInputs"]


class _Borrowed(AdditiveAttention):
    """This package's module on the layers of another, which stay that other's."""

    _query_layer, _key_layer, _score_layer = "query", "key", "score"

    def __init__(self) -> None:
        Additive.__init__(self, 0, 0.0)
        self._remember(cache_keys=True)
        self.bias = None

    def borrow(self, module: nn.Module, names: Roles) -> None:
        """Take the layers that a module has now.

        Args:
            module: theirs.
            names: of its layers.
        """
        theirs, own = module._modules, self._modules
        own["query"], own["key"] = theirs[names.query], theirs[names.key]
        own["score"] = theirs[names.score]
        three = {names.query, names.key, names.score}
        own["dropout"] = next((layer for name, layer in theirs.items() if name not in three), None)
        self.num_hiddens = getattr(own["query"], "out_features", 0)


@dataclass(frozen=True)
class Course(Family):
    """The d2l course's, of any year: queries, keys, values and lengths to the context.

    Attributes:
        names: of the layers.
    """

    title = "d2l"
    how = "all of it; unchanged keys are projected once"
    counts = (4,)
    names: Roles

    @classmethod
    def readings(cls, module: nn.Module) -> Iterable[Family] | str:
        """As :meth:`Family.readings`."""
        if not cls.fits(module):
            return ()
        dropouts = [child for child in module.children() if isinstance(child, nn.Dropout)]
        return [cls(names) for names in roles(module, nn.Dropout)] if len(dropouts) == 1 else ()

    def forward(
        self,
        module: Any,
        step: Step,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
    ) -> Any:
        """The context (B,Tq,Dv); as :meth:`Family.forward`."""
        if (
            torch.compiler.is_compiling()  # which is not to see modules exchanged
            or not queries.dim() == keys.dim() == values.dim() == 3
            or not queries.shape[0] == keys.shape[0] == values.shape[0]
        ):
            return NotImplemented
        own = step.own(_Borrowed)
        own.borrow(module, self.names)
        context = own(queries, keys, values, valid_lens)
        module.attention_weights = own.attention_weights
        own.attention_weights = None  # which would keep the graph of this call
        return context

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        layers = module._modules
        sizes = [
            layers[name].in_features or 6 - i
            for i, name in enumerate((self.names.query, self.names.key))
        ]
        keys, values = draw(3, 5, sizes[1]), draw(3, 5, 4)
        device = keys.device
        lens = (
            torch.tensor([2, 5, 9], device=device),
            torch.tensor([[1, 5], [2, 0], [3, 4]], device=device),
            None,
        )
        outputs = []
        for i, valid_lens in enumerate(lens, 1):
            context = module.forward(draw(3, 2, sizes[0]), keys, values, valid_lens)
            outputs += [(f"the context of call {i}", context)]
            outputs += [(f"attention_weights of call {i}", module.attention_weights)]
        return outputs


_ACTIVATIONS = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu"}


def _inside(module: nn.Module) -> Inside:
    """The activation of a module: that of its child, else tanh."""
    for child in module.children():
        name = _ACTIVATIONS.get(type(child))
        if name is not None:
            return Inside(activation=name, negative_slope=getattr(child, "negative_slope", 0.0))
    return TANH


@dataclass(frozen=True)
class TwoInputs(Family):
    """Queries (B,1,Dq) and the encoder's outputs to context (B,1,Dv) and weights (B,1,Tk).

    Attributes:
        names: of the layers.
        query_first: the order of the arguments.
    """

    title = "PyTorch tutorial"
    how = "scores, softmax and context; unchanged keys are projected once"
    counts = (2,)
    names: Roles
    query_first: bool
    one_query: ClassVar[bool] = False

    @classmethod
    def readings(cls, module: nn.Module) -> Iterable[Family] | str:
        """As :meth:`Family.readings`."""
        if not cls.fits(module):
            return ()
        found = roles(module, nn.Softmax, nn.Tanh, *_ACTIVATIONS)
        ways = list(product(found, (True, False)))
        readings = [*(TwoInputs(*way) for way in ways), *(OneState(*way) for way in ways)]
        return sorted(readings, key=lambda reading: reading._oddity(module))

    def _oddity(self, module: nn.Module) -> int:
        """How little the names of arguments speak for a reading."""
        names = arguments(module)
        asked = names[0 if self.query_first else 1]
        return sum(word in asked for word in ("enc", "key", "img", "memory", "source"))

    def forward(self, module: Any, step: Step, first: Tensor, second: Tensor) -> Any:
        """Context and weights; as :meth:`Family.forward`."""
        queries, keys = (first, second) if self.query_first else (second, first)
        layers = module._modules
        score = scoring(layers[self.names.score])
        if score is None or queries.dim() != 3 - self.one_query:
            return NotImplemented
        w_v = step.scorer(*score)
        queries = queries.unsqueeze(1) if self.one_query else queries
        if queries.shape[1] != 1:  # their own code adds up queries and keys of equal numbers
            return NotImplemented
        asked = apply_layer(layers[self.names.query], queries)
        layer, inside, state = layers[self.names.key], _inside(module), self.one_query
        return step.attend(asked, keys, keys, w_v, layer=layer, inside=inside, state=state)

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        layers = module._modules
        keys = draw(3, 5, layers[self.names.key].in_features)
        queries = () if self.one_query else (1,)
        outputs: Outputs = []
        for i in (1, 2):
            asked = draw(3, *queries, layers[self.names.query].in_features)
            both = (asked, keys) if self.query_first else (keys, asked)
            context, weights = module.forward(*both)
            outputs += [
                (f"the context of step {i}", context),
                (f"the weights of step {i}", weights),
            ]
        return outputs


class OneState(TwoInputs):
    """The same of a decoder state (B,Dq), to context (B,Dv) and weights (B,Tk)."""

    title = "Show, Attend and Tell"
    one_query = True
