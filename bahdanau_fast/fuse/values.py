"""What a promise is of: sums on their way to become a score, scores, weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import run
from bahdanau_fast.call import Call, Located
from bahdanau_fast.fuse.axes import Axes, Layout, Parts, Sizes, place, shape_of
from bahdanau_fast.fuse.promise import Leaked, Promise, as_shape, now, range_of, shown, version
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.reference import TANH

__all__ = [
    "FEATURES",
    "Addend",
    "Concatenation",
    "Convolution",
    "Product",
    "Scores",
    "Sum",
    "Weighed",
]

# The most features of a product that is a feature of the keys and not the keys.
FEATURES = 64


class Product(NamedTuple):
    """``x @ weight.T + bias``; x may be a promise of a convolution.

    Attributes:
        made: its values, once somebody has computed them.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    made: list[Tensor]

    @property
    def now(self) -> Tensor:
        """Its values."""
        if not self.made:
            self.made.append(linear(now(self.x), self.weight, self.bias))
        return self.made[0]


class Addend(NamedTuple):
    """A tensor or product, and the axis of the sum that each of its dimensions shows.

    Attributes:
        version: of the tensor, or of the product's x, when it was added; None is not compared.
    """

    value: Any
    axes: Axes
    version: int | None

    @property
    def now(self) -> Tensor:
        """Its values."""
        self.check()
        found: Tensor = self.value.now if type(self.value) is Product else self.value
        return found

    def check(self) -> None:
        """Raise if the tensor was written to by what no function of torch has shown."""
        x = self.value.x if type(self.value) is Product else self.value
        if self.version is not None and version(x) != self.version:
            raise Leaked


class Sum(NamedTuple):
    """``act(sum of addends)``, broadcast.

    Attributes:
        sizes: of each axis; one for those that no layout has.
        addends: of the sum, in its order.
        activation: its name, or None.
        slope: of leaky_relu.
    """

    sizes: Sizes
    addends: tuple[Addend, ...]
    activation: str | None = None
    slope: float = 0.01

    def compute(self) -> Tensor:
        """Its values."""
        total = None
        for addend in self.addends:
            placed = place(addend.now, addend.axes, range_of(self.sizes))
            total = placed if total is None else total + placed
        assert total is not None
        if total.shape != self.sizes:
            total = total.expand(self.sizes).clone()  # as repeat would: it may be written to
        if self.activation is None:
            return total
        if self.activation == "leaky_relu":
            return F.leaky_relu(total, self.slope)
        found: Tensor = getattr(torch, self.activation)(total)
        return found


class Concatenation(NamedTuple):
    """Parts side by side in their last axis, each broadcast to the others."""

    sizes: Sizes
    parts: tuple[Addend, ...]

    def compute(self) -> Tensor:
        """Its values."""
        lead = self.sizes[:-1]
        placed = [place(part.now, part.axes, range_of(self.sizes)) for part in self.parts]
        return torch.cat([x.expand(*lead, x.shape[-1]) for x in placed], -1)


class Convolution(NamedTuple):
    """A convolution along the keys, (B,C,Tk): one place for each; of two dimensions, over a row."""

    sizes: Sizes
    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def compute(self) -> Tensor:
        """Its values."""
        convolution = F.conv1d if self.weight.dim() == 3 else F.conv2d
        return convolution(self.x, self.weight, self.bias, padding="same").reshape(self.sizes)

    @property
    def located(self) -> Located:
        """As the operator takes it."""
        channels, inputs, *_, taps = self.weight.shape
        batch, _, length = self.sizes
        x = self.x.reshape(batch, inputs, length)
        return Located(x, self.weight.reshape(channels, inputs, taps), self.bias)


