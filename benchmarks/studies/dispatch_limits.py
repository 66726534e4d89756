"""The limits at which auto changes its choice: is its choice the fastest on both sides?

Auto chooses by sizes. On both sides of each limit every way is forced and timed, in turns. The way
that auto takes may need ``LIMIT_SLACK`` times the time of the best way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

import bahdanau_fast as bf
from bahdanau_fast import backends, limits, memory
from bahdanau_fast.functional import attend_queries
from bahdanau_fast.ops import few_rows, projection

from ..contestants.parity import Oracle
from ..contestants.providers import Runnable, attend_projected, by_name
from ..timing.measure import interleave
from ..workloads.shapes import MANY_QUERIES, TOY, Inputs, Shape, draw

__all__ = ["CHOICES", "Choice", "measure"]

Way = Callable[[Inputs], Callable[[], Any]]
_NEVER, _ALWAYS = 0, limits.NEVER


@dataclass(frozen=True)
class Choice:
    """One choice that auto makes by a limit.

    Attributes:
        what: description of the choice.
        limits: the fields of ``Limits`` that decide it; none for the choice of the backend.
        task: the providers' task, for the parity check; empty for no check.
        ways: forces each way.
        takes: the way that auto takes on some inputs.
        shapes: shapes on both sides of the limit.
    """

    what: str
    limits: tuple[str, ...]
    task: str
    ways: dict[str, Way]
    takes: Callable[[Inputs], str]
    shapes: tuple[Shape, ...]


def _op(backend: str | None, **moved: int) -> Way:
    """The function on raw queries and keys, with limits moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        arguments = (inputs.queries, inputs.keys, inputs.values, inputs.w_q, inputs.w_k, inputs.w_v)
        chosen = replace(limits.LIMITS, **moved)

        def call() -> Any:
            limits.LIMITS = chosen
            return bf.additive_attention(*arguments, inputs.valid_lens, backend=backend)

        return call

    return way


def _project(**moved: int) -> Way:
    """The projection of the keys by a product of torch's, with limits moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        chosen = replace(limits.LIMITS, few_rows=_NEVER, **moved)

        def call() -> Any:
            limits.LIMITS = chosen
            return projection.linear(inputs.keys, inputs.w_k)

        return call

    return way


def _own(inputs: Inputs) -> Callable[[], Any]:
    """The projection of the keys by this package's product, on every processor."""

    def call() -> Any:
        projection.way(inputs.keys, inputs.w_k)  # which auto asks in front of each product
        return few_rows.multiply(inputs.keys, inputs.w_k, None)

    return call


def _sum(**moved: int) -> Way:
    """The gradient of W_k, with limits moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        chosen = replace(limits.LIMITS, **moved)

        def call() -> Any:
            limits.LIMITS = chosen
            return projection.sum_of_products(inputs.projected_keys, inputs.keys)

        return call

    return way


def _again(**moved: int) -> Way:
    """The module's call on the keys of the call before, with limits moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        forward = by_name("ours module").build("again", inputs).forward
        chosen = replace(limits.LIMITS, **moved)

        def call() -> Any:
            limits.LIMITS = chosen
            return forward()

        return call

    return way


def _projected(inputs: Inputs) -> memory.ProjectedKeys:
    """The keys of a memory for these queries, with a table where the limits say so."""
    keys = inputs.projected_keys
    return memory.project(keys, backends.keeps_table("cpu", keys, inputs.queries.shape[1]))


