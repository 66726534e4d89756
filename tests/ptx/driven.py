"""Calls of attention whose launches go to the PTX machine; csrc/cuda there, on mock_cuda."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from calls import Calls, CudaCalls
from cases import DTYPES
from machine import build
from machine.launch import Buffer, Machine
from machine.parse import Module, PtxError
from machine_code import KINDS
from mock_cuda import FILLED, OF_GPU, mock

__all__ = ["CudaPtx", "PtxCalls", "needs_nvcc"]

needs_nvcc = pytest.mark.skipif(
    build.NVCC is None or torch.cuda.is_available(),
    reason="it takes nvcc, and no GPU, whose extension defines the operators",
)


class PtxCalls(Calls):
    """The kernels of a backend for an architecture.

    Args:
        arch: as the backend names it.
        change: of the PTX, to plant a mistake.
        options: for every ``Machine.run``.
    """

    def __init__(self, arch, change=str, **options):
        self.arch, self.change, self.options = arch, change, options
        self._launched = set()
        self._machines = {}

    def machine(self, key, ptx):
        """The machine of a module, whose text is ``ptx()``."""
        if key not in self._machines:
            self._machines[key] = Machine(self.change(ptx()))
        return self._machines[key]

    def run(self, machine, name, *launch, **more):
        """One launch, without races."""
        races = machine.run(name, *launch, **more, **self.options)
        self._launched.add((self.kind, name))
        if races:
            raise PtxError("\n".join(races))

    def took(self):
        """(kind, entry) of every launch since the last call."""
        launched, self._launched = self._launched, set()
        return launched


class CudaPtx(PtxCalls, CudaCalls):
    """csrc/cuda for an architecture, as PtxCalls says."""

    archs, dtypes = ("80", "90a"), tuple(DTYPES)

    def __init__(self, arch, **more):
        super().__init__(arch, **more)
        self.gpu = mock()
        self.device = self.gpu.new_gpu()
        self._counters, self._buffers = [], []  # of the GPU, and of the operator that runs

    def begin(self, multiprocessors, dtype):
        super().begin(multiprocessors, dtype)
        self.gpu.use_gpu(self.device)
        self.gpu.set_gpu(multiprocessors=multiprocessors, ptx_version=int(self.arch.rstrip("a")))

    def places(self, kinds=KINDS):
        """(kind, entry) of every kernel of some kinds of numbers."""
        return {(kind, e) for kind in kinds for e in Module(build.ptx(kind, self.arch)).names}

    def operator(self, name, *arguments):
        self._buffers = list(self._counters)
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
        self._buffers = [  # the others have been given back
            b for b in self._buffers if end <= b.address or b.address + b.data.size <= address
        ]
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        known = None
        if which != FILLED:
            data[:], known = 0xFF, np.zeros(size, np.uint8)  # NaN: what is left unwritten shows
        self._buffers.append(Buffer(f"buffer {len(self._buffers)}", data, known))
        if which == OF_GPU:
            self._counters.append(self._buffers[-1])

    def _launch(self, name, blocks, threads, cluster, shared, params, size):
        machine = self.machine(self.kind, lambda: build.ptx(self.kind, self.arch))
        launch = name.decode(), blocks, threads, ctypes.string_at(params, size), self._buffers
        self.run(machine, *launch, shared=shared, cluster=cluster)


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
