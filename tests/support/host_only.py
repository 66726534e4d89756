"""A GPU's host without the GPU: calls with CPU tensors take the route of an H100.

The Python and C++ of a call are those of a GPU, Triton's own included; its launches do nothing, and
results are what memory held, unless others compute them. Left out are the driver, the guard of the
current device, and the thread in which a GPU's backward runs. Added is a C function (``partial``)
around each operator of CUDA C++; torch's cells are plain PyTorch.
"""

import functools
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import cells
import torch
from mock_cuda import mock
from triton_target import target_is

from bahdanau_fast import backends
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import TRITON, launch, register  # noqa: F401  loads the kernels
from bahdanau_fast.ops.operator import operators


class _Device(str):
    """To Python the device of a GPU; to torch, which asks for a device or its name, the CPU."""

    type, index = "cuda", -1  # whichever is the current one


# What is asked of a GPU and of torch is asked once; routes and plans stay from call to call.
_there, _left_out = functools.cache(lambda: None), functools.cache(lambda: "it is left out")
_gpu = functools.cache(lambda: mock().new_gpu())
_routes, _plans = defaultdict(dict), {}


@contextmanager
def routed(backend, computed=None):
    """Inside, calls with CPU tensors are those of a GPU with one backend, "cuda" or "triton".

    Triton launches in its interpreter where that is asked for. Operators of CUDA C++ are served by
    ``computed(name, the CPU's operator, *arguments)``, if given, else by the mock runtime.
    """
    changes = [
        (torch.Tensor, "is_cpu", False),  # shadows what it inherits
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "device", _Device("cpu")),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)),
        (backends, "_routes", _routes[backend]),
        (launch, "plans", _plans),
        (TRITON, "device", "cuda"),
        (availability, "cuda_problem", _there if backend == "cuda" else _left_out),
        (availability, "triton_problem", _there if backend == "triton" else _left_out),
    ]
    with ExitStack() as stack:
        stack.enter_context(cells.on_the_cpu())
        if backend == "cuda":
            stack.callback(mock().note, True)
            stack.callback(mock().use_gpu, mock().device)
            mock().use_gpu(_gpu())
            mock().note(computed is not None)
            for name, operator in operators.items():
                call = partial(operator.overload._op_dk, torch._C.DispatchKey.CUDA)
                if computed is not None:
                    call = partial(computed, name, operator.now)
                changes.append((operator, "now", call))
            binary = SimpleNamespace(why_not_decode=mock().why_not_decode)
            stack.enter_context(patch.dict(sys.modules, {"bahdanau_fast._C_cuda": binary}))
        if not availability.interpreted():
            stack.enter_context(target_is("sm_90"))
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield
