"""Tests of the Triton kernels: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be asked for before anything is imported: ../test_triton.py runs this
folder so. Alone, it is ``TRITON_INTERPRET=1 python -m pytest tests/triton/kernels``; there, where a
case takes up to seconds, most are deep (``-m deep``), and the same kernels run as machine code in
tests/ptx. What only the interpreter proves: the backend as users call it, compiled or not.
"""

import os
import re

import parity
import pytest
import torch
import torch._dynamo  # else a call loads it, where a tensor has no device of its own
from host_only import routed
from torch.utils._python_dispatch import _disable_current_modes

import bahdanau_fast as bf

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEEP = re.compile(
    r"test_contract\w*\[(?!lens per query-|whole row masked-|split keys-|mask per query-)|"
    r"test_near|test_fp32_near_zero\[18-(?!0.001)|test_drawn|test_without_weights_scores|test_one_graph|test_splits_of_one_long|"
    r"test_projections.*torch.float\d\d\]|"
    r"test_dropout.*\[18|test_magnitudes|"
    r"test_inside\[(?!tanh-18|relu of f|leaky_relu-2|sigmoid of f)"
)


@pytest.fixture(autouse=True)
def on_a_gpu(request):
    """As on one in the interpreter, but where code is compiled, which asks for devices itself."""
    assert bf.backends.why_not("triton") is None  # loads it
    if not INTERPRETED or request.module.__name__ == "test_compiled":
        yield
        return
    with routed("triton"):
        yield


if INTERPRETED:

    def pytest_collection_modifyitems(items):
        for item in items:
            if DEEP.match(item.name):
                item.add_marker(pytest.mark.deep)

    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        """A call from a kernel to a function: the language is patched already.

        The interpreter patches it again at each, which takes half of its time.
        """
        if "tl" not in self.fn.__globals__ and self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    run = interpreter.InterpretedFunction.run

    def launch(self, *args, **kwargs):
        """A launch, of whose operations nobody takes notes."""
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    interpreter.InterpretedFunction.run = launch
    cast_impl = interpreter.InterpreterBuilder.cast_impl

    def rounded_cast(self, src, dst):
        """fp32 to bf16 by the nearest, ties to even, as GPUs do: the interpreter cuts bits off."""
        if (src.dtype.scalar, dst.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, src, dst)
        rounded = torch.from_numpy(np.array(src.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = rounded_cast
elif torch.cuda.is_available():
    parity.DEVICE = "cuda"
else:
    collect_ignore_glob = ["test_*.py"]
