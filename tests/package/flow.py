"""Follows a call from the module to the operator: which files of the package it enters.

A file counts when one of its Python functions is called after ``AdditiveAttention.forward`` (or
``attend``) and before the operator: the C++ operator, or the function of the Triton backend that
stands for it. ``nn.Module.__call__`` and all else of torch is torch's. Run as a program, it prints
what it finds as JSON, for Triton's interpreter has to be asked for before Python starts::

    TRITON_INTERPRET=1 python tests/package/flow.py triton
    BAHDANAU_FAST_LIMITS=amd python tests/package/flow.py explain  # for docs/how-it-works.md
"""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import bahdanau_fast as bf
from bahdanau_fast import backends, ops

PACKAGE = Path(bf.__file__).parent


def operators(backend):
    """What a followed call ends at: C++ functions, and code of Python functions."""
    if backend == "triton":
        from bahdanau_fast.backends.triton.forward import step_from_raw

        return {step_from_raw.__code__, ops.implementations["triton"][0].__code__}
    known = torch.ops.bahdanau_fast
    return {op.default._op for op in (known.attend, known.attend_step, known.additive_attention)}


class _Reached(Exception):
    """Ends a call at its operator: kernels take long in Triton's interpreter."""


def follow(call, backend):
    """How often each (file, function) of the package is entered before the operator is.

    Raises:
        AssertionError: no operator was called.
    """
    ends, entered = operators(backend), Counter()

    def profile(frame, event, argument):
        if event not in ("call", "c_call"):
            return
        if (argument if event == "c_call" else frame.f_code) in ends:
            raise _Reached
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            entered[file, frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        call()
    except _Reached:
        return entered
    finally:
        sys.setprofile(None)
    raise AssertionError("no operator was called")


class Case(NamedTuple):
    """Two calls of the same sizes, the second of which is followed."""

    modules: tuple
    queries: tuple
    keys: tuple

    def call(self, which):
        """Of the module, or of a memory's."""
        attention, queries, keys = (part[which] for part in self)
        if isinstance(keys, bf.Memory):
            return attention.attend(queries, keys)
        return attention(queries, keys, keys)

    def explain(self):
        """Sizes and what ``explain`` says."""
        attention, queries, keys = (part[1] for part in self)
        shape = (keys.values if isinstance(keys, bf.Memory) else keys).shape
        sizes = f"queries {tuple(queries.shape)}, keys {tuple(shape)}, H = {attention.num_hiddens}"
        return f"{sizes}\n    {attention.explain(queries, keys)}"


def cases():
    """Name to case."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    def module(size):
        return bf.AdditiveAttention(size, size, size)

    attention, decoder, toy = module(32), module(32), module(8)
    steps, unchanged = (draw(2, 1, 32), draw(2, 1, 32)), draw(2, 20, 32)
    memory = attention.memory(draw(2, 20, 32))
    return {
        "a step on a memory": Case((attention,) * 2, steps, (memory,) * 2),
        "an unchanged loop": Case((decoder,) * 2, steps, (unchanged,) * 2),
        "many queries": Case(
            (module(32), module(32)),
            (draw(2, 600, 32), draw(2, 600, 32)),
            (draw(2, 20, 32), draw(2, 20, 32)),
        ),
        "a small call": Case(
            (toy,) * 2, (draw(2, 1, 8), draw(2, 1, 8)), (draw(2, 10, 8), draw(2, 10, 8))
        ),
    }


def followed(backend, first=False):
    """For each call, the functions it enters as ``file:function``, and how often.

    Args:
        backend: of the calls.
        first: forget every route in front of the call, as if its sizes were new.
    """
    found = {}
    with backends.use(backend), torch.no_grad():
        for name, case in cases().items():
            follow(partial(case.call, 0), backend)
            if first:
                backends._routes.clear()
            entered = follow(partial(case.call, 1), backend)
            found[name] = {":".join(at): count for at, count in entered.items()}
    return found


def explained():
    """How the same calls are computed, and why, as docs/how-it-works.md prints it."""
    with torch.no_grad():
        return "\n".join(f"{name}: {case.explain()}" for name, case in cases().items())


if __name__ == "__main__":
    if sys.argv[1:] == ["explain"]:
        print(explained())
    else:
        found = {"seen": followed(sys.argv[1]), "first": followed(sys.argv[1], first=True)}
        json.dump(found, sys.stdout)
