"""Calls in every dtype, and the largest error of a backend in one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bahdanau_fast import parity, reference
from bahdanau_fast.functional import additive_attention

__all__ = ["CASES", "Case", "check_one", "in_words"]


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    name: str
    batch: int
    queries: int
    keys: int
    hidden: int
    features: tuple[int, int, int]
    seen: str = "all"
    activation: str = "tanh"

    def draw(self, seed: int = 0) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Inputs in fp64: queries, keys, values, W_q, W_k, w_v; and lengths or a mask, by name."""
        generator = torch.Generator().manual_seed(self.batch * 7919 + self.keys + 104729 * seed)
        query_size, key_size, value_size = self.features
        shapes = [
            (self.batch, self.queries, query_size),
            (self.batch, self.keys, key_size),
            (self.batch, self.keys, value_size),
            (self.hidden, query_size),
            (self.hidden, key_size),
            (1, self.hidden),
        ]
        scales = [1.0, 1.0, 1.0, query_size**-0.5, key_size**-0.5, 1.0]
        tensors = [
            torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        if self.seen == "all":
            return tensors, {}
        if self.seen == "mask":
            mask = torch.rand(self.batch, self.keys, generator=generator) < 0.7
            return tensors, {"mask": mask}
        size = (self.batch,) if self.seen == "per row" else (self.batch, self.queries)
        lens = torch.randint(0, self.keys + 1, size, generator=generator)
        return tensors, {"valid_lens": lens}


CASES = (
    Case("decoder step", 16, 1, 50, 64, (64, 64, 64), "per row"),
    Case("long source", 1, 1, 1000, 128, (96, 128, 80)),
    Case("many queries", 4, 33, 34, 96, (64, 48, 40), "per query"),
    Case("small primes", 3, 5, 7, 11, (2, 13, 3), "per query"),
    Case("one of each", 1, 1, 1, 1, (1, 1, 1)),
)

_RESULTS = ("context", "weights", "d queries", "d keys", "d values", "d W_q", "d W_k", "d w_v")


def in_words(dtype: torch.dtype) -> str:
    """As "float32"."""
    return str(dtype).removeprefix("torch.")


def _results(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    case: Case,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> list[Tensor]:
    """Outputs and gradients in fp64, computed in ``dtype`` from inputs rounded to ``rounded``."""
    tensors, seen = case.draw()
    inputs = [tensor.to(rounded).to(dtype).requires_grad_() for tensor in tensors]
    context, weights = function(*inputs, **seen)
    assert weights is not None
    generator = torch.Generator().manual_seed(1)
    upstream = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(rounded).to(dtype)
        for out in (context, weights)
    ]
    torch.autograd.backward([context, weights], upstream)
    grads = [x.grad for x in inputs if x.grad is not None]
    return [result.detach().double() for result in (context, weights, *grads)]


def _allowed(case: Case, dtype: torch.dtype, exact: Tensor, eager_error: float) -> float:
    """What the parity rule allows for one result."""
    largest = float(exact.abs().max())
    if dtype == torch.float64:
        # The exact result is itself a rounded fp64 sum, so eager's error is unknown. Two sums of n
        # terms in different orders are at most n roundings apart each; the longest sum here is
        # that of a weight's gradient.
        terms = case.batch * case.queries * case.keys + case.hidden + max(case.features)
        eager_error = terms * torch.finfo(dtype).eps / 2 * largest
    return parity.allowed(eager_error, largest, dtype)


def check_one(name: str, case: Case, dtype: torch.dtype) -> tuple[float, float, str]:
    """Largest error of ours and of eager as shares of the allowed one, and the result it is in."""
    ours = partial(additive_attention, backend=name)
    worst = (-1.0, 0.0, "")
    exact = _results(reference.additive_attention, case, torch.float64, dtype)
    eager = _results(reference.additive_attention, case, dtype, dtype)
    result = _results(ours, case, dtype, dtype)
    for label, true, plain, got in zip(_RESULTS, exact, eager, result, strict=True):
        eager_error = parity.error(plain, true)
        allowed = _allowed(case, dtype, true, eager_error)
        share = parity.error(got, true) / allowed
        if share > worst[0]:
            worst = (share, eager_error / allowed, label)
    return worst
