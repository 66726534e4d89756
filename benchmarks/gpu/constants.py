"""What decides a constant of the GPU code: calls, and the values that they are timed at.

A constant is measured at several values; or, where it bounds a size, with calls within it and
beyond it, whatever their size. Names of constants are those of the sources. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

ALL, NONE = 1 << 40, 0  # a bound that everything is within, and one that nothing is
WITHIN, BEYOND = "within", "beyond"
Sizes = tuple[int, int, int, int]


class Call(NamedTuple):
    """A call by B, Tq, Tk and H; of a decoder T in place of Tq."""

    what: str  # a key of lab.CALLS
    sizes: Sizes
    dtype: str = "bfloat16"
    values: int = 0  # their columns, where those are not H

    def __str__(self) -> str:
        columns = f", values of {self.values}" if self.values else ""
        return f"{str(self.sizes).replace(' ', '')}{columns}, {self.what}, {self.dtype}"


class Way(NamedTuple):
    """A backend, and constants that are set there; of a function of kernels/plans.py, its tile."""

    backend: str
    settings: dict[str, Any]


class Sweep(NamedTuple):
    """Ways to compute the same calls, by what the rows call them.

    Attributes:
        constant: what they decide.
        size: of a call, where the ways are within and beyond the constant.
        least: whether sizes from the constant on are beyond it, and not those above.
    """

    constant: str
    calls: list[Call]
    ways: dict[str, Way]
    size: Callable[[Call], float] | None = None
    least: bool = False


def _calls(what: str, *sizes: Sizes, **more: Any) -> list[Call]:
    return [Call(what, of, **more) for of in sizes]


def _values(backend: str, name: str, calls: list[Call], *values: int) -> Sweep:
    return Sweep(name, calls, {str(value): Way(backend, {name: value}) for value in values})


def _bound(
    backend: str, name: str, calls: list[Call], size: Callable[[Call], float], **also: int
) -> Sweep:
    bounds = {WITHIN: ALL, BEYOND: NONE}
    ways = {label: Way(backend, also | {name: bound}) for label, bound in bounds.items()}
    return Sweep(name, calls, ways, size)


def _backends(name: str, calls: list[Call], size: Callable[[Call], float]) -> Sweep:
    return Sweep(name, calls, {WITHIN: Way("cuda", {}), BEYOND: Way("triton", {})}, size)


def _tiles(function: str, calls: list[Call], names: str, *tiles: tuple[int, ...]) -> Sweep:
    found = [dict(zip(names.split(), of, strict=True)) for of in tiles]
    labels = (", ".join(f"{name} {n}" for name, n in tile.items()) for tile in found)
    # By waves, also where a dry run makes calls small.
    ways = (Way("triton", {function: tile, "_TANH_PER_WAVES": ALL}) for tile in found)
    return Sweep(function, calls, dict(zip(labels, ways, strict=True)))


def _queries(call: Call) -> int:
    return call.sizes[1]


def _weight(call: Call) -> int:
    """Bytes of W_q in 16 bits."""
    return 2 * call.sizes[3] ** 2


def _read(call: Call) -> int:
    """Bytes of W_q, times the queries."""
    return _queries(call) * _weight(call)


def _attended(call: Call) -> int:
    """Numbers that a block of 128 attends to."""
    return -(-call.sizes[0] // 128) * call.sizes[2] * call.sizes[3]


def _waves(call: Call) -> float:
    """What `pays_by_waves` bounds, beside its own constant."""
    _, queries, keys, _ = call.sizes
    of_queries, of_keys = (-(-n // 64) * 64 for n in (queries, keys))
    return (2 * of_queries * of_keys + 256 * (of_queries + of_keys)) / (2 * queries * keys)


SHORT, LONG, WIDE = (64, 1, 50, 512), (64, 1, 400, 512), (256, 1, 400, 512)
FEW, ONE, POOLING = (16, 1, 400, 512), (1, 1, 1000, 512), (1, 1, 40000, 512)
LARGE, SMALL, SENTENCES = (16, 512, 512, 512), (4, 128, 128, 512), (32, 33, 34, 1024)
NARROW = [(64, 1, 50, n) for n in (64, 128, 256, 512)]
BEAMS = [(64, n, 50, 128) for n in (1, 2, 3, 4)]
DECODERS = (
    *((64, 10, 50, 512), (64, 50, 50, 512), (128, 12, 200, 512), (16, 12, 400, 512)),
    *((64, 12, 400, 512), (8, 12, 1000, 512), (4, 12, 2000, 512)),
)
MANY = (
    *(LARGE, SMALL, SENTENCES, (64, 50, 50, 512), (64, 100, 100, 512), (64, 128, 128, 512)),
    *((16, 64, 512, 512), (16, 100, 512, 512)),
)
STEP, FORWARD, BACKWARD = "step", "forward", "backward"
WAVES, TERMS = "BLOCK_H BLOCK_O BLOCK_R STAGES num_warps", "BLOCK_Q BLOCK_K num_warps STAGES splits"

SWEEPS = (
    # csrc/cuda
    _bound("cuda", "kMostAttended", _calls("decoder, forward + backward", *DECODERS), _attended),
    _bound(
        *("cuda", "kOwnWeight"),
        _calls(STEP, *NARROW, (1, 1, 50, 256), (256, 1, 50, 128)),
        lambda call: _weight(call) / 8,  # blocks of a cluster
    ),
    _bound("cuda", "kSharedWeight", _calls(STEP, *NARROW), _weight, kOwnWeight=ALL)._replace(
        least=True
    ),
    _values(
        *("cuda", "kMostSplits"),
        _calls(FORWARD, SHORT, LONG, WIDE, FEW, ONE, POOLING, (64, 4, 50, 512)),
        *(1, 2, 4, 8, 132, 256, 512),
    ),
    _values("cuda", "kMostScores", _calls(FORWARD, (256, 1, 8192, 32)), 1024, 2048, 4096, 8192),
    # This bounds roundings: to be faster does not settle it.
    _values(
        *("cuda", "kMostInTurn"),
        _calls(FORWARD, (256, 1, 4096, 128), POOLING, dtype="float32"),
        *(64, 128, 256),
    ),
    _values(
        *("cuda", "kRingLimit"),
        [*_calls(FORWARD, (64, 1, 50, 2048), (256, 1, 400, 1024)), Call(FORWARD, LONG, "float32")],
        *(n << 10 for n in (40, 76, 112, 160)),
    ),
    # bahdanau_fast/backends/route.py
    _backends(
        "GPU_STEP_QUERIES", _calls(FORWARD, *((64, n, 50, 512) for n in (4, 8, 10, 16))), _queries
    ),
    _backends(
        "GPU_STEP_HIDDEN",
        _calls(FORWARD, *((64, 1, 50, n) for n in (512, 1024, 2048))),
        lambda call: call.sizes[3],
    ),
    _backends(
        "GPU_STEP_FEATURES",
        [Call(FORWARD, SHORT, values=n) for n in (512, 1024, 2048)],
        lambda call: call.values,
    ),
    # kernels/plans.py
    _bound(
        *("triton", "_OWN_WEIGHT"),
        _calls(STEP, *NARROW, (64, 4, 50, 128), (256, 1, 50, 512)),
        _read,
        _OWN_QUERIES=ALL,
    ),
    _bound("triton", "_OWN_QUERIES", _calls(STEP, *BEAMS), _queries, _OWN_WEIGHT=ALL),
    _bound("triton", "_TANH_PER_WAVES", _calls(BACKWARD, *MANY), _waves),
    _tiles(
        *("grad_waves", _calls(BACKWARD, LARGE, (16, 128, 128, 512)), WAVES),
        *((8, 64, 128, 1, 8), (8, 64, 128, 2, 8), (4, 64, 128, 3, 8)),
        *((8, 64, 64, 2, 4), (8, 128, 128, 2, 8), (16, 32, 64, 2, 4)),
    ),
    _tiles(
        *("terms", _calls(FORWARD, LARGE), TERMS),
        *((64, 64, 4, 3, 1), (64, 64, 4, 2, 1), (64, 128, 8, 3, 1), (128, 64, 8, 3, 1)),
    ),
    _tiles(
        *("terms", _calls(FORWARD, SMALL, SENTENCES), TERMS),
        *((16, 64, 4, 3, 4), (16, 64, 4, 3, 8), (16, 32, 4, 3, 4), (64, 64, 4, 3, 8)),
    ),
    _values("triton", "WHOLE_TILES", _calls(BACKWARD, LARGE, SENTENCES), 64, 128),
    _values(
        *("triton", "_SCRATCH", _calls("forward without weights", (64, 512, 1024, 256))),
        *(n << 20 for n in (32, 64, 128, 256)),
    ),
    _values(
        *("triton", "_TERMS", _calls("forward without weights", (256, 100, 400, 1024))),
        *(n << 20 for n in (128, 256, 512)),
    ),
    _values("triton", "_GRAD_KEYS", _calls(BACKWARD, ONE), 4, 8, 16, 32),
    _values("triton", "_MOST_IN_TURN", _calls(FORWARD, POOLING, dtype="float32"), 128, 256),
    _values(
        *("triton", "OWN_FEATURES"),
        _calls("forward, 32 features", *((64, n, 200, 128) for n in (2, 3, 4))),
        *(0, 2, 4),
    ),
)
