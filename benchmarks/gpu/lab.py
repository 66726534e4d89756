"""Calls timed in turns while a constant varies, the others as they are.

Constants of CUDA C++ are variables of the build of ``make gpu-bundle`` (LAB_CONSTEXPR), those of
Triton are set in kernels/plans.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

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
    """A GPU, and how experiments run there.

    Args:
        mode: "timed"; or "warm": everything is compiled, and nothing is timed or said.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode

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
                        held = graphs(made, torch.device("cuda"), HELD, call.sizes[1] == 1)
                        if isinstance(held, str):
                            raise RuntimeError(held)
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


class Dry(Lab):
    """What stands for a GPU: each call is made once, and its launches are noted.

    Calls of CUDA C++ alone go to the mock runtime, all others, smaller, to a pretended GPU.
    """

    def __init__(self) -> None:
        from mock_cuda import mock

        super().__init__("dry")
        self._mock, self._mocks, self._noted = mock(), False, list[Any]()

    @contextmanager
    def there(self, sweep: Sweep) -> Iterator[None]:
        """Inside, there is a GPU for the calls of a sweep."""
        import pretended

        self._mock.new_gpu()
        alone = {way.backend for way in sweep.ways.values()} == {"cuda"}
        self._mocks = alone and "decoder" not in sweep.calls[0].what
        with ExitStack() as stack:
            if not self._mocks:
                bf.backends.why_not("triton")  # loads it
                stack.enter_context(pretended.gpu("cuda", "triton"))
                stack.enter_context(self._interpreted())
            yield

    @contextmanager
    def _interpreted(self) -> Iterator[None]:
        """Inside, launches of Triton's interpreter are noted."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def noted(kernel: Any, *given: Any, **named: Any) -> Any:
            told = {name: x for name, x in named.items() if x is None or type(x) is int}
            self._noted.append([kernel.fn.__name__, told])
            return run(kernel, *given, **named)

        with patch.object(InterpretedFunction, "run", noted):
            yield

    def library(self) -> Any:
        """Where the constants of CUDA C++ are."""
        return self._mock._library

    def operator(self, backend: str) -> Callable[..., Any]:
        """Runs an operator by its name."""
        return self._mock.operator if self._mocks else super().operator(backend)

    def like(self, call: Call) -> Call:
        """The call that is made for one."""
        if self._mocks:
            return call
        decodes = "decoder" in call.what
        sizes = tuple(map(min, call.sizes, (1, 2 if decodes else 17, 17, 17)))
        # The operators of a decoder on the CPU know no 16 bits.
        dtype = "float32" if decodes else call.dtype
        return call._replace(sizes=sizes, dtype=dtype, values=min(call.values, 17))

    def draw(self, *sizes: int, dtype: str, scale: float = 0.7) -> Tensor:
        """Numbers; for the mock runtime, which reads none, just memory."""
        if self._mocks:
            return torch.empty(sizes, dtype=getattr(torch, dtype))
        return super().draw(*sizes, dtype=dtype, scale=scale)

    def seen(self, call: Call) -> dict[str, Any]:
        """What was launched; of a decoder, whether one launch would have been."""
        from mock_cuda import kernel_of, launches

        keys = ("grid", "block", "cluster", "shared")
        for one in launches(self._mock.calls()):
            self._noted.append([kernel_of(one), *(one[key] for key in keys)])
        if "decoder" in call.what:
            rows, _, others, units = call.sizes
            why = self._mock.why_not_decode(False, True, rows, others, *[units] * 3, 0, 0)
            self._noted.append(["one launch", why])
        noted, self._noted = self._noted, []
        return {"launches": noted}


def constant(name: str, mode: str) -> None:
    """Everything that decides a constant, in a mode of the lab; "dry" is without a GPU."""
    lab = Dry() if mode == "dry" else Lab(mode)
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
