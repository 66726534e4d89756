"""Calls of attention whose launches go to the PTX machine; csrc/cuda there, on mock_cuda."""

from __future__ import annotations

import ctypes

import entry_points
import numpy as np
import torch
from mock_cuda import FILLED, mock
from sources import ptx
from targets import Kernels

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from ptx_machine import Buffer, Machine, Module, PtxError

__all__ = ["CudaPtx", "PtxCalls"]

#: The names of the kernels that serve a dtype.
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class PtxCalls(Kernels):
    """The kernels of a backend on CPU tensors: a target.

    What is derived from it has ``step``, ``forward(need_weights, *inputs)`` and ``backward(weights,
    grad_context, grad_weights, needs, *inputs)``, where inputs are queries, keys, values, w_v and
    lengths, with a seed and a probability if something is dropped. Named are ``mask``,
    ``activation``, ``negative_slope``, and in forward ``narrow`` (weights come in the dtype of the
    inputs) and ``counted``. ``needs`` has a bit for each gradient.

    Args:
        arch: as the backend names it.
        change: of the PTX, to plant a mistake.
        options: for every ``Machine.run``.

    Attributes:
        launched: names of entries.
        kind: of the numbers of the call that runs.
        multiprocessors: of the GPU that it is cut for.
    """

    kind, multiprocessors = None, 4

    def __init__(self, arch, change=str, **options):
        self.arch, self.change, self.options = arch, change, options
        self.launched, self._machines = set(), {}

    def begin(self, multiprocessors, dtype):
        """A call begins."""
        self.multiprocessors, self.kind = multiprocessors, KINDS[dtype]

    def attend(
        self, multiprocessors, queries, keys, values, w_v, valid_lens, *dropout, mask=None, **inside
    ):
        """Context and weights of projected queries and keys by the kernels, differentiable."""
        inputs = queries, keys, values, w_v, valid_lens
        if mask is not None:
            inside["mask"] = mask.unsqueeze(1) if mask.dim() == 2 else mask
        return _Attend.apply(*inputs, self, multiprocessors, dropout, inside)

    def machine(self, key, ptx):
        """The machine of a module, whose text is ``ptx()``."""
        if key not in self._machines:
            self._machines[key] = Machine(self.change(ptx()))
        return self._machines[key]

    def run(self, machine, name, *launch, **more):
        """One launch, without races."""
        races = machine.run(name, *launch, **more, **self.options)
        self.launched.add(name)
        if races:
            raise PtxError("\n".join(races))


