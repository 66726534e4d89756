"""``make gpu-hour DRY=1``: what stands for a GPU in each experiment, and the smallest sizes."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

import bahdanau_fast as bf
from benchmarks import gpu, measure
from benchmarks.decoders import Setting
from benchmarks.gpu import hour, lab, user

TINY = {
    "decoder": Setting(3, 5, 4, 4, 8, 1, 20),
    "chapter": Setting(2, 4, 3, 4, 8, 2, 20),
    **dict.fromkeys(("call", "host"), (2, 1, 5, 8)),
    **{"tacotron": (2, 9, 6, 5, 8, 2, 3), "captioner": (2, 6, 5, 8), "compiled": 1},
}


def machine():
    """What stands for a GPU, built; and the line that says so."""
    from mock_cuda import mock

    mock()
    gpu.machine("cpu", "no GPU: a dry run")


def user_rows(device, pattern):
    """The first of what a user feels, small."""
    user.SIZES, measure.GPU_SECONDS = TINY, 1e-3
    measure.SAMPLE_SECONDS, measure.PAUSE_SECONDS = 1e-4, 0.0
    return hour.felt(device, pattern)[:1]


class Dry(lab.Lab):
    """Each call is made once, and its launches are noted.

    Calls of CUDA C++ alone go to the mock runtime, all others, smaller, to Triton's interpreter
    and the CPU's kernels.
    """

    def __init__(self):
        from mock_cuda import mock

        super().__init__("dry")
        self._mock, self._mocks, self._noted = mock(), False, []

    @contextmanager
    def there(self, sweep):
        self._mock.new_gpu()
        self._mocks = {way.backend for way in sweep.ways.values()} == {"cuda"}
        with ExitStack() as stack:
            if not self._mocks:
                bf.backends.why_not("triton")  # loads it
                stack.enter_context(self._interpreted())
            yield

    def _interpreted(self):
        """Inside, launches of Triton's interpreter are noted."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def noted(kernel, *given, **named):
            told = {name: x for name, x in named.items() if x is None or type(x) is int}
            self._noted.append([kernel.fn.__name__, told])
            return run(kernel, *given, **named)

        return patch.object(InterpretedFunction, "run", noted)

    def library(self):
        return self._mock._library

    def operator(self, backend):
        return self._mock.operator if self._mocks else super().operator(backend)

    def like(self, call):
        if self._mocks:
            return call
        sizes = tuple(map(min, call.sizes, (1, 17, 17, 17)))
        return call._replace(sizes=sizes, values=min(call.values, 17))

    def draw(self, *sizes, dtype, scale=0.7):
        if self._mocks:  # whose runtime reads no numbers
            return torch.empty(sizes, dtype=getattr(torch, dtype))
        return (torch.randn(sizes) * scale).to(getattr(torch, dtype))

    def seen(self):
        from mock_cuda import kernel_of, launches

        keys = ("grid", "block", "cluster", "shared")
        mocked = launches(self._mock.calls())
        found = [*self._noted, *([kernel_of(one), *(one[key] for key in keys)] for one in mocked)]
        self._noted.clear()
        return {"launches": found}
