"""Calls on a GPU in a CUDA graph; where there is no GPU, all of it but the calls of the runtime.

There tensors on the meta device, which have no data, stand for those of a GPU: as the GPU has
computed nothing while a graph is captured, nothing may look at what they hold, go by it, or copy it
to the CPU. Nor may anything come from there: a graph would read that memory at each replay.
Launches of Triton are noted, and not made; operators of csrc/cuda give results without data, and
tests/cuda/mock captures them on a mock of the runtime.
"""

import importlib
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from unittest.mock import patch

import cells
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bahdanau_fast import backends
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.ops import decode_arguments
from bahdanau_fast.ops.operator import apart, operators

GPU = torch.device("cuda" if torch.cuda.is_available() else "meta")
if GPU.type == "cuda":
    backends.available()  # loads them, CUDA C++ first
else:
    importlib.import_module("bahdanau_fast.backends.triton.register")


def captured(there, call, leaves, same=True, recorded=(False, True)):
    """Captures a call; replayed on new data, it gives what it gives without a graph.

    Args:
        there: the backends that are there, of "cuda" and "triton".
        call: gives tensors, or None among them.
        leaves: the tensors of GPU that it reads and that want a gradient.
        same: False where something is drawn, and no two calls give the same.
        recorded: without gradients, with backward, or both, one after the other.

    Returns the operators and Triton's kernels that ran, by name; None on a GPU, where kernels run.
    """
    if GPU.type == "meta":
        with capturing(*there) as ran:
            for records in recorded:
                results(call, leaves, records)
        return ran
    with patch.object(backends, "why_not", lambda name: None if name in there else "left out"):
        for records in recorded:
            replayed(partial(results, call, leaves, records), leaves, same)
    return None


def results(call, leaves, records):
    """Outputs and, of a recorded call, gradients."""
    with torch.set_grad_enabled(records):
        outputs = [x for x in call() if x is not None]
    if not records:
        return outputs
    loss = sum(x.float().square().sum() for x in outputs)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(x for x in grads if x is not None)]


def replayed(function, leaves, same):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is loaded and tried out at a first call
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = function()
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        if same:  # sums in an order that atomics change: some hundred roundings of fp32
            torch.testing.assert_close(got, function(), rtol=1e-4, atol=1e-4)
        assert all(x.isfinite().all() for x in got)


# ---- without a GPU ----


class _Capture(TorchDispatchMode):
    """Notes operators of this package, and refuses what is on the CPU."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        refuse_cpu(func, args, kwargs, results)
        if func.namespace == "bahdanau_fast":
            self.ran.append(func._opname)
        return results


def launch(kernel, ran, *args, **kwargs):
    refuse_cpu(kernel, args, kwargs)
    ran.append(kernel.__name__)


def by_triton(operator, *args, **kwargs):
    return apart(operator.in_python["triton"](*operator.named(*args, **kwargs).values()))


def refuse_cpu(function, *given):
    for x in tree_leaves(given):
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            raise RuntimeError(f"a graph cannot capture {function}: a tensor is on the CPU")


def of_numbers(*_, **__):
    raise RuntimeError("a graph cannot capture a tensor that is made of numbers in Python")


@contextmanager
def capturing(*there):
    """Inside, calls with tensors of "meta" take the way of an H100, and what is refused raises.

    Gives the operators and Triton's kernels that ran, by name; ``there`` as for ``captured``.
    """
    there = tuple(map(backends.BACKENDS.get, (*there, "reference")))
    by, decoder, choose = backends.route, backends.route_decoder, backends.choose_backend

    def route(facts, step):
        return by(facts._replace(device="cuda"), step)

    def choose_backend(requested, _, *rest):
        return choose(requested, "cuda", *rest)

    capture = _Capture()
    on_gpu = torch.library.Library("bahdanau_fast", "IMPL")
    with ExitStack() as stack:
        stack.callback(on_gpu._destroy)
        for name, operator in operators.items():
            if TRITON in there and "triton" in operator.in_python:
                on_gpu.impl(name, partial(by_triton, operator), "Meta", allow_override=True)
        for change in (
            (backends, "_routes", {}),
            (backends, "_available", lambda *_: there),
            (backends, "route", route),
            (backends, "route_decoder", lambda facts: decoder(facts._replace(device="cuda"))),
            (backends, "choose_backend", choose_backend),
            (availability, "one_launch_problem", lambda *_: None),
            (triton.JITFunction, "run", partialmethod(launch, capture.ran)),
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            *((torch, name, of_numbers) for name in ("tensor", "as_tensor")),
        ):
            stack.enter_context(patch.object(*change))
        stack.enter_context(patch.dict(decode_arguments.MULTIPLES, meta=32))
        stack.enter_context(cells.on_the_cpu("Meta"))
        stack.enter_context(capture)
        yield capture.ran
