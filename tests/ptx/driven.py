"""Runs csrc/cuda in the PTX machine: its operators compute the launches, on mock_cuda."""

from __future__ import annotations

import ctypes

import entry_points
import numpy as np
import pytest
import torch
from cases import DTYPES
from cuda_on_host import KINDS
from launched import PtxCalls
from machine import build
from machine.launch import Buffer
from machine.parse import Module
from mock_cuda import FILLED, OF_GPU, mock

__all__ = ["CudaPtx", "needs_nvcc"]

needs_nvcc = pytest.mark.skipif(
    build.NVCC is None or torch.cuda.is_available(),
    reason="it takes nvcc, and no GPU, whose extension defines the operators",
)


class CudaPtx(PtxCalls):
    """csrc/cuda for an architecture.

    Args:
        less_shared: bytes of shared memory that launches lack, to plant a mistake.
        clears: whether what a launcher sets to zero is.
        all_known: no memory counts as unwritten.
        more: as for PtxCalls.
    """

    archs, dtypes = ("80", "90a"), tuple(DTYPES)

    def __init__(self, arch, less_shared=0, clears=True, all_known=False, **more):
        super().__init__(arch, **more)
        self.less_shared, self.clears, self.all_known = less_shared, clears, all_known
        self.gpu = mock()
        self.device = self.gpu.new_gpu()
        self._counters, self._buffers = [], []  # of the GPU, and of the operator that runs

    def begin(self, multiprocessors, queries, keys, w_v):
        super().begin(multiprocessors, queries, keys, w_v)
        self.gpu.use_gpu(self.device)
        self.gpu.set_gpu(multiprocessors=multiprocessors, ptx_version=int(self.arch.rstrip("a")))

    def places(self):
        """(kind, entry) of every kernel."""
        return {(kind, e) for kind in KINDS for e in Module(build.ptx(kind, self.arch)).names}

    def forward(self, need_weights, *inputs):
        return entry_points.attend(self._operator, *inputs, need_weights=need_weights)

    def backward(self, weights, grad_context, grad_weights, needs, *inputs):
        grads = weights, grad_context, grad_weights
        return entry_points.attend_backward(self._operator, *inputs, *grads, needs=needs)

    def step(
        self, multiprocessors, queries, w_q, keys, values, w_v, valid_lens, w_k=None, bias=None
    ):
        """The same without gradients, from queries (and keys) that the kernel projects itself."""
        self.begin(multiprocessors, queries, keys, w_v)
        inputs = queries, w_q, keys, w_k, bias, values, w_v, valid_lens
        return entry_points.step(self._operator, *inputs)

    def _operator(self, name, *arguments):
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
                if self.clears and held.known is not None:
                    held.known[address - held.address : end - held.address] = 1
                return
        self._buffers = [  # the others have been given back
            b for b in self._buffers if end <= b.address or b.address + b.data.size <= address
        ]
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        known = None
        if which != FILLED and not self.all_known:
            data[:], known = 0xFF, np.zeros(size, np.uint8)  # NaN: what is left unwritten shows
        self._buffers.append(Buffer(f"buffer {len(self._buffers)}", data, known))
        if which == OF_GPU:
            self._counters.append(self._buffers[-1])

    def _launch(self, name, blocks, threads, cluster, shared, params, size):
        machine = self.machine(self.kind, lambda: build.ptx(self.kind, self.arch))
        launch = name.decode(), blocks, threads, ctypes.string_at(params, size), self._buffers
        self.run(machine, *launch, shared=shared - self.less_shared, cluster=cluster)


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
