"""csrc/cuda for ``bahdanau-fast check``: what it launches, and so of which family that is."""

from contextlib import contextmanager, nullcontext

from host_only import routed
from mock_cuda import kernel_of, launches, mock

from bahdanau_fast import switches

#: The families of CUDA C++.
NAMES = "cuda", "clusters", "one-launch"


def called(name, *args):
    """What an operator of csrc/cuda gives in a capture, where nothing runs, and its launches."""
    gpu = mock()
    gpu.calls()
    clusters = gpu.without_clusters() if switches.is_off("clusters") else nullcontext()
    with clusters, gpu.capture(gpu.new_stream()):
        results = gpu.operator(name, *args)
    return results, launches(gpu.calls())


def family_of(made):
    if any(kernel_of(x).startswith("persistent") for x in made):
        return "one-launch"
    return "clusters" if any(x["cluster"] > 1 for x in made) else "cuda"


@contextmanager
def served(by):
    """Inside, calls on a GPU are served by ``by(name, the CPU's operator, *args)``."""
    with routed("cuda", by):
        mock().new_gpu()
        yield
