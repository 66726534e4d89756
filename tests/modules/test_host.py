"""A GPU's host without the GPU: a call takes the route of a GPU, and goes straight to it.

The way of a call through this package is counted: what the host of a GPU does in Python.
"""

import gc
import platform
import shutil
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from host_only import routed
from mock_cuda import kernel_of, launches, mock
from triton.backends.nvidia.driver import CudaLauncher

import bahdanau_fast as bf
from bahdanau_fast import kernels
from benchmarks.cases import Case, Shape, draw
from benchmarks.contestants import CourseAttention

FOLDERS = tuple(str(Path(of.__file__).parent) for of in (bf, kernels))  # one, where installed
TRITON = (3, 9)  # whose driver has all of its C in a file


def why_not():
    """What keeps calls from the route of a GPU, or None."""
    if torch.cuda.is_available():
        return "there is a GPU, whose calls `make gpu-report` times"
    with suppress(PackageNotFoundError):
        triton = tuple(map(int, version("triton").split(".")[:2]))
        if triton >= TRITON and platform.machine() == "x86_64" and shutil.which("g++"):
            return None
    return f"it takes g++ for x86-64, and Triton {'.'.join(map(str, TRITON))} or newer"


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
HOST = Shape("host", 4, 1, 10, 64, lens="drawn")
STEP, CALL, BOTH = (
    Case("host", HOST, task, mode)
    for task, mode in (("step", "forward"), ("full", "forward"), ("full", "train"))
)


class Walk(NamedTuple):
    """The way of a call through this package."""

    calls: int  # of its Python functions
    stays: int  # in a file, one after the other
    rooms: int  # files
    returns: int  # stays in a file that was left before


def walk(call, folders=FOLDERS):
    """The way of a call, the third after two that warm it up."""
    files = [""]  # of the functions that run; what is not ours is where its caller is
    stays = []
    calls = 0

    def profile(frame, event, _):
        nonlocal calls
        if event == "call":
            file = frame.f_code.co_filename
            own = file.startswith(folders)
            calls += own
            files.append(file if own else files[-1])
        elif event == "return" and len(files) > 1:
            files.pop()
        if files[-1] and stays[-1:] != files[-1:]:
            stays.append(files[-1])

    for _ in range(2):
        call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    rooms = len(set(stays))
    return Walk(calls, len(stays), rooms, len(stays) - rooms)


def call_of(case, backend):
    """A call of our module, with its backward in training, or a step; to be made on the route."""
    module = bf.AdditiveAttention(*[case.shape.hidden] * 3)
    with routed(backend), torch.set_grad_enabled(case.mode != "forward"):
        inputs = draw(case.shape)
        given = inputs.queries, inputs.keys, inputs.values, inputs.valid_lens
        if case.task == "step":
            return partial(module.attend, given[0], module.memory(*given[1:]))
        forward = partial(module, *given)
        if case.mode == "forward":
            return forward
        inputs.require_grad(True)
        leaves = inputs.leaves("full")[:-3] + tuple(module.parameters())
        return lambda: torch.autograd.grad(forward(), leaves, inputs.grad_context)


def test_a_walk_is_counted_by_file():
    there = {"apply": lambda function: function()}
    texts = {
        "/ours/low.py": "def low(): return [apply(int)]",
        "/theirs/between.py": "def between(f): return f()",
        "/ours/high.py": "def high(): low(); between(low); between(int); return int()",
    }
    for file, text in texts.items():
        exec(compile(text, file, "exec"), there)
    calls = []
    there["between"](lambda: calls.append(walk(there["high"], ("/ours/",))))
    assert calls == [Walk(calls=3, stays=5, rooms=2, returns=3)]


@pytest.mark.parametrize("case", [STEP, CALL], ids=["attend", "module"])
def test_cuda_launches_its_kernels(case):
    call = call_of(case, "cuda")
    with torch.no_grad(), routed("cuda"):
        call()
        mock().calls()
        mock().note(True)
        call()
    assert [kernel_of(launch) for launch in launches(mock().calls())] == ["decode_forward"]


