"""csrc/cuda for ``bahdanau-fast check``: what it would launch, and what computes it instead.

On the mock of the runtime its plan says what it would launch, so what is of which family.
"""

from contextlib import contextmanager, nullcontext

from host_only import routed
from mock_cuda import kernel_of, launches, mock

from bahdanau_fast import switches
from bahdanau_fast.ops.operator import operators

#: The families of CUDA C++.
NAMES = "cuda", "clusters", "one-launch"
# Operators of all steps of a decoder, which the CPU has in fp32, and their results in fp32.
DECODE = {"decode": 4, "decode_backward": 5, "decode_greedy": 1, "attend_backward_keys": None}


def launched(name, *args):
    """By an operator of csrc/cuda, in a capture."""
    gpu = mock()
    gpu.calls()
    clusters = gpu.without_clusters() if switches.is_off("clusters") else nullcontext()
    with clusters, gpu.capture(gpu.new_stream()):
        gpu.operator(name, *args)
    return launches(gpu.calls())


def family_of(made):
    if any(kernel_of(x).startswith("persistent") for x in made):
        return "one-launch"
    return "clusters" if any(x["cluster"] > 1 for x in made) else "cuda"


def on_cpu(name, run, args):
    if name not in DECODE:
        return run(*args)
    named = operators[name].named(*args)
    dtype = named["keys"].dtype
    wide = (x.float() if getattr(x, "dtype", None) is dtype else x for x in named.values())
    return tuple(
        x.to(dtype) if place != DECODE[name] and x.is_floating_point() else x
        for place, x in enumerate(run(*wide))
    )


@contextmanager
def served(by):
    """Inside, calls on a GPU are served by ``by(name, the CPU's operator, *args)``."""
    with routed("cuda", by):
        mock().new_gpu()
        yield
