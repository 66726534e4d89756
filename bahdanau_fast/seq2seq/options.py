"""Fields of settings that are options of the command line too: what one means is said once."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bahdanau_fast import checks

Number = TypeVar("Number", int, float)


def at_least(low: Number, kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A converter for argparse that refuses numbers below ``low``."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            need = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {need}, got {text!r}") from None
        if math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be finite, got {text}")
        if not value >= low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    return convert


def other(
    default: Any, meaning: str, check: Callable[[str, Any], None] | None = None, **how: Any
) -> Any:
    """Any value: ``check`` raises for bad ones, ``how`` is for ``add_argument``."""
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "check": check, "how": how}
    )


def count(default: int | None, meaning: str) -> Any:
    """An integer of at least one."""
    return other(default, meaning, checks.positive_int, type=at_least(1, int), metavar="N")


def share(default: float, meaning: str, metavar: str = "X") -> Any:
    """A number in [0, 1]."""
    return other(default, meaning, checks.probability, type=at_least(0.0, float), metavar=metavar)


def amount(default: float, meaning: str) -> Any:
    """A number above zero."""

    def check(name: str, value: float) -> None:
        if not value > 0:
            checks.reject(ValueError, name, "be above 0", value)

    return other(default, meaning, check, type=at_least(0.0, float), metavar="X")


def choice(default: str, meaning: str, choices: Sequence[str]) -> Any:
    """One of some words."""

    def check(name: str, value: str) -> None:
        if value not in choices:
            need = f"be one of {', '.join(map(repr, choices))}"
            checks.reject(ValueError, name, need, repr(value))

    return other(default, meaning, check, choices=choices)


def switch(default: bool, meaning: str) -> Any:
    """Yes or no."""
    return other(default, meaning, action=argparse.BooleanOptionalAction)


class Checked:
    """A dataclass of settings whose fields are checked when it is made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, check = getattr(self, field.name), field.metadata.get("check")
            if check is not None and not (value is None and field.default is None):
                check(field.name, value)


def add_options(group: Any, defaults: Any) -> None:
    """An option for every field that was made here; without it nothing is in the namespace."""
    for field in filter(lambda field: field.metadata, dataclasses.fields(defaults)):
        default, shown = getattr(defaults, field.name), field.metadata["meaning"]
        if isinstance(default, bool):
            default = "yes" if default else "no"
        if default is not None:
            shown += f" (default: {default})"
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, help=shown, default=argparse.SUPPRESS, **field.metadata["how"])
