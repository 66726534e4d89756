"""The two signatures that the course gave its attention."""

from __future__ import annotations

from typing import Any

from bahdanau_fast import checks

__all__ = ["read_signature"]


def read_signature(
    sizes: tuple[Any, ...], named: dict[str, Any]
) -> tuple[int | None, int | None, int, float]:
    """Read a call of either signature.

    Args:
        sizes: positional arguments.
        named: keyword arguments.

    Returns:
        key_size and query_size, None for both where the call gives neither; num_hiddens; dropout.

    Raises:
        TypeError: arguments that fit neither signature, or sizes that are no integers.
        ValueError: a size below 1.
    """
    old = ("key_size", "query_size", "num_hiddens", "dropout")
    new = ("num_hiddens", "dropout")
    names = old if len(sizes) > len(new) or "key_size" in named or "query_size" in named else new
    taken = "AdditiveAttention takes (num_hiddens, dropout) or "
    taken += "(key_size, query_size, num_hiddens, dropout)"
    if len(sizes) > len(names):
        raise TypeError(f"{taken}, got {len(sizes)} positional arguments")
    given = dict(zip(names, sizes, strict=False))
    for name, value in named.items():
        if name in given or name not in names:
            raise TypeError(f"{taken}, got {name!r} " + ("twice" if name in given else "too"))
        given[name] = value
    dropout = given.pop("dropout", 0.0)
    missing = [name for name in names if name != "dropout" and name not in given]
    if missing:
        raise TypeError(f"{taken}, {missing[0]!r} is missing")
    for name, value in given.items():
        checks.positive_int(name, value)
    return given.get("key_size"), given.get("query_size"), given["num_hiddens"], dropout
