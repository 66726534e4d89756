"""Runs the Triton kernels in the PTX machine: compiled for a GPU that is not here, launched by
bahdanau_fast.backends.triton on CPU tensors."""

import functools
import importlib
import pkgutil
import re
import struct
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from driven import PtxCalls
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton_target import SHARED, target_is

import bahdanau_fast.kernels
from bahdanau_fast.backends.triton import call
from bahdanau_fast.kernels import plans
from bahdanau_fast.ops.operator import operators
from ptx_machine import Buffer

# What torch.empty leaves: a NaN that nobody computes. Words that hold it count as unwritten.
UNWRITTEN = 0x7FA5C3A5
_PACKED = {"i32": "i", "i64": "q", "fp32": "f"}


def _empty(*args, **options):
    made = _torch_empty(*args, **options)
    if type(made) is not torch.Tensor or made.is_meta:
        return made
    whole = torch.tensor([], dtype=torch.uint8).set_(made.untyped_storage()).numpy()
    words = whole[: whole.size // 4 * 4].view(np.uint32)
    words[:] = UNWRITTEN
    return made


_torch_empty = torch.empty


class TritonPtx(PtxCalls):
    """Triton's launches on CPU tensors go to the machine.

    Args:
        arch: "75", "80" or "90".
        more: as for PtxCalls.
    """

    def __init__(self, arch, **more):
        # Lanes that hold a number twice may differ in its last bits (a product fused with one of
        # two summands) and both store it: that one of the two wins is how Triton means it.
        super().__init__(arch, lanes_clash=True, **more)

    def places(self):
        """Every kernel that is launched."""
        found = set()
        for module in pkgutil.iter_modules(bahdanau_fast.kernels.__path__):
            held = importlib.import_module(f"bahdanau_fast.kernels.{module.name}")
            found |= {name for name, x in vars(held).items() if isinstance(x, JITFunction)}
        return {name for name in found if name.endswith("_kernel")}

    @staticmethod
    def storage(tensor):
        """A tensor's memory as a buffer; whole words that torch.empty left are unwritten."""
        whole = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        words, known = whole[: whole.size // 4 * 4].view(np.uint32), np.ones(whole.size, np.uint8)
        known[: words.size * 4].reshape(-1, 4)[:] = (words != UNWRITTEN)[:, None]
        return Buffer(f"{tuple(tensor.shape)} {tensor.dtype}", whole, known)

    @contextmanager
    def here(self):
        target = f"sm_{self.arch}"
        with (
            target_is(target),
            patch.object(CompiledKernel, "run", property(self._runner)),
            patch.object(CompiledKernel, "launch_metadata", return_value=None),
            patch.object(
                call, "gpu", lambda _: plans.Gpu(self.multiprocessors, SHARED[target], target)
            ),
            patch.object(plans, "pays_by_fourier", return_value=True),  # of few as of many
            patch.object(torch, "empty", _empty),
        ):
            yield

    def operator(self, name, *arguments):
        with self.here():
            return operators[name].in_python["triton"](*arguments)

    def step(self, *given, **more):
        with patch.object(plans, "projects_queries", return_value=True):
            return super().step(*given, **more)

    def _runner(self, kernel):
        def run(x, y, z, _stream, _function, _packed, _metadata, _enter, _exit, *arguments):
            self._launch(kernel, (x, y, z), arguments)

        return run

    def _launch(self, kernel, grid, arguments):
        # Triton has it where one warp is the block.
        alone = functools.partial(re.sub, r"bar\.warp\.sync\s+[^;]+;", "bar.sync 0;")
        machine = self.machine(kernel.hash, lambda: alone(kernel.asm["ptx"]))
        (name,) = machine.module.names
        params, buffers = b"", {}
        for kind, value in zip(kernel.src.signature.values(), arguments, strict=True):
            if kind == "constexpr":
                continue
            if isinstance(value, torch.Tensor):
                code, number = "Q", value.data_ptr()
                if value.numel():
                    buffers[value.untyped_storage().data_ptr()] = self.storage(value)
            else:
                code, number = _PACKED[kind], value
            size = struct.calcsize(code)
            params += b"\0" * (-len(params) % size) + struct.pack(code, number)
        params += b"\0" * (machine.module.entry(name).params - len(params))  # scratch memory
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        self.run(machine, name, grid, threads, params, list(buffers.values()), shared=shared)
