"""A GPU where there is none, for the tests that need one: CPU tensors that say they are on it.

What is shown here is that such a test is right: its tensors are on one device, its arguments fit,
its numbers agree. Kernels are the CPU's, or Triton's in its interpreter; those of a GPU, streams
and graphs have no part in it.
"""

import threading
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import cells
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from bahdanau_fast import backends
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.ops.operator import operators

__all__ = ["gpu"]

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
PLACES = (str, torch.device)
RECURRENT = ("gru", "lstm")


class _Memory:
    """Which memory is on the GPU. Weak references keep an address from being used again."""

    def __init__(self):
        self._held = {}

    def take(self, x):
        storage = _storage(x)
        self._held[storage._cdata] = StorageWeakRef(storage)

    def has(self, x):
        return _storage(x)._cdata in self._held


class _Operations(TorchDispatchMode):
    """An operation has its tensors in one place, but for numbers, and its results there."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {self.memory.has(x) for x in given if x.dim()}
        if len(places) > 1 and func is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func}: tensors must be on one device, got cuda:0 and cpu")
        own = operators.get(func.name().removeprefix("bahdanau_fast::"))
        on_gpu = any(map(self.memory.has, given))
        in_python = own is not None and availability.interpreted() and "triton" in own.in_python
        if in_python and on_gpu:  # and asks for devices, too
            with _Operations(self.memory), _Functions(self.memory):
                results = own.in_python["triton"](*own.named(*args, **(kwargs or {})).values())
        else:
            results = func(*args, **(kwargs or {}))
        if on_gpu:
            tree_map_only(torch.Tensor, self.memory.take, results)
        return results


class _Functions(TorchFunctionMode):
    """What asks for a device, or what device a tensor has."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, has = dict(kwargs or {}), self.memory.has
        if getattr(func, "__name__", "") == "__get__" and func.__self__ in _SAID:
            return _SAID[func.__self__](has(args[0]))
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return self._moved(args[0], func is torch.Tensor.cuda)
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and has(args[0]):
            raise TypeError("cuda:0 tensors must be copied to the host for numpy")
        if getattr(func, "__name__", "") in RECURRENT and has(args[0]):
            args = tree_map_only(torch.Tensor, _as_cudnn_reads, args)
        if kwargs.get("device") is None:
            made = func(*args, **kwargs)
            if func is torch.Tensor.new and has(args[0]):
                self.memory.take(made)
            return made
        on_gpu = _is_gpu(kwargs["device"])
        drawn_by = kwargs.get("generator")
        if drawn_by is not None and getattr(drawn_by, "on_gpu", False) != on_gpu:
            raise RuntimeError("generator must be on the device of what it draws")
        made = func(*args, **{**kwargs, "device": CPU})
        if any(isinstance(x, torch.Tensor) for x in args):  # like another
            return self._moved(made, on_gpu)
        if on_gpu:
            self.memory.take(made)
        return made

    def _to(self, x, *args, **kwargs):
        given = [*args, kwargs.get("device")]
        where = [_is_gpu(y) for y in given if isinstance(y, PLACES)]
        where += [self.memory.has(y) for y in args if isinstance(y, torch.Tensor)]
        kwargs = {name: CPU if name == "device" else y for name, y in kwargs.items()}
        x = x.to(*tree_map_only(PLACES, lambda _: CPU, args), **kwargs)
        return self._moved(x, where[0]) if where else x

    def _moved(self, x, to_gpu):
        return x if self.memory.has(x) == to_gpu else _Move.apply(x, to_gpu, self.memory)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to_gpu, memory):
        ctx.rest = to_gpu, memory
        return _copy(x, to_gpu, memory)

    @staticmethod
    def backward(ctx, grad):
        to_gpu, memory = ctx.rest
        return _copy(grad, not to_gpu, memory), None, None


class _Generator(torch.Generator):
    """One that says where it is."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made.on_gpu = _is_gpu(device)
        return made


class _Stream:
    """Work is done when it is asked for."""

    def synchronize(self):
        pass


def _storage(x):
    with torch._C.DisableTorchFunctionSubclass():  # a parameter without a size has one, too
        return x.untyped_storage()


def _copy(x, to_gpu, memory):
    with _disable_current_modes():
        made = x.detach().clone()
    if to_gpu:
        memory.take(made)
    return made


def _as_cudnn_reads(x):
    """fp32 in TF32, unless that is off; gradients as if it were."""
    if x.dtype != torch.float32 or torch.backends.cudnn.rnn.fp32_precision != "tf32":
        return x
    return x + ((x.detach().view(torch.int32) & -(1 << 13)).view(x.dtype) - x.detach())


def _is_gpu(device):
    return str(device).startswith("cuda")


_SAID = {
    torch.Tensor.device: lambda on_gpu: GPU if on_gpu else CPU,
    torch.Tensor.is_cpu: lambda on_gpu: not on_gpu,
    torch.Tensor.is_cuda: bool,
}


@contextmanager
def _launches(memory):
    """Kernels of Triton's interpreter read what is on the GPU, and nothing else."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def checked(kernel, *args, **kwargs):
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and not memory.has(x):
                raise ValueError("a kernel on the GPU cannot read a tensor of the CPU")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return run(kernel, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", checked):
        yield


@contextmanager
def gpu(*kernels):
    """Inside, there is a GPU, of an H100's limits.

    Args:
        *kernels: backends that serve its tensors: "cuda", whose operators the CPU's kernels stand
            in for, or "triton", in its interpreter.
    """
    memory, why_not = _Memory(), backends.why_not
    engine, run = torch.autograd._engine_run_backward, threading.Thread.run

    def within(function, *args, **kwargs):  # where torch, or a new thread, has left the modes
        with _Operations(memory), _Functions(memory):
            return function(*args, **kwargs)

    def missing(name):
        if name in ("cuda", "triton") and name not in kernels:
            return "it is not pretended"
        return None if name == "cuda" else why_not(name)

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    changes = (
        (backends, "why_not", missing),
        (TRITON, "device", "cuda"),
        (torch, "Generator", _Generator),
        (torch.autograd, "_engine_run_backward", lambda *a, **k: within(engine, *a, **k)),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "synchronize", lambda *_: None),
        (threading.Thread, "run", lambda thread: within(run, thread)),
    )
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        stack.enter_context(cells.on_the_cpu())
        if "triton" in kernels:
            stack.enter_context(_launches(memory))
        stack.enter_context(_Operations(memory))
        stack.enter_context(_Functions(memory))
        yield
