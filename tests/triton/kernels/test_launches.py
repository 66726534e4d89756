"""Nothing is launched beside the kernels to bring weights into their dtype, or to keep lengths."""

import lengths
import parity
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bahdanau_fast as bf


class Casts(TorchDispatchMode):
    """The dtypes that torch is asked for copies in."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs and kwargs.get("dtype"):
            self.dtypes.append(kwargs["dtype"])
        return func(*args, **(kwargs or {}))


def drawn(dtype, queries):
    module = bf.AdditiveAttention(8, 8, 8).to(parity.DEVICE, dtype)
    shapes = (2, queries, 8), (2, 5, 8)
    return module, *(torch.randn(s, dtype=dtype, device=parity.DEVICE) for s in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_a_step_come_in_the_dtype_of_the_module(dtype):
    module, queries, keys = drawn(dtype, 1)
    with bf.backends.use("triton"), torch.no_grad():
        memory = module.memory(keys)
        with Casts() as seen:
            module.attend(queries, memory)
    assert module.attention_weights.dtype == dtype
    assert seen.dtypes == []


@pytest.mark.parametrize("queries", [1, 2, 18])
def test_weights_of_a_recorded_call_come_in_the_dtype_of_the_module(queries):
    module, queries, keys = drawn(torch.bfloat16, queries)
    with bf.backends.use("triton"), Casts() as seen:
        context = module(queries, keys, keys)
        (context.sum() + module.attention_weights.sum()).backward()
    assert module.attention_weights.dtype == torch.bfloat16
    assert seen.dtypes == []


@pytest.mark.parametrize("kind", lengths.LENGTHS)
@pytest.mark.parametrize("queries", [1, 18])
def test_lengths_of_a_recorded_call(queries, kind):
    assert lengths.operators_for("triton", queries, kind) == {}
    lengths.check_changes("triton", queries, kind)