def test_cuda_launches_backward():
    call = call_of(BOTH, "cuda")
    with routed("cuda"):
        mock().calls()
        mock().note(True)
        call()
    names = [kernel_of(launch) for launch in launches(mock().calls())]
    assert names == ["decode_forward", "grad_values", "grad_keys", "sum_parts"]


@pytest.mark.parametrize("case", [STEP, CALL, BOTH], ids=["attend", "module", "backward"])
def test_triton_launches_its_kernels(case):
    call, launched = call_of(case, "triton"), []

    def profile(frame, event, _):
        if event == "call" and frame.f_code is CudaLauncher.__call__.__code__:
            launched.append(frame.f_locals["gridX"])

    with torch.set_grad_enabled(case is BOTH), routed("triton"):
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
    assert len(launched) == 1 or (case is BOTH and len(launched) > 1)
    assert launched[0] == HOST.batch


def test_a_cpu_tensor_is_one_again():
    x = torch.ones(1)
    with routed("triton"):
        assert x.is_cuda
        assert not x.is_cpu
        assert x.device.type == "cuda"
        assert torch.empty(1, device=x.device) is not None
    assert x.is_cpu
    assert x.device == torch.device("cpu")
    assert "device" not in vars(torch.Tensor)


# ---- what a call may cost ----

FRONT = Shape("products in front", 2, 1, 3, 512, lens="drawn")
CASES = {
    "attend": ("step", "forward"),
    "module": ("full", "forward"),
    "backward": ("full", "train"),
}
MOST_CALLS, MOST_RETURNS, MORE_IN_TRITON = {"attend": 15, "module": 15, "backward": 45}, 6, 10


@pytest.mark.parametrize("shape", [HOST, FRONT], ids=str)
@pytest.mark.parametrize("what", CASES)
def test_a_call_goes_straight_to_its_launches(what, shape):
    task, mode = CASES[what]
    walks, case = {}, Case("host", shape, task, mode)
    for backend in ("cuda", "triton"):
        call = call_of(case, backend)
        with routed(backend), torch.set_grad_enabled(mode == "train"):
            walks[backend] = walk(call)
    assert walks["cuda"].calls <= MOST_CALLS[what], walks
    assert walks["triton"].calls <= MOST_CALLS[what] + MORE_IN_TRITON, walks
    assert what == "backward" or walks["cuda"].returns <= MOST_RETURNS, walks


LOOP, STEPS = Shape("loop", 4, 1, 50, 64, lens="full"), 50


def held(output):
    """Bytes that the nodes behind a tensor keep for their backward, each storage once."""
    found, seen, left = {}, {}, [output.grad_fn]
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif id(x) not in seen:
            seen[id(x)] = x  # alive, or another may get its place
            if hasattr(x, "next_functions"):
                left += [node for node, _ in x.next_functions if node is not None]
                left += [getattr(x, name) for name in dir(x) if name.startswith("_saved_")]
                left += [*getattr(x, "saved_tensors", ()), *getattr(x, "__dict__", {}).values()]
            elif isinstance(x, (tuple, list, dict)) or type(x).__module__.startswith(bf.__name__):
                left += gc.get_referents(x)
    return sum(found.values())


def loop(cls):
    """The course's decoder, as far as its attention: each query depends on the last context."""
    inputs, module = draw(LOOP), cls(*[LOOP.hidden] * 3)
    inputs.require_grad(True)
    query, total = inputs.queries, 0.0
    for _ in range(STEPS):
        context = module(query, inputs.keys, inputs.values, inputs.valid_lens)
        query, total = query + context, total + context
    return total


def test_what_nodes_hold_is_counted():
    x, y = torch.ones(3, requires_grad=True), torch.ones(5, 3)
    assert held(y.exp() @ (x * x).exp()) == 4 * (3 + 3 + 15)
    theirs, steps = held(loop(CourseAttention)), STEPS * 4 * LOOP.features
    assert steps < theirs < 1.2 * steps


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_loop_keeps_no_copy_per_step(backend):
    with routed(backend):
        ours = held(loop(bf.AdditiveAttention))
    theirs = held(loop(CourseAttention))
    assert ours <= theirs / 3, (ours, theirs)
