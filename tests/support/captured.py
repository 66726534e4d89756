"""A capture in a CUDA graph where there is no GPU, of everything but the runtime's calls.

Tensors on the meta device, which have no data, stand for those of a GPU: as the GPU has computed
nothing while a graph is captured, nothing may look at what they hold, go by it, or copy it to the
CPU. Nor may anything come from there: a graph would read that memory at each replay. Launches of
Triton are noted, and not made; operators of csrc/cuda give results without data, and
tests/cuda/mock captures them on a mock of the runtime.
"""

from contextlib import ExitStack, contextmanager
from functools import partialmethod
from unittest.mock import patch

import cells
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bahdanau_fast.backends.triton  # noqa: F401  its functions are operators' in_python
from bahdanau_fast import backends, limits
from bahdanau_fast.ops.operator import operators

__all__ = ["GPU", "capturing"]

GPU = torch.device("meta")


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


def refuse_cpu(function, *given):
    for x in tree_leaves(given):
        if isinstance(x, torch.Tensor) and x.device != GPU:
            raise RuntimeError(f"a graph cannot capture {function}: a tensor is on the {x.device}")


def of_numbers(*_, **__):
    raise RuntimeError("a graph cannot capture a tensor that is made of numbers in Python")


@contextmanager
def capturing(*there):
    """Inside, calls with tensors of GPU take the way of a GPU, an H100, and what is refused raises.

    Args:
        *there: the backends that are there, of "cuda" and "triton".

    Yields:
        The operators and Triton's kernels that ran, by name.
    """
    there = *there, "reference"
    by, decoder, choose = backends.route, backends.route_decoder, backends.choose_backend

    def route(facts, _):
        return by(facts._replace(device="cuda", there=there), limits.GPU_FAMILIES["sm_90"])

    def choose_backend(asked, _, dtype, __, *rest, **options):
        return choose(asked, "cuda", dtype, there, *rest, **options)

    capture = _Capture()
    on_gpu = torch.library.Library("bahdanau_fast", "IMPL")
    with ExitStack() as stack:
        stack.callback(on_gpu._destroy)
        for name, operator in operators.items():
            if "triton" in there and "triton" in operator.in_python:
                on_gpu.impl(name, operator.in_python["triton"], "Meta", allow_override=True)
        for change in (
            (backends, "_routes", {}),
            (backends, "route", route),
            (backends, "route_decoder", lambda facts: decoder(facts._replace(device="cuda"))),
            (backends, "choose_backend", choose_backend),
            (triton.JITFunction, "run", partialmethod(launch, capture.ran)),
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            *((torch, name, of_numbers) for name in ("tensor", "as_tensor")),
        ):
            stack.enter_context(patch.object(*change))
        stack.enter_context(cells.on_the_cpu("Meta"))
        stack.enter_context(capture)
        yield capture.ran
