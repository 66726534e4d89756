"""How csrc/cuda cuts the shapes of the benchmarks, on GPUs of several sizes: all of the work, once.

Launches are noted by mock_cuda, which refuses too much shared memory and clusters that do not fit.
"""

import math
import re

import entry_points
import pytest
import torch
from mock_cuda import kernel_of, launches, numbers

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY

SHAPES = (*LIST, *STEPS_ON_MEMORY)
# Multiprocessors and the largest cluster: A100, RTX 4090, H100 and H200, B200.
GPUS = {"108": (108, 1), "128": (128, 1), "132": (132, 8), "148": (148, 8)}
DTYPES = (torch.float32, torch.bfloat16)
LIMIT = 96 * 1024
# Bytes of the struct Problem, and where the numbers (splits, split) of a kernel's argument are.
PROBLEM = 168
SPLITS = {
    "decode_forward": PROBLEM + 24,
    "raw_keys_forward": PROBLEM + 24,
    "decode_backward": PROBLEM,
    "decode_grad_weights": PROBLEM,
}


def tiles(*sides):
    """Tiles that hold a matrix: of each of its sides the size, and that of a tile."""
    return math.prod(-(-size // tile) for size, tile in sides)


def blocks_of(launch):
    """The blocks that the work of a launch takes, from the sizes in its parameters."""
    kernel = kernel_of(launch)
    if kernel == "sum_parts":
        _, _, size = numbers(launch, 0, 3)
        return tiles((size, 32))
    B, Tq, Tk, H, Dv = numbers(launch, 0, 5)
    if kernel in SPLITS:
        splits, split = numbers(launch, SPLITS[kernel], 2)
        assert (splits - 1) * split < Tk <= splits * split  # no split is empty, no key left
        rows = B * splits
        return -(-rows // launch["cluster"]) * launch["cluster"]
    if kernel == "weights_product":
        which = int(re.search(r"ProductE(\d)E", launch["kernel"])[1])
        rows, columns = {0: (Tq, Dv), 1: (Tk, Dv), 2: (Tq, Tk)}[which]  # enum Product
        return B * tiles((rows, 64), (columns, 64))
    return (
        B
        * {
            "tile_scores": tiles((Tq, 64), (Tk, 64)),
            "row_softmax": Tq,
            "softmax_grad": Tq,
            "grad_tanh": tiles((Tk, 64), (H, 32)),
        }[kernel]
    )


def check(gpu, largest_cluster):
    """The launches since the last time are possible and hold all of their work; their names."""
    calls = gpu.calls()
    found = launches(calls)
    for launch in found:
        assert launch["grid"] == blocks_of(launch), launch["kernel"]
        assert 0 < launch["shared"] <= LIMIT
        assert launch["cluster"] <= largest_cluster
    assert all(call["error"] == 0 for call in calls)
    return [kernel_of(launch) for launch in found]


def tensors(*shapes, dtype):
    """Memory that nobody looks at."""
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_launch_holds_its_work(gpu, shape, name):
    multiprocessors, cluster = GPUS[name]
    gpu.new_gpu(multiprocessors=multiprocessors, largest_cluster=cluster, ptx_version=90)
    b, tq, tk, h, dv = shape.batch, shape.queries, shape.keys, shape.hidden, shape.value_size
    for dtype in DTYPES:
        sizes = (b, tq, h), (b, tk, h), (b, tk, dv), (1, h)
        inputs = tensors(*sizes, dtype=dtype)
        context, weights = entry_points.attend(gpu.operator, *inputs)
        kernels = check(gpu, cluster)
        assert kernels[0] == ("decode_forward" if tq <= GPU_STEP_QUERIES else "tile_scores")
        entry_points.attend_backward(gpu.operator, *inputs, None, weights, context, weights)
        assert "sum_parts" in check(gpu, cluster)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.queries == 1], ids=lambda s: s.name)
def test_every_step_holds_its_work(gpu, shape, name):
    multiprocessors, cluster = GPUS[name]
    gpu.new_gpu(multiprocessors=multiprocessors, largest_cluster=cluster, ptx_version=90)
    b, tk, h, dv = shape.batch, shape.keys, shape.hidden, shape.value_size
    sizes = (b, 1, shape.query_size), (h, shape.query_size), (b, tk, shape.key_size)
    raw, w_q, keys = tensors(*sizes, dtype=torch.bfloat16)
    w_k, values, w_v = tensors((h, shape.key_size), (b, tk, dv), (1, h), dtype=torch.bfloat16)
    for own, features in ((w_k, keys), (None, tensors((b, tk, h), dtype=torch.bfloat16)[0])):
        if own is not None and shape.key_size > 512:
            continue  # a tile of them does not fit into shared memory: torch multiplies before
        entry_points.step(gpu.operator, raw, w_q, features, own, None, values, w_v)
        kernels = check(gpu, cluster)
        assert kernels == ["raw_keys_forward" if own is not None else "decode_forward"]
