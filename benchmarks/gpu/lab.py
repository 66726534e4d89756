"""Calls timed in turns while a constant varies, the others as they are.

Constants of CUDA C++ are variables of the build of ``make gpu-bundle`` (LAB_CONSTEXPR), those of
Triton are set in kernels/plans.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bahdanau_fast as bf
from bahdanau_fast.ops.operator import operators

from .. import measure
from ..measure import GpuCall, captured, interleave
from .constants import SWEEPS, Call, Sweep, Way

HELD, SECONDS = 5, 0.3  # calls in a graph; of timing a call in all its ways


class Lab:
    """A GPU, and how experiments run there.

    Args:
        say: takes a row.
        mode: "timed"; or "warm": everything is compiled, and nothing is timed or said.
    """

    dry = False

    def __init__(self, say: Callable[..., Any], mode: str) -> None:
        self.say, self.mode = say, mode

    # ---- what a dry run has in other ways

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
        """Runs an operator by its name."""
        return lambda name, *given: operators[name].kernel(backend)(*given)

    def like(self, call: Call) -> Call:
        """The call that is made for one."""
        return call

    def draw(self, *sizes: int, dtype: str, scale: float = 0.7) -> Tensor:
        """Numbers that saturate nothing."""
        return (torch.randn(sizes, device="cuda") * scale).to(getattr(torch, dtype))

    def seen(self, call: Call) -> dict[str, Any]:
        """What else is said of a call that was made."""
        return {}

    # ---- what varies

    @contextmanager
    def set(self, settings: dict[str, Any]) -> Iterator[None]:
        """Inside, constants have these values, and functions these tiles."""
        before = {name: self._exchange(name, value) for name, value in settings.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                self._exchange(name, value)

    def _exchange(self, name: str, value: Any) -> Any:
        """Set a constant; its value so far."""
        if name.startswith("k"):
            mangled = f"_ZN13bahdanau_fast3gpu{len(name)}{name}E"
            variable = ctypes.c_int64.in_dll(self.library(), mangled)
            before, variable.value = variable.value, value
            return before
        from bahdanau_fast.backends.triton import launch
        from bahdanau_fast.kernels import plans

        before = getattr(plans, name)
        setattr(plans, name, partial(_cut, before, value) if isinstance(value, dict) else value)
        for function in vars(plans).values():  # what they know of plans by the other value
            getattr(function, "cache_clear", lambda: None)()
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
            row |= {"size": sweep.size(call)} if sweep.size else {}
            torch.manual_seed(0)  # the same numbers in all ways
            try:
                with self.set(way.settings):
                    made = _make(self, self.like(call), way)
                    found = [x.detach().float() for x in tree_leaves(made()) if x is not None]
                    row |= self.seen(call)
                    first = first or found
                    if self.mode == "timed":
                        row["differs"] = max(map(_differ, found, first))
                        timed |= _graphs(label, made, call)
            except Exception as error:  # a GPU may have no room for a way
                row["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if timed:
            spreads: dict[Any, Any] = interleave(timed, SECONDS).packed()
            for (label, kind), spread in spreads.items():
                rows[label][kind] = spread
        for row in rows.values():
            if self.mode != "warm":
                self.say(**row)


def constant(lab: Lab, name: str) -> None:
    """Everything that decides a constant."""
    measure.PAUSE_SECONDS = 1e-3  # no threads of a processor have to go to sleep
    for sweep in SWEEPS:
        if sweep.constant == name:
            with lab.there(sweep):
                # What a dry run makes alike is made once.
                for call in {lab.like(call): call for call in reversed(sweep.calls)}.values():
                    lab.race(sweep, call)


def _cut(plan: Callable[..., Any], tile: dict[str, int], *sizes: Any) -> Any:
    """What a function of plans.py gives, with another tile."""
    found = plan(*sizes)
    if isinstance(found, dict):
        return found | tile
    hidden, split = sizes[3:]  # of terms
    splits = tile["splits"] if split else 1
    blocks = {name: tile[name] for name in found.blocks}
    return found._replace(
        quads=-(-hidden // (8 * splits)) * 2 * splits, splits=splits, blocks=blocks
    )


def _graphs(label: str, made: Callable[[], Any], call: Call) -> dict[Any, Any]:
    """A call in a graph, and of one query alone with no input in the L2."""
    found = {}
    for kind, held in {"graph": HELD, "cold": 1}.items():
        if kind == "graph" or call.sizes[1] == 1:
            graph = captured(made, held)
            if isinstance(graph, str):
                raise RuntimeError(graph)
            cold = kind == "cold"
            found[label, kind] = GpuCall(graph, torch.device("cuda"), cold=cold, holds=held)
    return found


def _differ(x: Tensor, y: Tensor) -> float:
    """By how much of the largest number."""
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) if x.numel() else 0.0


# ---- calls


def _make(lab: Lab, call: Call, way: Way) -> Callable[[], Any]:
    """The call, its inputs drawn."""
    from entry_points import attend_backward, attention

    batch, queries, keys, hidden = call.sizes
    draw = partial(lab.draw, dtype=call.dtype)
    if "decoder" in call.what:
        return _decoder(draw(queries, batch, 32), draw(batch, keys, hidden))
    shapes = (batch, queries, hidden), (batch, keys, hidden), (batch, keys, call.values or hidden)
    inputs = *(draw(*shape) for shape in shapes), draw(1, hidden, scale=hidden**-0.5)
    more: dict[str, Any] = {"narrow": call.dtype != "float32"}
    if "without weights" in call.what:
        more["need_weights"] = False
    if call.what == "step":
        more["w_q"] = draw(hidden, hidden, scale=hidden**-0.5)
    if "32 features" in call.what:
        more |= {"features": draw(batch, keys, 32), "w_f": draw(hidden, 32, scale=0.1)}
    forward = partial(attention, lab.operator(way.backend), *inputs, **more)
    if call.what != "backward":
        return forward
    context, weights = forward()
    grads = (draw(*x.shape) for x in (context, weights))
    return partial(attend_backward, lab.operator(way.backend), *inputs, None, weights, *grads)


def _decoder(inputs: Tensor, keys: Tensor) -> Callable[[], Any]:
    """All steps of AttentionGRU, and the gradients of everything."""
    module = bf.AttentionGRU(inputs.shape[2], keys.shape[2]).to(inputs.device, inputs.dtype)
    asked = [inputs.requires_grad_(), keys.requires_grad_(), *module.parameters()]

    def both() -> tuple[Tensor, ...]:
        outputs = module(inputs, None, keys)[0]
        return outputs, *torch.autograd.grad(outputs, asked, torch.ones_like(outputs))

    return both
