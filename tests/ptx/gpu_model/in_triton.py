"""Counts of what is written in Triton, ours and that of others: compiled without a GPU, run in the
PTX machine a few blocks of each launch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton
from machine import build
from machine.launch import Buffer
from tritoned import TritonPtx

import bahdanau_fast.kernels
from bahdanau_fast.backends.triton import forward
from benchmarks.contestants import expert
from benchmarks.contestants.expert import Kernels

from .counted import MOST_BLOCKS, NOT_ALIKE, Launch, Library, Problem, kept, scaled
from .gpus import Gpu
from .sass import Code

__all__ = ["counted"]

DRAWN_ROWS = 8  # of the batch; those of the others are zeros, and are not run


class _Counted(TritonPtx):
    """What a call launches on a GPU.

    Attributes:
        given: addresses of the tensors of the call.
        l2: bytes that it holds: all other tensors lie there, if they are smaller.
        whole: count all blocks of each launch.
        found: the launches of a call, and what the library does in between.
    """

    def __init__(self, arch: str, code: str):
        older = functools.partial(re.sub, r"\.version \S+", ".version 9.0")  # than Triton's ptxas
        super().__init__(arch, change=older, counts=True, races=False, share=0.0)
        self.code, self.kind, self.found, self._codes = code, "triton", [], {}
        self.given, self.l2, self.whole = set(), 0, False

    def storage(self, tensor):
        storage = tensor.untyped_storage()
        data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
        hot = storage.data_ptr() not in self.given and storage.nbytes() <= self.l2
        return Buffer(f"{tuple(tensor.shape)} {tensor.dtype}", data, None, hot)

    def run(self, machine, name, grid, threads, params, buffers, shared):
        codes = self._codes.setdefault(machine, {})
        if name not in codes:
            codes[name] = Code(machine.module.text, name, self.code)
        code = codes[name]
        run = functools.partial(
            machine.run, name, grid, threads, params, buffers, shared=shared, pace=code.pace,
            **self.options,
        )  # fmt: skip
        blocks = math.prod(grid)
        group = blocks if self.whole or name in NOT_ALIKE else MOST_BLOCKS
        made = scaled(run, code, blocks, threads, shared, self.kind, group=group)
        # Blocks that were not run read what those that were have read, too.
        cold, every = (sum(b.data.size for b in buffers if not (c and b.hot)) for c in (1, 0))
        counts = made.counts
        counts = {**counts, "cold": min(counts["cold"], cold), "read": min(counts["read"], every)}
        self.found.append(replace(made, counts=counts))


@functools.cache
def _driver(arch: str, code: str) -> _Counted:
    return _Counted(arch, code)


def _inputs(p: Problem) -> tuple[torch.Tensor | None, ...]:
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        drawn = torch.randn((min(p.batch, DRAWN_ROWS), *shape), generator=generator) * 0.577
        whole = torch.zeros((p.batch, *shape), dtype=p.dtype)
        whole[:DRAWN_ROWS] = drawn.to(p.dtype)
        return whole

    queries, keys = rows(p.queries, p.hidden), rows(p.keys, p.hidden)
    w_v = (torch.randn(1, p.hidden, generator=generator) * p.hidden**-0.5).to(p.dtype)
    lens = None if p.lens is None else torch.tensor(p.lens)
    return queries, keys, rows(p.keys, p.value_size), w_v, lens


def counted(p: Problem, gpu: Gpu, backward: bool, kernels: Kernels | None = None) -> list[Launch]:
    """The launches of a call, forward or, alone, backward.

    Args:
        p: the call.
        gpu: that it is cut for.
        backward: which of the two.
        kernels: of others; ours unless given.
    """
    arch, here = gpu.ptx.rstrip("a"), Path(__file__)
    folders = Path(bahdanau_fast.kernels.__file__).parent, Path(forward.__file__).parent
    files = [f for folder in folders for f in sorted(folder.glob("*.py"))]
    if kernels is not None:
        files = [Path(expert.__file__), here.with_name("rivals.py")]
    who = "ours" if kernels is None else kernels.scores.__name__
    code = triton.__version__, build.core().name, *(f.read_text() for f in (here, *files))
    cut = arch, gpu.code, gpu.multiprocessors, gpu.l2_mb

    def count() -> list[Launch]:
        driver, inputs = _driver(arch, gpu.code), _inputs(p)
        driver.multiprocessors, driver.whole = gpu.multiprocessors, p.lens is not None
        driver.found, driver.l2 = [], gpu.l2_mb * 1e6
        shape = p.batch, p.queries, p.keys
        weights = torch.full(shape, 1 / p.keys, dtype=p.dtype if kernels else torch.float32)
        grad = torch.ones((p.batch, p.queries, p.value_size), dtype=p.dtype)
        held = *inputs, weights, grad
        driver.given = {x.untyped_storage().data_ptr() for x in held if x is not None}
        call: Callable[..., object]
        if kernels is None:
            call = driver.backward if backward else functools.partial(driver.forward, True)
            given = (weights, grad, None, 15) if backward else ()
        else:
            call, given = kernels.attend, ()
            if backward:
                call, given = kernels.backward, (weights, grad)
        with driver.here(), torch.no_grad(), Library(driver):
            call(*given, *inputs)
        return driver.found

    return kept((code, who, p, cut, backward), count)
