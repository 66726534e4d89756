"""The two signatures that the course gave its attention."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from bahdanau_fast import checks

_TAKEN = (
    "AdditiveAttention takes (num_hiddens, dropout) or (key_size, query_size, num_hiddens, dropout)"
)


def read_signature(
    sizes: tuple[Any, ...], named: dict[str, Any]
) -> tuple[int | None, int | None, int, float]:
    """key_size and query_size (None for both if a call gives neither), num_hiddens, dropout."""
    old = ("key_size", "query_size", "num_hiddens", "dropout")
    new = ("num_hiddens", "dropout")
    sides = old[:2]
    named = {name: value for name, value in named.items() if value is not None or name not in sides}
    by_name = [name for name in sides if name in named]
    # With both by name, the positional ones are num_hiddens and dropout.
    sizes_first = len(sizes) > 2 or (len(sizes) == 2 and "num_hiddens" in named)
    names = old if sizes_first or len(by_name) == 1 else new
    if len(sizes) > len(names):
        raise TypeError(f"{_TAKEN}, got {len(sizes)} positional arguments")
    arguments = dict(zip(names, sizes, strict=False))
    for name, value in named.items():
        if name in arguments or name not in old:
            raise TypeError(f"{_TAKEN}, got {name!r} " + ("twice" if name in arguments else "too"))
        arguments[name] = value
    dropout = arguments.pop("dropout", 0.0)
    wanted = old if by_name else names
    missing = [name for name in wanted if name != "dropout" and name not in arguments]
    if missing:
        raise TypeError(f"{_TAKEN}, {missing[0]!r} is missing")
    for name, value in arguments.items():
        checks.positive_int(name, value)
    key_size, query_size = (arguments.get(name) for name in sides)
    return key_size, query_size, arguments["num_hiddens"], dropout


class Options(TypedDict, total=False):
    """What either signature may be followed by."""

    bias: bool
    cache_keys: bool
    activation: str
    negative_slope: float
    device: torch.device | str | None
    dtype: torch.dtype | None


def shown(
    self: Any,
    num_hiddens: int,
    dropout: float = 0.0,
    *,
    key_size: int | None = None,
    query_size: int | None = None,
    bias: bool = False,
    cache_keys: bool = True,
    activation: str = "tanh",
    negative_slope: float = 0.01,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """What help() and notebooks show; sizes first, by position, are taken too."""
