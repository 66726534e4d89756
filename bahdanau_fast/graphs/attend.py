"""The operator in a graph: a call of :mod:`bahdanau_fast.run` with its caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import run
from bahdanau_fast.call import Call
from bahdanau_fast.graphs.caches import Shared, scaled
from bahdanau_fast.ops.pool_in_chunks import scores_and_keys
from bahdanau_fast.reference import ScoreTerms


class NotServed(Exception):
    """These inputs are not what the operator stands for."""


def with_contiguous_gradient(x: Tensor) -> Tensor:
    """``x`` with a contiguous gradient, since its maker may be slow with another one."""
    view = x.view_as(x)
    if view.requires_grad:
        view.register_hook(Tensor.contiguous)
    return view


def shaped(x: Tensor, shape: list[int]) -> Tensor:
    """``x``, which nobody saves, in a shape: no view, which cannot be detached in place."""
    result: Tensor = torch.ops.aten._unsafe_view(x.contiguous(), shape)
    return result


def pooled(keys: Tensor, *parameters: Tensor | None) -> Tensor:
    """Scores (1,heads,k) of pooling, of keys (1,k,D) and parameters as ``scores_and_keys``."""
    return scores_and_keys(keys, *parameters)[0]


@dataclass(eq=False)
class FusedScore:
    """Scores (b,q,k) of queries and keys."""

    shared: Shared
    terms: ScoreTerms
    small: bool  # too small for a cache between calls

    def __post_init__(self) -> None:
        self.__name__ = type(self).__name__.removeprefix("Fused").lower()  # in a graph's code

    def terms_of(self, features: Tensor | None, w_f: Tensor | None) -> ScoreTerms:
        """With the features of a call."""
        terms = self.terms
        return terms if features is None else terms._replace(features=features, w_f=w_f)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, w_k: Any, bias: Any, features: Any, w_f: Any
    ) -> Tensor:
        """Scores of projected queries; keys are projected where there is a weight."""
        cache = None if self.small else self.shared.caches.of(v, w_k, ())[0]
        terms = self.terms_of(features, w_f)
        call = Call(q, k, k, v, None, w_k, bias, cache=cache, terms=terms, scores_only=True)
        return run.scores(call)


@dataclass(eq=False)
class FusedAttend(FusedScore):
    """Context and weights of queries, keys and values, as the user's code has them."""

    score_ops: tuple[tuple[str, float | None], ...]  # None stands for a tensor
    hidden_rows_nan: bool  # as where scores are filled with -inf
    orders: tuple[tuple[int, ...], tuple[int, ...]]  # of axes, of weights and of the context
    dtypes: tuple[torch.dtype, torch.dtype]

    def __call__(  # type: ignore[override]
        self, q: Tensor, k: Tensor, w_q: Any, w_k: Any, bias: Any, features: Any, w_f: Any,
        x: Tensor, v: Tensor, mask: Tensor | None, tests: tuple[Tensor, ...],
        operands: tuple[Tensor, ...], sizes: list[int],
        weights_shape: list[int], context_shape: list[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Context and weights; NotServed where one of the tests is false."""
        if tests and not all(tests):
            raise NotServed
        ops: Any = self.score_ops
        if operands:
            rest = iter(operands)
            ops = tuple((op, next(rest) if by is None else by) for op, by in ops)
        if self.small:
            cache, v = None, scaled(v, ops) if ops else v
        else:
            cache, v = self.shared.caches.of(v, w_k, ops)
        nan = ~mask.any(-1, keepdim=True) if self.hidden_rows_nan and mask is not None else None
        shape: Any = ResultLayout(self, sizes, weights_shape, context_shape, nan)
        terms = self.terms_of(features, w_f)
        return run.attend(
            Call(q, k, x, v, w_q, w_k, bias, None, mask, cache=cache, shape=shape, terms=terms)
        )


class ResultLayout(NamedTuple):
    """Axes, sizes and dtypes of the results, as the user's code has them."""

    of: FusedAttend
    sizes: list[int]  # batch, queries and keys may be several axes
    weights_shape: list[int]
    context_shape: list[int]
    nan: Tensor | None  # rows that are NaN, (b,q,1)

    @property
    def turned(self) -> tuple[list[int], tuple[int, ...]] | None:
        """Sizes and order of the axes of the weights, where that is another one."""
        order = self.of.orders[0]
        return None if order == tuple(range(len(order))) else (self.sizes, order)

    def restore_weights(self, weights: Tensor) -> Tensor:
        """The user's weights of (b,q,k)."""
        if self.nan is not None:
            weights = weights.masked_fill(self.nan, torch.nan)
        if self.turned is not None:
            weights = weights.reshape(self.sizes).permute(self.of.orders[0]).contiguous()
        shape = Tensor.reshape if weights.requires_grad else shaped  # else they are saved
        return _to(shape(weights, self.weights_shape), self.of.dtypes[0])

    def restore(self, context: Tensor) -> Tensor:
        """The user's context of (b,q,features)."""
        if self.nan is not None:
            context = context.masked_fill(self.nan, torch.nan)
        order = self.of.orders[1]
        context = context if order == (0, 1, 2) else context.permute(order).contiguous()
        return _to(shaped(context, self.context_shape), self.of.dtypes[1])


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)
