"""Calls timed in turns while a constant varies, the others as they are.

Constants of CUDA C++ are variables of the build of ``make gpu-bundle`` (LAB_CONSTEXPR), those of
Triton are set in kernels/plans.py.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bahdanau_fast as bf
from bahdanau_fast.check.children import say
from bahdanau_fast.ops.operator import operators

from .. import measure
from ..measure import graphs, interleave
from .decide import SWEEPS, Call, Sweep, Way

HELD, SECONDS = 5, 0.3  # calls in a graph; of timing a call in all its ways


class Lab:
    """A GPU, and how experiments run there: "timed"; "warm" compiles, and says nothing."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    # ---- what a dry run has in other ways (tests/support/dry_hour.py)

    @contextmanager
    def there(self, sweep: Sweep) -> Iterator[None]:
        """Inside, there is a GPU for the calls of a sweep."""
        bf.backends.available()  # loads them
        yield

    def library(self) -> Any:
        """Where the constants of CUDA C++ are."""
        import bahdanau_fast._C_cuda as binary

        return ctypes.CDLL(binary.__file__)

    def operator(self, backend: str) -> Callable[..., Any]:
        return lambda name, *given: operators[name].kernel(backend)(*given)

    def like(self, call: Call) -> Call:
        """The call that is made for one."""
        return call

    def draw(self, *sizes: int, dtype: str, scale: float = 0.7) -> Tensor:
        """Numbers that saturate nothing."""
        return (torch.randn(sizes, device="cuda") * scale).to(getattr(torch, dtype))

    def seen(self) -> dict[str, Any]:
        """What else is said of a call that was made."""
        return {}

    # ---- what varies

    @contextmanager
    def set(self, settings: dict[str, int]) -> Iterator[None]:
        """Inside, constants have these values."""
        before = {name: self._exchange(name, value) for name, value in settings.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                self._exchange(name, value)

    def _exchange(self, name: str, value: int) -> int:
        """Set a constant; its value so far."""
        if name.startswith("k"):
            mangled = f"_ZN13bahdanau_fast3gpu{len(name)}{name}E"
            variable = ctypes.c_int64.in_dll(self.library(), mangled)
            before, variable.value = int(variable.value), value
            return before
        from bahdanau_fast.backends.triton import launch
        from bahdanau_fast.kernels import plans

        before = getattr(plans, name)
        setattr(plans, name, value)
        launch.plans.clear()
        return before

    # ---- how it is timed

    def race(self, sweep: Sweep, call: Call) -> None:
        """Time a call in all ways in turns, and say a row for each."""
        rows, timed, first = dict[str, dict[str, Any]](), dict[Any, Any](), list[Tensor]()
        for label, way in sweep.ways.items():
            name = f"{sweep.constant} {label}: {call}"
            row = rows[label] = {"stage": "lab", "row": name, "constant": sweep.constant}
            row |= {"call": str(call), "way": label}
            torch.manual_seed(0)  # the same numbers in all ways
            try:
                with self.set(way.settings):
                    made = _make(self, self.like(call), way)
                    found = [x.detach().float() for x in tree_leaves(made()) if x is not None]
                    row |= self.seen()
                    first = first or found
                    if self.mode == "timed":
                        row["differs"] = max(map(_differ, found, first))
                        held = graphs(made, torch.device("cuda"), HELD, call.sizes[1] == 1)
                        timed |= {(label, kind): graph for kind, graph in held.items()}
            except Exception as error:  # a GPU may have no room for a way
                row["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if timed:
            spreads: dict[Any, Any] = interleave(timed, SECONDS).packed()
            for (label, kind), spread in spreads.items():
                rows[label][kind] = spread
        for row in rows.values():
            if self.mode != "warm":
                say(row)


def constant(name: str, mode: str) -> None:
    """Everything that decides a constant, in a mode of the lab; "dry" is without a GPU."""
    lab = import_module("dry_hour").Dry() if mode == "dry" else Lab(mode)
    measure.PAUSE_SECONDS = 1e-3  # no threads of a processor have to go to sleep
    (sweep,) = (sweep for sweep in SWEEPS if sweep.constant == name)
    with lab.there(sweep):
        # What a dry run makes alike is made once.
        for call in {lab.like(call): call for call in reversed(sweep.calls)}.values():
            lab.race(sweep, call)


def _differ(x: Tensor, y: Tensor) -> float:
    """By how much of the largest number."""
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) if x.numel() else 0.0


def _make(lab: Lab, call: Call, way: Way) -> Callable[[], Any]:
    """The call, its inputs drawn."""
    from entry_points import attention

    batch, queries, keys, hidden = call.sizes
    draw = partial(lab.draw, dtype=call.dtype)
    shapes = (batch, queries, hidden), (batch, keys, hidden), (batch, keys, call.values or hidden)
    inputs = *(draw(*shape) for shape in shapes), draw(1, hidden, scale=hidden**-0.5)
    more: dict[str, Any] = {"narrow": call.dtype != "float32"}
    if call.what == "step":
        more["w_q"] = draw(hidden, hidden, scale=hidden**-0.5)
    return partial(attention, lab.operator(way.backend), *inputs, **more)
