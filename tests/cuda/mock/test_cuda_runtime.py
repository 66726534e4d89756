"""What csrc/cuda asks of the CUDA runtime, and how it cuts its work, on a mock of the runtime."""

import math

import entry_points
import pytest
import torch
from contract import operands
from mock_cuda import OF_TENSOR, kernel_of, launches, numbers, of

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from benchmarks.cases import LIST, STEPS_ON_MEMORY
from ptx_machine import needs_compiler

pytestmark = needs_compiler

LIMIT = 96 * 1024
WORDS = {209: "no kernel image is available", 35: "CUDA driver version is insufficient"}
LENS, MASK = torch.tensor([2, 0]), torch.ones(2, 1, 3, dtype=torch.bool)
LENS_BY_QUERY = LENS.unsqueeze(1)


def step(gpu, hidden=512, batch=2, keys=150, queries=1, features=16, dtype=torch.bfloat16):
    """The runtime's calls of a step whose launch projects its queries, by its sizes."""
    shapes = (batch, queries, features), (hidden, features), (batch, keys, hidden), (1, hidden)
    raw, w_q, k, w_v = (torch.randn(shape).to(dtype) for shape in shapes)
    entry_points.step(gpu.operator, raw, w_q, k, None, None, k, w_v)
    return gpu.calls()


def attend(gpu, queries=1, keys=240, batch=2, hidden=64, dtype=torch.bfloat16):
    """The runtime's calls of forward and of backward, from projected queries and keys."""
    inputs, _ = operands(dtype, B=batch, Tq=queries, Tk=keys, H=hidden, Dv=48, grad=False)
    context, weights = entry_points.attend(gpu.operator, *inputs)
    forward = gpu.calls()
    entry_points.attend_backward(gpu.operator, *inputs, weights, context, weights)
    return forward, gpu.calls()


FORWARD, APART = ["decode_forward"], ["decode_forward", "combine_splits"]


@pytest.mark.parametrize(
    ("queries", "keys", "largest_cluster", "cluster", "forward"),
    [
        (1, 10, 8, 1, FORWARD),
        (1, 30, 8, 2, FORWARD),
        (1, 30, 1, 1, APART),
        (1, 240, 8, 1, APART),
        (6, 240, 8, 8, FORWARD),  # of at most eight splits
    ],
    ids=["whole", "in a cluster", "without clusters", "of many splits", "of many queries"],
)
def test_a_call_asks_the_runtime_for_its_launches_alone(
    gpu, queries, keys, largest_cluster, cluster, forward
):
    """All else was asked by the first call. Splits that meet in a cluster take no memory."""
    gpu.set_gpu(largest_cluster=largest_cluster)
    attend(gpu, queries, keys)
    made = []
    with gpu.runs(lambda *_: None, lambda _, size, which: made.append((size, which))):
        first, second = attend(gpu, queries, keys)
    backward = ["grad_rows" if queries > 4 else "grad_values", "grad_keys", "sum_parts"]
    for calls, names in ((first, forward), (second, backward)):
        assert {(call["call"], call["error"]) for call in calls} == {("cudaLaunchKernelEx", 0)}
        assert [kernel_of(call) for call in calls] == names
    assert first[0]["cluster"] == cluster
    results = 2 * queries * 48 * 2, 2 * queries * keys * 4  # context and weights
    assert made[:2] == [(size, OF_TENSOR) for size in results]
    if queries == 1:
        assert len(made) == len(results) + (forward == APART) + 7  # of splits; of gradients


def test_another_call_does_not_take_the_shared_memory_of_a_launch(gpu):
    """Of the same kernel, with less shared memory, between the attribute and the launch."""
    gpu.after["cudaFuncSetAttribute"] = lambda: step(gpu, 1504)
    launch, *_ = launches(step(gpu, 1536))
    assert launch["shared"] > 52 * 1024
    assert launch["error"] == 0


def test_shared_memory_is_allowed_once_for_each_kernel_and_gpu(gpu):
    def allowed(hidden):
        calls = step(gpu, hidden)
        assert launches(calls)[0]["shared"] > 48 * 1024
        return [call["value"] for call in of(calls, "cudaFuncSetAttribute")]

    assert allowed(1536)
    assert allowed(1504) == allowed(1536) == []
    gpu.new_gpu()
    assert set(allowed(1504)) == {LIMIT}