class CudaPtx(PtxCalls):
    """csrc/cuda for an architecture, as PtxCalls says; ``shared``: bytes that a block can have."""

    most_queries = GPU_STEP_QUERIES

    def __init__(self, arch, shared=227 << 10, **more):
        super().__init__(arch, **more)
        self.shared = shared
        self.gpu, self._gpus = mock(), {}  # by their multiprocessors, which are asked for once
        self._buffers = []  # of the operator that runs

    def begin(self, multiprocessors, dtype):
        super().begin(multiprocessors, dtype)
        if multiprocessors not in self._gpus:
            like = {"multiprocessors": multiprocessors, "ptx_version": int(self.arch.rstrip("a"))}
            self._gpus[multiprocessors] = self.gpu.new_gpu(**like, shared=self.shared)
        self.gpu.use_gpu(self._gpus[multiprocessors])

    def forward(self, need_weights, *inputs, **masked):
        return entry_points.attend(self.operator, *inputs, need_weights=need_weights, **masked)

    def backward(self, weights, grad_context, grad_weights, needs, *inputs, **masked):
        given = *inputs[:5], weights, grad_context, grad_weights
        dropout = inputs[5:] or (None, 0.0)
        more = {"needs": needs, "dropout": dropout, **masked}
        return entry_points.attend_backward(self.operator, *given, **more)

    def step(
        self, multiprocessors, queries, w_q, keys, values, w_v, valid_lens,
        w_k=None, bias=None, mask=None,
    ):  # fmt: skip
        """The same without gradients, from queries (and keys) that the kernel projects itself."""
        self.begin(multiprocessors, queries.dtype)
        inputs = queries, w_q, keys, w_k, bias, values, w_v, valid_lens, mask
        return entry_points.step(self.operator, *inputs)

    def inside(self, multiprocessors, inputs, valid_lens, mask=None):
        """Context and weights of raw queries and keys, differentiable; ``inputs`` by name."""
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 2 else mask
        seen = {"valid_lens": valid_lens, "mask": mask}
        return _Inside.apply(self, multiprocessors, seen, *map(inputs.get, _INPUTS))

    def places(self, kind):
        """Every kernel of a kind of numbers."""
        return set(Module(ptx(kind, self.arch)).names)

    def operator(self, name, *arguments):
        self._buffers = []
        for first, end in _spans(x for x in arguments if isinstance(x, torch.Tensor)):
            self._memory(first, end - first, FILLED)
        self.gpu.calls()
        with self.gpu.runs(self._launch, self._memory):
            return self.gpu.operator(name, *arguments)

    def _memory(self, address, size, which):
        end = address + size
        for held in self._buffers if which == FILLED else ():
            if held.address <= address and end <= held.address + held.data.size:
                if held.known is not None:
                    held.known[address - held.address : end - held.address] = 1
                return
        # Of others there is left what lies beside: one that was given back may hold several.
        self._buffers = [piece for b in self._buffers for piece in _beside(b, address, end)]
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        known = None
        if which != FILLED:
            data[:], known = 0xFF, np.zeros(size, np.uint8)  # NaN: what is left unwritten shows
        self._buffers.append(Buffer(f"buffer {len(self._buffers)}", data, known))

    def _launch(self, launch):
        machine = self.machine(self.kind, lambda: ptx(self.kind, self.arch))
        given = (launch[name] for name in ("kernel", "grid", "block", "parameters"))
        more = {name: launch[name] for name in ("shared", "cluster", "cooperative")}
        self.run(machine, *given, self._buffers, **more)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values, w_v, lens, calls, multiprocessors, dropout, masked):
        calls.begin(multiprocessors, queries.dtype)
        inputs = queries, keys, values, w_v, lens, *dropout
        # With lengths backward takes narrow weights, without them wide ones.
        given = {**masked, "narrow": lens is not None}
        counted = lens is not None and "mask" not in masked
        context, weights, *counts = calls.forward(True, *inputs, **given, counted=counted)
        if counted:
            seen = torch.arange(keys.shape[1]) < lens.double().unsqueeze(-1)
            assert torch.equal(*counts, seen.sum(-1).int()) or weights.numel() == 0
            lens = counts[0].clone()
        if weights.numel() * w_v.numel() < 100_000:
            alone, _ = calls.forward(False, *inputs, **masked)
            _, others = calls.forward(True, *inputs, **masked, narrow=lens is None)
            assert {others.dtype, weights.dtype} == {torch.float32, queries.dtype}
            some, same = (context, weights.to(queries.dtype)), (alone, others.to(queries.dtype))
            torch.testing.assert_close(same, some, rtol=0, atol=0, equal_nan=True)
        ctx.save_for_backward(queries, keys, values, w_v)
        ctx.rest = lens, calls, multiprocessors, dropout, masked
        ctx.weights = weights.clone()
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx, grad_context, grad_weights):
        lens, calls, multiprocessors, dropout, masked = ctx.rest
        queries, keys, values, w_v = ctx.saved_tensors
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights.dtype)
        needs = sum(1 << i for i, need in enumerate(ctx.needs_input_grad[:4]) if need)
        calls.begin(multiprocessors, queries.dtype)
        given = ctx.weights, grad_context, grad_weights, needs
        grads = calls.backward(*given, queries, keys, values, w_v, lens, *dropout, **masked)
        return *(g if needs >> i & 1 else None for i, g in enumerate(grads)), *[None] * 5


_INPUTS = "queries", "keys", "values", "w_v", "w_q", "w_k", "bias"


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, calls, multiprocessors, seen, *inputs):
        calls.begin(multiprocessors, inputs[0].dtype)
        ctx.calls, ctx.multiprocessors = calls, multiprocessors
        ctx.given = {**dict(zip(_INPUTS, inputs, strict=True)), **seen}
        context, weights, counts, projected, _ = entry_points.attention(
            calls.operator, **ctx.given, narrow=seen["valid_lens"] is None, recorded=True
        )
        if seen["valid_lens"] is not None and seen["mask"] is None:
            ctx.given["valid_lens"] = counts
        ctx.given |= {"weights": weights.clone(), "projected_queries": projected}
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx, grad_context, grad_weights):
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.given["weights"].dtype)
        given = {"grad_context": grad_context, "grad_weights": grad_weights, **ctx.given}
        needed = ctx.needs_input_grad[3:]
        needs = sum(1 << i for i, need in enumerate(needed) if need)
        ctx.calls.begin(ctx.multiprocessors, given["queries"].dtype)
        grads = entry_points.attention_backward(ctx.calls.operator, **given, needs=needs)
        return *[None] * 3, *(g if need else None for g, need in zip(grads, needed, strict=False))


def _beside(buffer, first, end):
    """The parts of a buffer that lie before and behind some addresses."""
    size = buffer.data.size
    before, behind = (min(max(x - buffer.address, 0), size) for x in (first, end))
    if before == size or behind == 0:
        return [buffer]
    parts = [slice(0, before), slice(behind, size)]
    known = buffer.known
    return [
        Buffer(buffer.name, buffer.data[part], None if known is None else known[part])
        for part in parts
        if part.stop > part.start
    ]


def _spans(tensors):
    """Beginning and end of the memory that tensors lie in."""
    found = []
    for x in sorted((x for x in tensors if x.numel()), key=torch.Tensor.data_ptr):
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        end = x.data_ptr() + (last + 1) * x.element_size()
        if found and x.data_ptr() < found[-1][1]:  # they share some
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([x.data_ptr(), end])
    return found
