"""csrc/cuda on a pretended GPU, for ``bahdanau-fast check``: whoever runs its operators.

On the mock of the runtime its plan says what it would launch, so what is of which family.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pretended
import torch
from mock_cuda import kernel_of, launches, mock
from torch.utils._python_dispatch import _disable_current_modes

from bahdanau_fast import switches
from bahdanau_fast.backends import availability
from bahdanau_fast.ops.operator import operators

__all__ = ["NAMES", "aside", "family_of", "launched", "on_cpu", "served"]

#: The families of CUDA C++.
NAMES = "cuda", "clusters", "one-launch"
# Operators of all steps of a decoder, which the CPU has in fp32, and their results in fp32.
DECODE = {"decode": 4, "decode_backward": 5, "decode_greedy": 1, "attend_backward_keys": None}
ATTEND = "attention", "attention.recorded", "attention_backward"


@contextmanager
def aside():
    """Inside, tensors are on the CPU, as they are."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def launched(name, *args):
    """By an operator of csrc/cuda, in a capture."""
    gpu = mock()
    gpu.calls()
    clusters = gpu.without_clusters() if switches.is_off("clusters") else nullcontext()
    with aside(), clusters, gpu.capture(gpu.new_stream()):
        gpu.operator(name, *args)
    return launches(gpu.calls())


def family_of(made):
    """Of launches."""
    if any(kernel_of(x).startswith("persistent") for x in made):
        return "one-launch"
    return "clusters" if any(x["cluster"] > 1 for x in made) else "cuda"


def on_cpu(name, run, args):
    """Results of the CPU's operator."""
    if name not in DECODE:
        return run(*args)
    named = operators[name].named(*args)
    dtype = named["keys"].dtype
    for each, x in named.items():
        if getattr(x, "dtype", None) is dtype:
            named[each] = x.float()
        elif each == "left_out":  # empty, and on the CPU, for the GPU too
            named[each] = x.cuda()
    return tuple(
        x.to(dtype) if place != DECODE[name] and x.is_floating_point() else x
        for place, x in enumerate(run(*named.values()))
    )


def _one_launch_problem(_, lstm, backward, sizes):
    tokens = () if len(sizes) > 5 else (0, 0)
    return switches.why_off("one-launch") or mock().why_not_decode(lstm, backward, *sizes, *tokens)


@contextmanager
def served(by):
    """Inside, calls on a pretended GPU are served by ``by(name, the CPU's operator, *args)``."""
    with ExitStack() as stack:
        stack.enter_context(pretended.gpu("cuda"))
        stack.enter_context(patch.object(availability, "one_launch_problem", _one_launch_problem))
        for name in ATTEND:
            run = partial(by, name, operators[name].now)
            stack.enter_context(patch.dict(operators[name].in_python, cuda=run))
        for name in DECODE:
            run = partial(by, name, operators[name].now)
            stack.enter_context(patch.object(operators[name], "now", run))
        mock().new_gpu()
        yield
