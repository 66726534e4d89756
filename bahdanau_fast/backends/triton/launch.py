"""Decide once, then only launch: the steps of an operator call are noted when it is made again.

An operator of this backend is a function of :class:`Steps` and of its arguments. It checks and
plans, and has its steps make tensors and launch kernels. A call with the key of an earlier one
repeats the steps that were noted then: equal keys have equal checks, equal plans, and compiled
kernels that Triton would choose again, so nothing else is checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from bahdanau_fast import switches

#: Plans that are cached, of all operators together; then they begin anew.
MOST_PLANS = 4096

_NUMBERS = frozenset((int, float, bool))
# What torch.backends.cuda.matmul.fp32_precision reads.
_precision = torch._C._get_fp32_precision_getter
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_runtime, _compilation = triton.knobs.runtime, triton.knobs.compilation
_ON_AMD = torch.version.hip is not None


class Plan(NamedTuple):
    """The steps of calls of one kind. Its tensors are slots of a list that begins with arguments.

    A step makes a tensor (function, picks its arguments or None, its slot, None) or launches (what
    runs a kernel, picks its arguments, the grid, what Triton is told beside it). Last in either are
    the slots of tensors that no later step reads: their memory is free again.
    """

    blank: tuple[Any, ...]  # behind the arguments: a slot per new tensor, then numbers
    steps: tuple[tuple[Any, ...], ...]
    results: Callable[[list[Any]], Any]  # picks them
    gpu: int  # its number; -1 of other devices
    stream: Callable[[Any], Any]  # the current one of ``device``
    device: Any  # as Triton's driver names it
    kernels: tuple[CompiledKernel, ...]  # they are unloaded with their last reference


#: By the key of a call; None after the first, which many sizes have no second of.
plans: dict[tuple[Any, ...], Plan | None] = {}


class PlanCache:
    """An operator from its function of :class:`Steps`; takes all arguments, in order.

    The first argument is in fp32 where an fp32 product may be made.
    """

    def __init__(self, operator: Callable[..., Any]) -> None:
        self._operator, self.__doc__ = operator, operator.__doc__

    def __call__(self, *args: Any) -> Any:
        """An eager call."""
        single = args[0].dtype is torch.float32
        key = [self, torch._C._is_any_autocast_enabled(), single and _precision("cuda", "matmul")]
        try:
            for x in args:
                if x is None or x.__class__ in _NUMBERS:
                    key.append(x)
                else:
                    key += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
                    if _ON_AMD:  # Triton goes by it
                        key.append(x.untyped_storage().nbytes() >> 31 > 0)
        except (AttributeError, RuntimeError):  # no dense tensor: to be refused
            return self._planned(None, args)
        plan = plans.get(tuple(key))
        if plan is None or _is_watched():
            return self._planned(tuple(key), args)
        if plan.gpu >= 0 and plan.gpu != _current_device():
            with torch.cuda.device(plan.gpu):
                return self(*args)
        tensors = [*args, *plan.blank]
        stream = plan.stream(plan.device)
        for function, pick, target, beside, read in plan.steps:
            if beside is not None:
                function(*target, stream, *beside, *pick(tensors))
            else:
                tensors[target] = function() if pick is None else function(*pick(tensors))
            for at in read:
                tensors[at] = None
        return plan.results(tensors)

    def _planned(self, key: tuple[Any, ...] | None, args: tuple[Any, ...]) -> Any:
        """A call that is checked and planned; one that is watched may have other kernels."""
        key = None if _is_watched() or switches.is_off("kept-launches") else key
        again = key in plans
        steps = Recorder(args) if again else Steps(args)
        # Triton launches on the current device.
        on_gpu = steps.device.type == "cuda"
        with torch.cuda.device(steps.device) if on_gpu else nullcontext():
            results = self._operator(steps, *steps.args)
            plan = steps.plan(results) if isinstance(steps, Recorder) else None
        if key is not None:
            if len(plans) >= MOST_PLANS and not again:
                plans.clear()
            plans[key] = plan
        return results

    def traced(self, *args: Any) -> Any:
        """The same in code that is compiled: its launches become part of it."""
        return self._operator(TracingSteps(args), *args)


def _is_watched() -> bool:
    """Whether a profiler of Triton wants to know of launches, or has kernels instrumented."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooked or _compilation.instrumentation_mode)


class Steps:
    """Runs the steps of a call with such arguments."""

    #: What no step reads any more may be written to.
    in_place = True

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.device = args, args[0].device
        self._autocast = torch._C._is_any_autocast_enabled()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor beside the arguments, of the type computed in unless told."""
        return self.make(partial(torch.empty, shape, dtype=dtype, device=self.device))

    def none(self, dtype: torch.dtype) -> Tensor:
        """(0,), for a result that a call does not have."""
        return self.new(0, dtype=dtype)

    def make(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """What a function makes of tensors of these steps, perhaps in place, and of numbers."""
        if self._autocast and args:
            function = partial(_without_autocast, function)
        result = function(*args)
        self._note(function, args, result)
        return result

    def _note(self, function: Callable[..., Tensor], args: Any, result: Tensor) -> None:
        pass

    def launch(self, kernel: Any, *grid: int, **args: Any) -> None:
        """Launch a kernel with tensors of these steps and numbers, all by name."""
        kernel[grid](**args)


class TracingSteps(Steps):
    """The same in code that is compiled, which wants each tensor to be written once."""

    in_place = False

    def launch(self, kernel: Any, *grid: int, **args: Any) -> None:
        """The same, for the compiler to see."""
        torch.library.wrap_triton(kernel)[grid](**args)


class _Slot(int):
    """A tensor in noted arguments, by its index among those of a plan."""


class Recorder(Steps):
    """Notes the steps that it runs; holds no tensor longer than these do."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__(args)
        self._tensors: list[weakref.ref[Tensor] | None] = []
        self._slots: dict[int, int] = {}  # by id, which may be that of one that is gone
        self._steps: list[tuple[Any, ...]] = []
        self._kernels: list[CompiledKernel] = []
        self._none: dict[torch.dtype, Tensor] = {}
        self._repeats = True
        held = []
        for x in args:  # another tensor for one that is passed twice, as the next call may not
            held.append(x.detach() if id(x) in self._slots else x)
            self._add(held[-1])
        self.args = tuple(held)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same, by the quickest function for it."""
        strides = torch.empty(shape, device="meta").stride()
        how: dict[str, Any] = {"dtype": dtype, "device": self.device}
        return self.make(partial(torch.empty_strided, shape, strides, **how))

    def _add(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self._slots[id(x)] = len(self._tensors)
        self._tensors.append(weakref.ref(x) if isinstance(x, Tensor) else None)

    def _noted(self, x: Any) -> Any:
        """The slot of a tensor, a new one if it was not seen before; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        ref = self._tensors[self._slots[id(x)]] if id(x) in self._slots else None
        if ref is None or ref() is not x:
            self._add(x)
        return _Slot(self._slots[id(x)])

    def none(self, dtype: torch.dtype) -> Tensor:
        """The same for all results of a dtype that a call does not have."""
        if dtype not in self._none:
            self._none[dtype] = super().none(dtype)
        return self._none[dtype]

    def _note(self, function: Callable[..., Tensor], args: Any, result: Tensor) -> None:
        read = tuple(map(self._noted, args))
        self._steps.append((function, read, self._noted(result), None))

    def launch(self, kernel: Any, *grid: int, **args: Any) -> None:
        """The same, noted with what Triton has chosen."""
        compiled = kernel[grid](**args)
        if not isinstance(compiled, CompiledKernel):  # interpreted, or not launched
            self._repeats = False
            return
        self._kernels.append(compiled)
        named = tuple(self._noted(args[name]) for name in kernel.arg_names)
        beside = compiled.function, compiled.packed_metadata, None, None, None
        self._steps.append((compiled.run, named, (*grid, 1, 1)[:3], beside))

    def plan(self, results: Any) -> Plan | None:
        """The steps as a plan; None where they cannot be repeated."""
        if not (self._repeats and self._kernels):
            return None
        numbers: list[Any] = []

        def pick(noted: Any) -> Callable[[list[Any]], Any] | None:
            slots = []
            for x in noted:
                slots.append(x if type(x) is _Slot else len(self._tensors) + len(numbers))
                if type(x) is not _Slot:
                    numbers.append(x)
            if len(slots) == 1:
                return itemgetter(slice(slots[0], slots[0] + 1))
            return itemgetter(*slots) if slots else None

        several = not isinstance(results, Tensor)
        wanted = [self._noted(x) for x in (results if several else (results,))]
        last: dict[int, int] = {}  # the last step that has a tensor
        for number, (_, noted, target, _) in enumerate(self._steps):
            last |= {x: number for x in (*noted, target) if type(x) is _Slot}
        read: list[list[int]] = [[] for _ in self._steps]
        for slot in last.keys() - {*wanted, *range(len(self.args))}:
            read[last[slot]].append(slot)
        steps = tuple(
            (function, pick(noted), *rest, tuple(done))
            for (function, noted, *rest), done in zip(self._steps, read, strict=True)
        )
        driver = triton.runtime.driver.active
        blank = [None] * (len(self._tensors) - len(self.args))
        gpu = self.device.index if self.device.type == "cuda" else -1
        return Plan(
            (*blank, *numbers), steps, itemgetter(*wanted), gpu, driver.get_current_stream,
            driver.get_current_device(), tuple(self._kernels),
        )  # fmt: skip


def _without_autocast(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """What a function makes in the dtype of its arguments."""
    with torch.autocast(x.device.type, enabled=False):
        return function(x, *args)


def precision() -> str:
    """PRECISION of fp32 products for `product` of the kernels: TF32 where the user allows it."""
    # Not allow_tf32: torch raises at reading it once a user has set the newer fp32_precision. This
    # one knows what was set by either, and by torch.set_float32_matmul_precision.
    return "tf32" if _precision("cuda", "matmul") == "tf32" else "ieee"
