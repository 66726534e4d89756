"""Calls of attention whose launches go to the PTX machine: csrc/cuda, as nvcc compiles it, on
mock_cuda; and where a mistake can be planted in it.
"""

import ctypes
import shutil
from pathlib import Path

import entry_points
import numpy as np
import pytest
import torch
from mock_cuda import FILLED, mock
from targets import Kernels

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.ops.attention import INPUTS
from ptx_machine import Buffer, Machine, Module, PtxError, built, changed

#: The names of the kernels that serve a dtype.
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
SOURCES = Path(__file__).resolve().parents[2] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
FLAGS = "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-ptx", "-lineinfo", f"-I{SOURCES}"

needs_nvcc = pytest.mark.skipif(
    NVCC is None or torch.cuda.is_available(),
    reason="it takes nvcc, and no GPU, whose extension defines the operators",
)


def nvcc(source, arch):
    """The command that makes PTX of a file for an architecture, such as "80" or "90a"."""
    return [NVCC, *FLAGS, f"-arch=sm_{arch}", str(source)]


def ptx(kind, arch):
    """PTX of csrc/cuda/op/kernels_<kind>.cu."""
    source = SOURCES / "cuda" / "op" / f"kernels_{kind}.cu"
    folders = SOURCES / "common", SOURCES / "cuda"
    files = [source, *sorted(path for folder in folders for path in folder.rglob("*.h"))]
    return built(f"ptx/{kind}_{arch}", files, nvcc(source, arch)).read_text()


def line_of(file, after, word):
    """The line of the first ``word`` from a piece of text on, which a kernel's file has once."""
    text = (SOURCES / "cuda" / "kernels" / file).read_text()
    assert text.count(after) == 1, f"{file} has changed: plant the mistake elsewhere"
    return text[: text.index(word, text.index(after))].count("\n") + 1


def planted(file, after, words):
    """A change of PTX where a piece of text is: words of source and PTX, and what those become."""
    word, opcode, *new = words
    return changed(opcode, file, line_of(file, after, word), *new)


class PtxCalls(Kernels):
    """The kernels of a backend on CPU tensors: a target.

    What is derived from it has ``operator(name, *arguments)``, and ``places`` of kernels. A mistake
    is a ``change`` of the PTX; ``options`` are for every ``Machine.run``.
    """

    # Of the call that runs: its numbers, and the GPU that it is cut for.
    kind, multiprocessors = None, 4

    def __init__(self, arch, change=str, **options):
        self.arch, self.change, self.options = arch, change, options
        self.launched, self._machines = set(), {}  # names of entries

    def begin(self, multiprocessors, dtype):
        """A call begins."""
        self.multiprocessors, self.kind = multiprocessors, KINDS[dtype]

    def attend(
        self, multiprocessors, queries, keys, values, w_v, valid_lens, seed=None, dropout_p=0.0,
        **more,
    ):  # fmt: skip
        """Context and weights of projected queries and keys by the kernels, differentiable.

        With lengths backward takes narrow weights, without them wide ones.
        """
        seen = {"valid_lens": valid_lens, "seed": seed, "dropout_p": dropout_p, **more}
        seen["narrow"] = valid_lens is not None
        return _Call.apply(self, multiprocessors, seen, queries, keys, values, w_v)

    def inside(self, multiprocessors, inputs, valid_lens, mask=None):
        """The same of raw queries and keys; ``inputs`` by name."""
        seen = {"valid_lens": valid_lens, "mask": mask, "narrow": valid_lens is None}
        return _Call.apply(self, multiprocessors, seen, *map(inputs.get, INPUTS[:7]))

    def step(self, multiprocessors, *inputs, w_k=None, bias=None, mask=None):
        """Context and weights of a step that projects its queries, and keys with ``w_k``, itself.

        ``inputs`` are queries, w_q, keys, values, w_v and lengths.
        """
        queries, w_q, keys, *rest = inputs
        self.begin(multiprocessors, queries.dtype)
        return entry_points.step(self.operator, queries, w_q, keys, w_k, bias, *rest, mask)

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


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, calls, multiprocessors, seen, *inputs):
        calls.begin(multiprocessors, inputs[0].dtype)
        given, lens = dict(zip(INPUTS, inputs, strict=False)) | seen, seen["valid_lens"]
        mask = seen.get("mask")
        if mask is not None and mask.dim() == 2:
            given["mask"] = mask.unsqueeze(1)
        context, weights, *_ = found = call(calls, given, recorded=True)
        ctx.calls, ctx.multiprocessors = calls, multiprocessors
        ctx.given = {**given, "weights": weights.clone()}
        if "w_q" in given:
            ctx.given["projected_queries"] = found[3]
        if lens is not None and mask is None:
            counts = found[2].clone()
            left = torch.arange(given["keys"].shape[1]) < lens.double().unsqueeze(-1)
            assert torch.equal(counts, left.sum(-1).int()) or weights.numel() == 0
            ctx.given["valid_lens"] = counts
        if "w_q" not in given and weights.numel() * given["w_v"].numel() < 100_000:
            alone, _ = call(calls, given, need_weights=False)
            _, others = call(calls, {**given, "narrow": not given["narrow"]})
            assert {others.dtype, weights.dtype} == {torch.float32, context.dtype}
            some, same = (context, weights.to(context.dtype)), (alone, others.to(context.dtype))
            torch.testing.assert_close(same, some, rtol=0, atol=0, equal_nan=True)
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx, grad_context, grad_weights):
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.given["weights"].dtype)
        given = {"grad_context": grad_context, "grad_weights": grad_weights, **ctx.given}
        del given["narrow"]
        needed = ctx.needs_input_grad[3:]
        needs = sum(1 << i for i, need in enumerate(needed) if need)
        ctx.calls.begin(ctx.multiprocessors, given["queries"].dtype)
        grads = entry_points.attention_backward(ctx.calls.operator, **given, needs=needs)
        return *[None] * 3, *(g if need else None for g, need in zip(grads, needed, strict=False))


def call(calls, given, **more):
    """The results of ``attention``, which the next call leaves alone."""
    found = entry_points.attention(calls.operator, **given, **more)
    return [x.clone() for x in found[: 5 if more.get("recorded") else 2]]


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