class Scores(NamedTuple):
    """Scores, or the weights that a softmax makes of them.

    Attributes:
        sum: the activated sum.
        parts: who is who in it.
        hidden: its axis that was summed over.
        vector: (H,), what it was summed against.
        after: factors ("*"), divisors ("/") and terms ("+") of one element that followed.
        mask: bool, True where nothing is to be seen; and its axes.
        fill: what a mask puts there.
        soft: whether the softmax was taken.
    """

    sum: Sum
    parts: Parts
    hidden: int
    vector: Tensor
    caches: Any
    after: tuple[tuple[str, Any], ...] = ()
    mask: tuple[Tensor, Axes] | None = None
    fill: float = -math.inf
    soft: bool = False

    @property
    def sizes(self) -> Sizes:
        """Of each axis."""
        return self.sum.sizes

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of what :meth:`compute` gives."""
        return (*self.parts.batch, *self.parts.queries, *self.parts.keys)

    @property
    def _shape(self) -> tuple[int, ...]:
        """(B,Tq,Tk)."""
        return shape_of(self.parts[:3], self.sizes)

    def compute(self) -> Tensor:
        """Its values."""
        found = run.scores(self.call(None))
        for how, by in self.after:
            found = found * by if how == "*" else found / by if how == "/" else found + by
        if self.mask is not None:
            found = found.masked_fill(self._placed_mask(), self.fill)
        if self.soft:
            found = found.softmax(-1)
        return as_shape(found, tuple([self.sizes[axis] for axis in self.order]))

    def attend(self, values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Context (B,Tq,Dv), and weights in a layout: the tensor that the context depends on.

        Args:
            values: (B,Tk,Dv).
            layout: of the weights.
        """
        shape: Any = _Shown(self, layout)
        return run.attend(self.call(values)._replace(shape=shape))

    def _placed_mask(self) -> Tensor:
        """(B,1,Tk) or (B,Tq,Tk)."""
        assert self.mask is not None
        order, queries = self.order, self.parts.queries
        mask = place(*self.mask, order)
        many = any(n > 1 for n, axis in zip(mask.shape, order, strict=True) if axis in queries)
        full = tuple([1 if axis in queries and not many else self.sizes[axis] for axis in order])
        mask = mask if mask.shape == full else mask.expand(full)
        batch, queries_len, keys_len = self._shape
        return as_shape(mask, (batch, queries_len if many else 1, keys_len))

    def call(self, values: Tensor | None) -> Call:
        """As this package takes it; with values (B,Tk,Dv), the weighted sum of them."""
        parts, total = self.parts, self.sum
        inside = TANH
        if total.activation != "tanh":
            inside = TANH._replace(activation=str(total.activation), negative_slope=total.slope)
        of_queries = [total.addends[i] for i in parts.of_queries]
        of_keys = [total.addends[i] for i in parts.of_keys]
        queries = self._gathered(of_queries, parts.queries, self.hidden)
        located = w_k = bias = None
        if len(of_keys) > 1:
            of_keys.sort(key=_features, reverse=True)
            for i, (value, axes, _) in enumerate(of_keys[1:], 1):
                lead = self._lead(axes)
                if type(value) is not Product or lead is None or value.weight.shape[1] > FEATURES:
                    continue
                of_keys.pop(i).check()
                if type(value.x) is Promise and values is not None:
                    inside, located = inside._replace(w_f=value.weight), value.x.cell.state.located
                else:
                    features = self._gathered([Addend(now(value.x), lead, None)], parts.keys, None)
                    inside = inside._replace(features=features, w_f=value.weight)
                queries = queries if value.bias is None else queries + value.bias
                break
        (value, axes, _), *rest = of_keys
        lead = self._lead(axes)
        if (
            type(value) is Product
            and type(value.x) is not Promise
            and lead is not None
            and not rest
        ):
            of_keys[0].check()
            x, w_k, bias, made = value
            keys = self._gathered([Addend(x, lead, None)], parts.keys, None)
        else:
            keys = self._gathered(of_keys, parts.keys, self.hidden)
        cache, vector = self.caches.of(w_k, self.vector, self.after if self.soft else ())
        if values is None and torch.is_grad_enabled():
            cache = None  # scores have no way to say that their backward is yet to come
        call = Call(
            queries,
            keys,
            keys if values is None else values,
            vector,
            None,
            w_k,
            bias,
            None,
            None if self.mask is None or values is None else ~self._placed_mask(),
            cache=cache,
            inside=inside,
            located=located,
            scores_only=values is None,
        )
        if cache is not None and w_k is not None and keys is x and not made:
            call = run.project(call)
            if call.w_k is None:  # who asks for the projection itself gets the same
                made.append(call.keys)
        return call

    def _lead(self, axes: Axes) -> Axes | None:
        """Of a product's x, if it has all axes of the keys; -1 for its features."""
        if axes[-1] != self.hidden:
            return None
        lead = axes[:-1]
        parts = self.parts
        fits = sum([axis is not None for axis in lead]) == len(parts.batch) + len(parts.keys)
        return (*lead, -1) if fits else None

    def _gathered(
        self, addends: Sequence[Addend], own: tuple[int, ...], last: int | None
    ) -> Tensor:
        """The sum of addends as (batch, own, features)."""
        order = (*self.parts.batch, *own, -1 if last is None else last)
        total = None
        for addend in addends:
            placed = place(addend.now, addend.axes, order)
            total = placed if total is None else total + placed
        assert total is not None
        features = total.shape[-1] if last is None else self.sizes[last]
        lead = tuple([self.sizes[axis] for axis in order[:-1]])
        if total.shape != (*lead, features):
            total = total.expand(*lead, features)
        return as_shape(total, (*shape_of((self.parts.batch, own), self.sizes), features))


class _Shown:
    """Shapes of results: weights, which come first, in a layout; a context as it is."""

    def __init__(self, scores: Scores, layout: Layout) -> None:
        self._scores: Scores | None = scores
        self._layout = layout

    def restore(self, result: Tensor) -> Tensor:
        """As in :class:`bahdanau_fast.memory.shapes.Shape`."""
        scores, self._scores = self._scores, None
        if scores is None:
            return result
        sizes = tuple([scores.sizes[axis] for axis in scores.order])
        return shown(as_shape(result, sizes), scores.order, self._layout, scores.sizes)


def _features(addend: Addend) -> int:
    """Of what the keys are made: a promise is not, a product is by its features."""
    if type(addend.value) is not Product:
        return 1 << 30
    return -1 if type(addend.value.x) is Promise else addend.value.weight.shape[1]


class Weighed(NamedTuple):
    """Two tensors multiplied, whose sum over an axis is a score or a context.

    Attributes:
        promise: of an activated sum, or of weights.
        other: what it is multiplied by; it may be a promise, too.
    """

    sizes: Sizes
    promise: Tensor
    other: Tensor

    def compute(self) -> Tensor:
        """Its values."""
        found: Tensor = now(self.promise) * now(self.other)
        return found