@pytest.mark.parametrize(
    ("fits", "ptx_version", "cluster"),
    [(8, 90, 8), (16, 90, 8), (4, 90, 4), (0, 90, 1), (8, 80, 1)],
)
def test_clusters_are_as_large_as_the_gpu_has_room_for(gpu, fits, ptx_version, cluster):
    gpu.set_gpu(largest_cluster=fits, ptx_version=ptx_version)
    forward, *_ = launches(step(gpu, batch=1))
    assert (forward["cluster"], forward["error"]) == (cluster, 0)
    assert forward["grid"] % cluster == 0
    whole, _ = attend(gpu, keys=16 * cluster, batch=1)
    assert [launch["cluster"] for launch in launches(whole)] == [cluster]
    assert gpu.last_error() == 0


def test_clusters_that_are_off_are_second_launches(gpu):
    with gpu.without_clusters():
        first, *rest = launches(attend(gpu, keys=64)[0])
        projects, *_ = launches(step(gpu, batch=1))
    assert [kernel_of(launch) for launch in (first, *rest)] == APART
    assert first["cluster"] == projects["cluster"] == 1


def test_clusters_are_those_of_the_kernels_of_a_dtype(gpu):
    """Kernels of another dtype may take more registers."""
    assert launches(attend(gpu, keys=64)[0])[0]["cluster"] == 4
    gpu.set_gpu(largest_cluster=2)
    few, _ = attend(gpu, keys=64, dtype=torch.float32)
    assert [kernel_of(launch) for launch in launches(few)] == APART


@pytest.mark.parametrize(
    ("sizes", "cluster", "inside"),
    [
        ({"features": 8}, 1, True),
        ({"features": 16}, 1, False),
        ({"features": 16}, 2, True),
        ({"features": 64}, 8, True),
        ({"features": 72}, 8, False),
        ({"features": 32, "dtype": torch.float32}, 8, True),
        ({"features": 36, "dtype": torch.float32}, 8, False),
        ({"features": 8, "queries": 2}, 8, False),
        ({"features": 12}, 8, False),  # rows that are not whole vectors
    ],
    ids=str,
)
def test_a_launch_projects_queries_where_w_q_is_small(gpu, sizes, cluster, inside):
    gpu.set_gpu(largest_cluster=cluster)
    launch, *_ = launches(step(gpu, **sizes))
    w_q, features = numbers(launch, PROBLEM, 2)
    assert (w_q != 0) == inside
    assert not inside or features == sizes["features"]


@pytest.mark.parametrize("lens", [None, LENS, LENS_BY_QUERY], ids=["none", "lens", "per query"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
def test_a_recorded_call_has_what_backward_takes(gpu, mask, lens):
    raw, keys, values, w_v, w_q, w_k = (
        torch.randn(shape) for shape in ((2, 1, 8), (2, 3, 7), (2, 3, 5), (4,), (4, 8), (4, 7))
    )
    given = {"w_q": w_q, "w_k": w_k, "valid_lens": lens, "mask": mask, "need_weights": False}
    _, weights, counts, queries, none = entry_points.attention(
        gpu.operator, raw, keys, values, w_v, **given, recorded=True
    )
    assert weights.shape == (2, 1, 3)  # always: backward takes them
    shape = (0,) if lens is None or mask is not None else lens.shape
    assert (counts.dtype, counts.shape) == (torch.int32, shape)
    assert torch.equal(queries, torch.nn.functional.linear(raw, w_q))
    assert torch.equal(none, torch.empty(0))


AT_MOST = "CUDA kernels take at most 16 queries and 2048 hidden units, got "


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queries": 17}, f"{AT_MOST}17 and 64"),
        ({"hidden": 2049}, f"{AT_MOST}1 and 2049"),
        ({"dtype": torch.float64}, "queries must be float32, bfloat16 or float16"),
    ],
)
def test_what_no_kernel_takes_is_told_in_words(gpu, given, words):
    with pytest.raises(RuntimeError, match=words):
        attend(gpu, **given)


