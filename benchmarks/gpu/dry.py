"""A dry run: each call is made once, without a GPU, and its launches are noted.

Calls of CUDA C++ alone go to the mock runtime, all others, smaller, to a pretended GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pretended
import torch
from mock_cuda import kernel_of, launches, mock
from torch import Tensor

import bahdanau_fast as bf

from . import lab
from .constants import Call, Sweep


class Lab(lab.Lab):
    """What stands for a GPU."""

    dry = True

    def __init__(self, say: Callable[..., Any], mode: str) -> None:
        super().__init__(say, mode)
        self._mock, self._mocks, self._noted = mock(), False, list[Any]()

    @contextmanager
    def there(self, sweep: Sweep) -> Iterator[None]:
        """Inside, there is a GPU for the calls of a sweep."""
        self._mock.new_gpu()
        alone = {way.backend for way in sweep.ways.values()} == {"cuda"}
        self._mocks = alone and "decoder" not in sweep.calls[0].what
        with ExitStack() as stack:
            if not self._mocks:
                bf.backends.why_not("triton")  # loads it
                stack.enter_context(pretended.gpu("cuda", "triton"))
                stack.enter_context(self._interpreted())
            yield

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

    def library(self) -> Any:
        """Where the constants of CUDA C++ are."""
        return self._mock._library

    def operator(self, backend: str) -> Callable[..., Any]:
        """Runs an operator by its name."""
        return self._mock.operator if self._mocks else super().operator(backend)

    def like(self, call: Call) -> Call:
        """The call that is made for one."""
        if self._mocks:
            return call
        decodes = "decoder" in call.what
        sizes = tuple(map(min, call.sizes, (1, 2 if decodes else 17, 17, 17)))
        # The operators of a decoder on the CPU know no 16 bits.
        dtype = "float32" if decodes else call.dtype
        return call._replace(sizes=sizes, dtype=dtype, values=min(call.values, 17))

    def draw(self, *sizes: int, dtype: str, scale: float = 0.7) -> Tensor:
        """Numbers; for the mock runtime, which reads none, just memory."""
        if self._mocks:
            return torch.empty(sizes, dtype=getattr(torch, dtype))
        return super().draw(*sizes, dtype=dtype, scale=scale)

    def seen(self, call: Call) -> dict[str, Any]:
        """What was launched; of a decoder, whether one launch would have been."""
        keys = ("grid", "block", "cluster", "shared")
        for one in launches(self._mock.calls()):
            self._noted.append([kernel_of(one), *(one[key] for key in keys)])
        if "decoder" in call.what:
            rows, _, others, units = call.sizes
            why = self._mock.why_not_decode(False, True, rows, others, *[units] * 3, 0, 0)
            self._noted.append(["one launch", why])
        noted, self._noted = self._noted, []
        return {"launches": noted}
