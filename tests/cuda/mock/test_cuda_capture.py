"""Every call of csrc/cuda in a CUDA graph: on the mock, which refuses to wait in a capture."""

from functools import partial

import entry_points
import pytest
import torch
from contract import operands
from mock_cuda import kernel_of, launches, of

from ptx_machine import needs_compiler

pytestmark = needs_compiler

DTYPES = torch.float32, torch.bfloat16, torch.float16
KEYS = {"whole": 10, "in a cluster": 100, "split": 280, "long": 2000}
SEEN = "all", "lens", "mask", "dropout"


def problem(queries, keys, dtype, seen="all"):
    """Projected queries and keys, values, w_v, and by name what is seen of them."""
    inputs, _ = operands(dtype, Tq=queries, Tk=keys, H=64, Dv=48, grad=False)
    given = {
        "all": {},
        "lens": {"valid_lens": torch.tensor([keys, 3])},
        "mask": {"mask": torch.ones(2, 1, keys, dtype=torch.bool)},
        "dropout": {"seed": torch.tensor([7]), "dropout_p": 0.5},
    }
    return inputs, given[seen]


def forward_of(keys):
    """Splits that are more than a cluster has are added up in a second launch."""
    return ["decode_forward", *["combine_splits"][: keys in ("split", "long")]]


def captured(gpu, call, kernels):
    """Captures a call, the first and a second time on a GPU; its launches are these kernels."""
    stream = gpu.new_stream()
    for _ in range(2):
        gpu.calls()
        with gpu.capture(stream):
            call()
        calls = gpu.calls()
        found = launches(calls)
        assert [kernel_of(launch) for launch in found] == kernels
        assert {launch["stream"] for launch in found} == {stream}
        assert all(call["error"] == 0 for call in calls)
        assert of(calls, "cudaMemsetAsync") == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 6, 16])
@pytest.mark.parametrize("keys", KEYS)
def test_forward(gpu, keys, queries, dtype):
    for seen in SEEN:
        inputs, given = problem(queries, KEYS[keys], dtype, seen)
        for how in ({}, {"need_weights": False}, {"counted": True})[: 2 + (seen == "lens")]:
            call = partial(entry_points.attend, gpu.operator, *inputs, **given, **how)
            captured(gpu, call, forward_of(keys))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 6, 16])
@pytest.mark.parametrize("keys", KEYS)
def test_backward(gpu, keys, queries, dtype):
    first = "grad_rows" if queries > 4 else "grad_values"
    for seen in SEEN:
        inputs, given = problem(queries, KEYS[keys], dtype, seen)
        context, weights = entry_points.attend(gpu.operator, *inputs, **given)
        for grads in ((context, weights), (context, None), (None, weights)):
            arguments = gpu.operator, *inputs, weights, *grads
            call = partial(entry_points.attend_backward, *arguments, **given)
            captured(gpu, call, [first, "grad_keys", "sum_parts"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 6])
@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("keys", KEYS)
def test_a_step_that_projects(gpu, keys, projected, queries, dtype):
    (_, k, values, w_v), given = problem(queries, KEYS[keys], dtype, "lens")
    raw, w_q, w_k = (torch.ones(s).to(dtype) for s in ((2, queries, 512), (64, 512), (64, 64)))
    inputs = raw, w_q, k, None if projected else w_k, None, values, w_v, given["valid_lens"]
    call = partial(entry_points.step, gpu.operator, *inputs)
    captured(gpu, call, forward_of(keys))