def _attend(**moved: int) -> Way:
    """A step on projected keys, with the limits of the kept table moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        with limits.using(**moved):
            keys = _projected(inputs)
        rest = (inputs.values, inputs.w_v.detach(), inputs.valid_lens)
        return lambda: attend_projected("cpu", inputs.projected_queries, keys, *rest)

    return way


def _step(**moved: int) -> Way:
    """A step on a memory, with the limits of the operator that projects its query moved."""

    def way(inputs: Inputs) -> Callable[[], Any]:
        keys = _projected(inputs)
        w_v = inputs.w_v.detach()
        chosen = replace(limits.LIMITS, **moved)

        def call() -> Any:
            limits.LIMITS = chosen
            route = _route(inputs, keys.keys)
            rest = (keys, inputs.values, w_v, inputs.valid_lens, 0.0)
            return attend_queries(route, inputs.queries, inputs.w_q, *rest)

        return call

    return way


def _route(inputs: Inputs, projected: torch.Tensor | None = None) -> backends.Route:
    """How auto computes a call, from raw keys unless projected ones are given."""
    known = projected is not None
    keys = projected if projected is not None else inputs.keys
    w_k = None if known else inputs.w_k
    weights = (inputs.w_q, w_k, inputs.w_v.detach())
    given = (inputs.queries, keys, inputs.values, *weights, None, len(inputs.w_q), 0.0)
    return backends.decide(*given, keys_projected=known)


def _operators(inputs: Inputs) -> str:
    return "one" if _route(inputs).form == "one operator" else "three"


def _keeps(inputs: Inputs) -> str:
    keys = _projected(inputs)
    return "made anew" if keys.table is None else "kept"


def _tiny(keys: int) -> Shape:
    return replace(TOY, name="tiny", keys=keys, lens="none")


def _rows(batch: int, features: int = 512, hidden: int = 512) -> Shape:
    return Shape(f"rows of {features}", batch, 1, 1, hidden, key_size=features)


CHOICES = (
    Choice(
        "backend",
        (),
        "full",
        {"cpu": _op("cpu"), "reference": _op("reference")},
        lambda inputs: backends.resolve(inputs.keys.device),
        (TOY, Shape("one", 1, 1, 1, 1), MANY_QUERIES[0], Shape("long", 1, 1, 4000, 64)),
    ),
    Choice(
        "operators of a call",
        ("one_operator_work",),
        "full",
        {"one": _op(None, one_operator_work=_ALWAYS), "three": _op(None, one_operator_work=_NEVER)},
        _operators,
        (
            _tiny(10),
            *(Shape("small", 8, 1, keys, 16) for keys in (2, 7, 14, 56, 224)),
            *(Shape("narrow", 2, 1, keys, 32) for keys in (2, 7, 14, 56, 224)),
        ),
    ),
    Choice(
        "matrix product of the projection",
        ("onednn_work", "onednn_rows"),
        "",
        {
            "MKL": _project(onednn_work=_ALWAYS),
            "oneDNN": _project(onednn_work=0, onednn_rows=0),
        },
        lambda inputs: (
            "oneDNN" if projection.way(inputs.keys, inputs.w_k) is projection.multiply else "MKL"
        ),
        (
            *map(_rows, (1, 2, 4, 8, 16, 64, 512, 1024, 3200)),
            *(_rows(64, 32, 32), _rows(1152, 256, 256), _rows(10240, 512, 128)),
        ),
    ),
    Choice(
        "matrix product of some rows",
        ("turned_side", "turned_rows", "turned_rows_most"),
        "",
        {
            "as it is": _project(turned_side=limits.NEVER),
            "transposed": _project(turned_side=0, turned_rows=0, turned_rows_most=limits.NEVER),
        },
        lambda inputs: (
            "transposed"
            if projection.way(inputs.keys, inputs.w_k) is projection.multiply_turned
            else "as it is"
        ),
        (
            *map(_rows, (8, 16, 24, 32, 48, 64)),
            *(_rows(32, 256, 256), _rows(16, 384, 512), _rows(16, 1024, 512), _rows(32, 2048, 512)),
        ),
    ),
    Choice(
        "matrix product of few rows",
        (
            *("few_rows", "few_rows_features", "few_rows_hidden", "few_rows_weight"),
            "one_row_weight",
        ),
        "",
        {"torch's": _project(), "our own": _own},
        lambda inputs: (
            "our own" if projection.way(inputs.keys, inputs.w_k) is few_rows.multiply else "torch's"
        ),
        (
            *map(_rows, (1, 2, 4, 8, 16, 32, 64)),
            *(_rows(1, 256, 256), _rows(8, 64, 64), _rows(16, 256, 256), _rows(32, 256, 256)),
            *(_rows(16, 8192, 64), _rows(32, 1024, 128), _rows(32, 128, 1024), _rows(8, 2048)),
        ),
    ),
    Choice(
        "matrix product of the gradient of a weight",
        ("onednn_side",),
        "",
        {
            "MKL": _sum(onednn_side=_ALWAYS),
            "oneDNN": _sum(onednn_side=0, onednn_work=0),
        },
        lambda inputs: (
            "oneDNN" if projection.sums_pay(inputs.projected_keys, inputs.keys) else "MKL"
        ),
        tuple(
            _rows(rows, side, side)
            for rows, side in ((64, 64), (64, 128), (64, 512), (3200, 64), (3200, 128), (3200, 512))
        ),
    ),
    Choice(
        "reuse of the projection of unchanged keys",
        ("reuse_elements",),
        "again",
        {
            "remembered": _again(reuse_elements=0),
            "made anew": _again(reuse_elements=_ALWAYS),
        },
        lambda inputs: (
            "remembered"
            if inputs.keys.numel() >= limits.LIMITS.reuse_elements and _route(inputs).reuse
            else "made anew"
        ),
        tuple(Shape("again", 1, 1, keys, 64) for keys in (8, 9, 16, 64, 512)),
    ),
    Choice(
        "projection of a step's queries",
        ("step_rows", "step_work"),
        "step",
        {
            "in its operator": _step(step_rows=_ALWAYS, step_work=_ALWAYS),
            "in front": _step(step_rows=0, step_work=0),
        },
        lambda inputs: (
            "in its operator"
            if _route(inputs, inputs.projected_keys).form == "step"
            else "in front"
        ),
        tuple(
            Shape("step", batch, 1, 20, hidden)
            for batch, hidden in ((1, 32), (64, 32), (64, 128), (1, 512), (8, 512), (32, 512))
        ),
    ),
    Choice(
        "table of exponentials for steps on a memory",
        ("table_elements", "table_queries"),
        "projected",
        {
            "kept": _attend(table_elements=0, table_queries=_ALWAYS),
            "made anew": _attend(table_elements=_ALWAYS),
        },
        _keeps,
        (
            *(Shape("memory", 2, 1, keys, 64) for keys in (4, 8, 16, 32, 128)),
            Shape("memory", 8, 1, 400, 512),
            *(Shape("memory", 8, queries, 50, 256) for queries in (4, 8, 12, 15, 16, 32)),
        ),
    ),
)


def measure(seconds: float = 0.1, choices: tuple[Choice, ...] = CHOICES) -> list[dict[str, Any]]:
    """Time every way of every choice on its shapes; empty without the C++ backend.

    Args:
        seconds: timing per way.
        choices: the choices to measure.

    Raises:
        RuntimeError: a way's result fails parity.
    """
    if backends.resolve(torch.device("cpu")) != "cpu":
        return []
    before = limits.LIMITS
    wanted = [(choice, shape) for choice in choices for shape in choice.shapes]
    found = []
    try:
        with torch.no_grad(), tqdm(wanted, disable=not sys.stderr.isatty()) as bar:
            for choice, shape in bar:
                bar.set_description(f"{choice.what} {shape.name}")
                limits.LIMITS = before
                found.append(_measure(choice, shape, seconds))
    finally:
        limits.LIMITS = before
    return found


def _measure(choice: Choice, shape: Shape, seconds: float) -> dict[str, Any]:
    inputs = draw(shape)
    taken = choice.takes(inputs)
    calls = {name: way(inputs) for name, way in choice.ways.items()}
    if choice.task:
        oracle = Oracle(inputs, shape, choice.task, False)
        for name, call in calls.items():
            if not oracle.check(Runnable(call, ()), "ours", False).passed:
                raise RuntimeError(f"{choice.what}, {name}: parity fails at {shape}")
    timings = interleave(calls, seconds * len(calls))
    best = timings.fastest(list(calls))
    return {
        "what": choice.what,
        "limits": choice.limits,
        "shape": asdict(shape),
        "takes": taken,
        "best": best,
        "seconds": {name: asdict(timings.time(name)) for name in calls},
        "behind": asdict(timings.ratio(taken, best)),
    }
