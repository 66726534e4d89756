"""What others launch for a call, as machine code: Triton's, compiled without a GPU and counted as
ours is. Products with the values are cuBLAS's: their bytes, at full speed."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from tritoned import TritonPtx

from .counted import Problem, scaled, works
from .sass import Code
from .times import Work

__all__ = ["compiled", "expert"]

MASKED = tl.constexpr(-1e6)


@triton.jit
def compiled_scores(queries, keys, w_v, scores, Tq, Tk, H, BLOCK_H: tl.constexpr):
    """``(tanh(q + k) * w).sum(-1)`` as inductor fuses it: a program for each score."""
    at = tl.program_id(0)
    pair, h = at // Tk, tl.arange(0, BLOCK_H)
    inside = h < H
    row = (pair // Tq) * Tk + at % Tk
    q = tl.load(queries + pair * H + h, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(keys + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_v + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + at, tl.sum(libdevice.tanh(q + k) * w, axis=0))


@triton.jit
def expert_scores(queries, keys, w_v, scores, Tq, Tk, H, BLOCK_Q: tl.constexpr,
                  BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """A tile of keys in registers, a loop over queries, ``tanh.approx``."""
    b, tiles = tl.program_id(1), tl.cdiv(Tk, BLOCK_K)
    j, h = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H)
    inside = (j < Tk)[:, None] & (h < H)[None, :]
    k = tl.load(keys + (b * Tk + j)[:, None] * H + h[None, :], mask=inside, other=0.0)
    w = tl.load(w_v + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) // tiles * BLOCK_Q
    for i in range(first, tl.minimum(first + BLOCK_Q, Tq)):
        q = tl.load(queries + (b * Tq + i) * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [k.to(tl.float32) + q],
                                      tl.float32, is_pure=True, pack=1)  # fmt: skip
        tl.store(scores + (b * Tq + i) * Tk + j, tl.sum(t * w, axis=1), mask=j < Tk)


@triton.jit
def softmax(scores, lens, weights, Tq, Tk, MASK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of a row, masked, into the dtype of the values."""
    row, j = tl.program_id(0), tl.arange(0, BLOCK_K)
    s = tl.load(scores + row * Tk + j, mask=j < Tk, other=float("-inf"))
    if MASK:
        s = tl.where((j < Tk) & (j >= tl.load(lens + row // Tq)), MASKED, s)
    e = tl.exp(s - tl.max(s, axis=0))
    tl.store(weights + row * Tk + j, e / tl.sum(e, axis=0), mask=j < Tk)


class _Counted(TritonPtx):
    """Counts a part of each launch; what the call has made lies in the L2."""

    def __init__(self):
        older = functools.partial(re.sub, r"\.version \S+", ".version 9.0")  # than Triton's ptxas
        super().__init__("90", change=older, counts=True, races=False, share=0.0)
        self.kind, self.found, self.made, self._codes = "triton", [], (), {}

    def run(self, machine, name, grid, threads, params, buffers, shared):
        for buffer in buffers:
            buffer.known, buffer.hot = None, buffer.address in self.made
        if name not in self._codes.setdefault(machine, {}):
            self._codes[machine][name] = Code(machine.module.text, name, "90a")
        code = self._codes[machine][name]
        run = functools.partial(
            machine.run, name, grid, threads, params, buffers, shared=shared, pace=code.pace,
            **self.options,
        )  # fmt: skip
        self.found.append(scaled(run, code, math.prod(grid), threads, shared, self.kind))


@functools.cache
def _driver() -> _Counted:
    return _Counted()


def _works(p: Problem, launch_scores) -> list[Work]:
    """Scores, softmax and the product, forward."""
    driver, one = _driver(), functools.partial(torch.zeros, dtype=p.dtype)
    queries, keys = one(p.batch, p.queries, p.hidden), one(p.batch, p.keys, p.hidden)
    scores = torch.zeros(p.batch, p.queries, p.keys)
    weights, w_v = torch.zeros_like(scores, dtype=p.dtype), one(p.hidden)
    lens = torch.tensor(p.lens or [p.keys] * p.batch)
    driver.found, driver.made = [], (scores.data_ptr(), weights.data_ptr())
    with driver.here():
        launch_scores(queries, keys, w_v, scores, p.queries, p.keys, p.hidden)
        block = triton.next_power_of_2(p.keys)
        softmax[(p.batch * p.queries,)](
            scores, lens, weights, p.queries, p.keys, p.lens is not None, block,
            num_warps=min(max(block // 128, 2), 8),
        )  # fmt: skip
    values = p.batch * (p.keys + p.queries) * p.value_size * p.dtype.itemsize
    written = p.batch * p.queries * p.value_size * p.dtype.itemsize
    # A trip to the weights and values, and one to write.
    product = Work("product", 132, 4, 128, 0, moved=values, written=written, cold=values - written,
                   sectors=values / 32, trips=1)  # fmt: skip
    # Programs that were not run read the same queries and keys as those that were.
    projected = (queries.numel() + keys.numel() + p.hidden) * p.dtype.itemsize
    made, normed = works(driver.found)
    made = replace(made, cold=projected, moved=projected + made.written)
    return [made, normed, product]


def compiled(p: Problem) -> list[Work]:
    """Of ``torch.compile``; its plans for reductions as inductor's heuristics choose them."""
    block = triton.next_power_of_2(p.hidden)
    grid = (p.batch * p.queries * p.keys,)
    warps = min(max(block // 128, 2), 8)
    return _works(p, lambda *a: compiled_scores[grid](*a, block, num_warps=warps))


def expert(p: Problem) -> list[Work]:
    """Of fifteen lines of Triton: tiles of eight keys and up to 32 queries."""
    block, q = triton.next_power_of_2(p.hidden), min(32, triton.next_power_of_2(p.queries))
    grid = triton.cdiv(p.keys, 8) * triton.cdiv(p.queries, q), p.batch
    return _works(p, lambda *a: expert_scores[grid](*a, q, 8, block, num_warps=4))
