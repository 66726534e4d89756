"""Calls timed in turns while a constant varies, the others as they are.

Constants of CUDA C++ are variables of the build of ``make gpu-bundle`` (LAB_CONSTEXPR), those of
Triton are set in kernels/plans.py. In a dry run each call is made once: those of CUDA C++ alone on
the mock runtime, which only notes their launches; all others smaller, on a pretended GPU.
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
from bahdanau_fast.ops.operator import operators

from ...timing import measure
from ...timing.measure import GpuCall, captured, interleave
from .constants import SWEEPS, Call, Sweep, Way

HELD, SECONDS = 5, 0.3  # calls in a graph; of timing a call in all its ways


class Lab:
    """Where experiments run, and how.

    Args:
        say: takes a row.
        mode: "timed"; "warm": nothing is timed and said, but all is compiled; "dry".
    """

    def __init__(self, say: Callable[..., Any], mode: str) -> None:
        self.say, self.mode, self.dry = say, mode, mode == "dry"
        # In a dry run: the mock runtime, whether calls go there, and launches.
        self._mock: Any = None
        self._mocks, self._noted = False, list[Any]()

    @contextmanager
    def there(self, sweep: Sweep) -> Iterator[None]:
        """Inside, there is a GPU for the calls of a sweep."""
        alone = {way.backend for way in sweep.ways.values()} == {"cuda"}
        with ExitStack() as stack:
            if not self.dry:
                bf.backends.available()  # loads them
            else:
                import pretended
                from mock_cuda import mock

                self._mock = mock()
                self._mock.new_gpu()
                self._mocks = alone and "decoder" not in sweep.calls[0].what
                if not self._mocks:
                    bf.backends.why_not("triton")  # loads it
                    stack.enter_context(pretended.gpu("cuda", "triton"))
                    stack.enter_context(self._interpreted())
            yield

    def some(self, calls: list[Call]) -> list[Call]:
        """All, or the first where they are made small and alike."""
        return calls[:1] if self.dry and not self._mocks else calls

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
            variable = ctypes.c_int64.in_dll(self._library(), mangled)
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

    def _library(self) -> Any:
        if self.dry:
            return self._mock._library
        import bahdanau_fast._C_cuda as binary

        return ctypes.CDLL(binary.__file__)

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
                    made = self._make(call, way)
                    found = [x.detach().float() for x in tree_leaves(made()) if x is not None]
                    row |= self._launches()
                    first = first or found
                    if self.mode == "timed":
                        row["differs"] = max(map(_differ, found, first))
                        timed |= _graphs(label, made, call)
            except Exception as error:  # a GPU may have no room for a way
                row["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if timed:
            for (label, kind), spread in interleave(timed, SECONDS).packed().items():  # type: ignore[misc]
                rows[label][kind] = spread
        for row in rows.values():
            if self.mode != "warm":
                self.say(**row)

    # ---- calls

    def _draw(self, *sizes: int, dtype: str, scale: float = 0.7) -> Tensor:
        """Numbers that saturate nothing; on the mock runtime, which reads none, just memory."""
        if self._mocks:
            return torch.empty(sizes, dtype=getattr(torch, dtype))
        return (torch.randn(sizes, device="cuda") * scale).to(getattr(torch, dtype))

    def _make(self, call: Call, way: Way) -> Callable[[], Any]:
        """The call, its inputs drawn."""
        from entry_points import attend_backward, attention

        decodes = "decoder" in call.what
        sizes = [*call.sizes, call.values or call.sizes[3]]
        if self.dry and not self._mocks:
            sizes = [*map(min, sizes, (1, 2 if decodes else 17, 17, 17, 17))]
        batch, queries, keys, hidden, columns = sizes
        if decodes:
            return self._decoder(call, batch, queries, keys, hidden)
        draw = partial(self._draw, dtype=call.dtype)
        shapes = (batch, queries, hidden), (batch, keys, hidden), (batch, keys, columns)
        inputs = *(draw(*shape) for shape in shapes), draw(1, hidden, scale=hidden**-0.5)
        more: dict[str, Any] = {"narrow": call.dtype != "float32"}
        if "without weights" in call.what:
            more["need_weights"] = False
        if call.what == "step":
            more["w_q"] = draw(hidden, hidden, scale=hidden**-0.5)
        if "32 features" in call.what:
            more |= {"features": draw(batch, keys, 32), "w_f": draw(hidden, 32, scale=0.1)}
        forward = partial(attention, self._operator(way.backend), *inputs, **more)
        if call.what != "backward":
            return forward
        context, weights = forward()
        grads = (draw(*x.shape) for x in (context, weights))
        return partial(attend_backward, self._operator(way.backend), *inputs, None, weights, *grads)

    def _operator(self, backend: str) -> Callable[..., Any]:
        """Runs an operator by its name."""
        if self._mocks:
            return self._mock.operator  # type: ignore[no-any-return]
        return lambda name, *given: operators[name].kernel(backend)(*given)

    def _decoder(
        self, call: Call, batch: int, steps: int, keys: int, hidden: int
    ) -> Callable[[], Any]:
        """All steps of AttentionGRU, and the gradients of everything."""
        dtype = "float32" if self.dry else call.dtype  # the CPU's operators know no 16 bits
        if self.dry:  # what the call itself would have been
            rows, _, others, units = call.sizes
            why = self._mock.why_not_decode(False, True, rows, others, *[units] * 3, 0, 0)
            self._noted.append(["one launch", why])
        module = bf.AttentionGRU(32, hidden).to("cuda", getattr(torch, dtype))
        shapes = (steps, batch, 32), (batch, keys, hidden)
        inputs, memory = (self._draw(*s, dtype=dtype).requires_grad_() for s in shapes)
        asked = [inputs, memory, *module.parameters()]

        def both() -> tuple[Tensor, ...]:
            outputs = module(inputs, None, memory)[0]
            return outputs, *torch.autograd.grad(outputs, asked, torch.ones_like(outputs))

        return both

    # ---- a dry run

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

    def _launches(self) -> dict[str, Any]:
        """In a dry run, what was launched since the last time."""
        if self._mock is None:
            return {}
        from mock_cuda import kernel_of, launches

        keys = ("grid", "block", "cluster", "shared")
        for one in launches(self._mock.calls()):
            self._noted.append([kernel_of(one), *(one[key] for key in keys)])
        noted, self._noted = self._noted, []
        return {"launches": noted}


def constant(lab: Lab, name: str) -> None:
    """Everything that decides a constant."""
    measure.PAUSE_SECONDS = 1e-3  # no threads of a processor have to go to sleep
    for sweep in SWEEPS:
        if sweep.constant == name:
            with lab.there(sweep):
                for call in lab.some(sweep.calls):
                    lab.race(sweep, call)


def _cut(plan: Callable[..., Any], tile: dict[str, int], *sizes: Any) -> Any:
    """What a function of plans.py gives, with another tile."""
    found, tile = plan(*sizes), dict(tile)
    if isinstance(found, dict):
        return found | tile
    hidden, split = sizes[3:]  # of terms
    splits = tile.pop("splits") if split else 1
    quads = -(-hidden // (8 * splits)) * 2 * splits
    return found._replace(quads=quads, splits=splits, blocks=found.blocks | tile)


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
