"""Lazy layers, whose weights are drawn in the order of the course's first call."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bahdanau_fast import checks

__all__ = ["draw"]


def draw(
    layers: tuple[nn.Module | None, nn.Module | None, nn.Module | None],
    queries: Tensor | None,
    keys: Tensor | None,
    hidden: int,
) -> None:
    """Draw the weights of lazy layers in the order of d2l's calls: queries, keys, scores.

    Args:
        layers: of the queries, the keys and the scores; layers that are not lazy stay unchanged.
        queries: (B,Tq,Dq), or None if unknown, and the layer stays lazy.
        keys: (B,Tk,Dk), likewise; one of the two is given.
        hidden: H.

    Raises:
        ValueError: a layer has loaded a weight of another size.
    """
    of_query, of_key, of_score = layers
    if queries is not None:
        _draw(of_query, "queries", queries)
    if keys is not None:
        _draw(of_key, "keys", keys)
    if isinstance(of_score, nn.LazyLinear):
        like = cast(Tensor, keys if queries is None else queries)
        _draw(of_score, "num_hiddens", like.new_empty(1, hidden))


def _draw(layer: nn.Module | None, name: str, x: Tensor) -> None:
    if not isinstance(layer, nn.LazyLinear):
        return
    if torch.compiler.is_compiling():
        layer(x)  # the compiler infers its size, and drops the unused product
        return
    if not is_lazy(layer.weight):
        checks.features(name, x, layer.weight.shape[1])
    # What the layer's own first call does in front of its hooks, which wait for a real call.
    cast(Any, layer)._infer_parameters(layer, (x,))
