"""The way of a call through this package, counted: what the host of a GPU does in Python."""

import platform
import shutil
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import bahdanau_fast as bf
from bahdanau_fast import kernels
from benchmarks.cases import draw

FOLDERS = tuple(str(Path(of.__file__).parent) for of in (bf, kernels))  # one, where installed
TRITON = (3, 9)  # whose driver has all of its C in a file


class Walk(NamedTuple):
    """The way of a call through this package."""

    calls: int  # of its Python functions
    stays: int  # in a file, one after the other
    rooms: int  # files
    returns: int  # stays in a file that was left before


def walk(call):
    """The way of a call, the third after two that warm it up."""
    files = [""]  # of the functions that run; what is not ours is where its caller is
    stays = []
    calls = 0

    def profile(frame, event, _):
        nonlocal calls
        if event == "call":
            file = frame.f_code.co_filename
            own = file.startswith(FOLDERS)
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


def call_of(module, case):
    """A call of a module, with its backward in training; a step on a memory where it makes one."""
    inputs = draw(case.shape)
    given = inputs.queries, inputs.keys, inputs.values, inputs.valid_lens
    if case.task == "step" and isinstance(module, bf.AdditiveAttention):
        return partial(module.attend, given[0], module.memory(*given[1:]))
    forward = partial(module, *given)
    if case.mode == "forward":
        return forward
    inputs.require_grad(True)
    leaves = inputs.leaves("full")[:-3] + tuple(module.parameters())
    return lambda: torch.autograd.grad(forward(), leaves, inputs.grad_context)


def why_not():
    """What keeps calls from the route of a GPU, or None."""
    if torch.cuda.is_available():
        return "there is a GPU, whose calls `make gpu-report` times"
    with suppress(PackageNotFoundError):
        triton = tuple(map(int, version("triton").split(".")[:2]))
        if triton >= TRITON and platform.machine() == "x86_64" and shutil.which("g++"):
            return None
    return f"it takes g++ for x86-64, and Triton {'.'.join(map(str, TRITON))} or newer"