@pytest.mark.parametrize("error", WORDS)
def test_a_gpu_that_the_binary_is_not_for_is_told_in_words(gpu, error):
    assert gpu.why_not() is None
    gpu.set_gpu(loads=error)
    assert gpu.why_not().startswith(WORDS[error])
    assert gpu.last_error() == 0


# ---- plans: the shapes of the benchmarks on GPUs of several sizes, all of the work, once ---------
# The mock refuses too much shared memory and clusters that do not fit.

SHAPES = (*LIST, *STEPS_ON_MEMORY)
# Multiprocessors and the largest cluster: A100, RTX 4090, H100 and H200, B200.
GPUS = {"108": (108, 1), "128": (128, 1), "132": (132, 8), "148": (148, 8)}
DTYPES = (torch.float32, torch.bfloat16)
# Bytes of the structs Problem, Forward and Gradients, and where the numbers (splits, split) of a
# kernel's argument are.
PROBLEM, FORWARD_BYTES, GRADIENTS = 216, 272, 88
SPLITS = {
    "decode_forward": FORWARD_BYTES + 80,
    "grad_values": GRADIENTS + PROBLEM,
    "grad_keys": GRADIENTS + PROBLEM,
}


def rows_of(launch, largest_cluster):
    """The blocks that the rows of a launch take, each in splits, which hold every key once."""
    B, _, Tk = numbers(launch, GRADIENTS if "grad" in kernel_of(launch) else 0, 3)
    at = SPLITS[kernel_of(launch)]
    splits, split = numbers(launch, at, 2)
    assert (splits - 1) * split < Tk <= splits * split  # no split is empty, no key left
    if kernel_of(launch) == "decode_forward":
        B *= math.prod(numbers(launch, at - 16, 2))  # groups of queries and of columns
        # All splits of a row are in the same cluster, or one of them is too small.
        assert splits > largest_cluster or launch["cluster"] % splits == 0
    return -(-B * splits // launch["cluster"]) * launch["cluster"]


def check(gpu, largest_cluster):
    """The launches since the last time are possible and hold all keys; their names."""
    calls = gpu.calls()
    found = launches(calls)
    for launch in found:
        assert launch["grid"] > 0
        assert kernel_of(launch) not in SPLITS or launch["grid"] == rows_of(launch, largest_cluster)
        assert 0 < launch["shared"] <= LIMIT
        assert launch["cluster"] <= largest_cluster
        if kernel_of(launch) == "decode_forward":
            (splits,) = numbers(launch, SPLITS["decode_forward"], 1)
            kernels = {kernel_of(launch) for launch in found}
            assert ("combine_splits" in kernels) == (splits > launch["cluster"])
    assert all(call["error"] == 0 for call in calls)
    return [kernel_of(launch) for launch in found]


def tensors(*shapes, dtype):
    """Memory that nobody looks at."""
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s.queries <= GPU_STEP_QUERIES], ids=lambda s: s.name
)
def test_every_launch_holds_its_work(gpu, shape, name):
    multiprocessors, cluster = GPUS[name]
    gpu.new_gpu(multiprocessors=multiprocessors, largest_cluster=cluster, ptx_version=90)
    b, tq, tk, h, dv = shape.batch, shape.queries, shape.keys, shape.hidden, shape.value_size
    for dtype in DTYPES:
        sizes = (b, tq, h), (b, tk, h), (b, tk, dv), (1, h)
        inputs = tensors(*sizes, dtype=dtype)
        context, weights = entry_points.attend(gpu.operator, *inputs)
        assert check(gpu, cluster) in (FORWARD, APART)
        entry_points.attend_backward(gpu.operator, *inputs, weights, context, weights)
        first = "grad_values" if tq <= 4 else "grad_rows"
        assert check(gpu, cluster) == [first, "grad_keys", "sum_parts"]
    if tq == 1:  # its inputs are those of bf16
        raw, w_q = tensors((b, 1, shape.query_size), (h, shape.query_size), dtype=dtype)
        entry_points.step(gpu.operator, raw, w_q, inputs[1], None, None, *inputs[2:])
        assert check(gpu, cluster) in (FORWARD, APART)
