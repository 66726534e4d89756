"""The launches of Triton kernels, recorded and compiled for GPUs that are not here."""

import functools
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bahdanau_fast import limits
from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton import backward, call, forward
from benchmarks.machine_code import cuda
from benchmarks.machine_code.sass import hot

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FAMILIES = {"sm_100": "sm_90", "gfx942": "other"}
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def limits_of(target):
    """Those that launches on a target are planned by."""
    return limits.GPU_FAMILIES[FAMILIES.get(target, target)]


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be launched: argument types, constants and options."""

    kernel: Any
    signature: tuple
    constants: tuple
    aligned: tuple
    warps: int

    @classmethod
    def of(cls, kernel, arguments, warps):
        """With the argument types and constants that Triton's launcher makes of real arguments."""
        signature, constants, aligned = [], [], []
        for index, parameter in enumerate(kernel.params):
            value, general = arguments[parameter.name], parameter.do_not_specialize
            kind = "constexpr"
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not general):
                constants.append((parameter.name, value))
            elif isinstance(value, torch.Tensor):
                kind = TYPES[value.dtype]
                aligned.append(index)
            else:
                kind = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not general:
                    aligned.append(index)
            signature.append((parameter.name, kind))
        return cls(kernel, tuple(signature), tuple(constants), tuple(aligned), warps)

    @property
    def name(self):
        return self.kernel.fn.__name__.removesuffix("_kernel")


@contextmanager
def recording(target):
    """Inside, kernel launches are recorded instead of executed, as planned for the target."""
    launches = []

    def run(self, *args, num_warps=4, **options):
        names = [parameter.name for parameter in self.params]
        arguments = dict(zip(names, args, strict=False)) | options
        launches.append(Launch.of(self, arguments, num_warps))

    with (
        patch.object(triton.JITFunction, "run", run),
        patch.object(call, "native", lambda: target.startswith("sm")),
        patch.object(limits, "of_gpu", lambda device: limits_of(target)),
    ):
        yield launches


def launches_of(shape, dtype, target):
    """Every launch of forward and backward at (B,Tq,Tk,H,Dv), on tensors without data."""
    batch, queries_len, keys_len, hidden, features = shape
    make = functools.partial(torch.empty, dtype=dtype, device="meta")
    queries, keys = make(batch, queries_len, hidden), make(batch, keys_len, hidden)
    values, w_v = make(batch, keys_len, features), make(1, hidden)
    valid = torch.empty(batch, dtype=torch.int64, device="meta")
    with recording(target) as launches:
        inputs = (queries, keys, values, w_v)
        context, weights = forward.attend(*inputs, valid_lens=valid)
        grads = (weights, context, weights, 15)
        backward.attend_backward(*grads, *inputs, valid_lens=valid)
        if queries_len <= GPU_STEP_QUERIES and dtype != torch.float32:
            square = make(hidden, hidden)
            forward.attend_step(queries, keys, values, square, square, None, w_v, valid)
    return launches


@dataclass
class Budget:
    """The resources of one compiled kernel; without SASS on AMD."""

    shared: int
    spills: int
    sass: str


@functools.cache
def compiled(launch, target):
    """Compile for a target; raises what Triton raises where it does not compile."""
    names = [name for name, _ in launch.signature]
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        {(names.index(name),): value for name, value in launch.constants},
        {(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    made = triton.compile(source, target=TARGETS[target], options={"num_warps": launch.warps})
    shared = made.metadata.shared
    if target.startswith("gfx"):
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", made.asm["amdgcn"])[1]
        return Budget(shared, int(spills), "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        usage = cuda.run_tool("cuobjdump", "-res-usage", str(path))
        sass = cuda.run_tool("nvdisasm", "-c", str(path))
    stack = int(re.search(r"STACK:(\d+)", usage)[1])
    return Budget(shared, stack + len(re.findall(r"\b(?:STL|LDL)\b", sass)), sass)


def block_of(launch, sass, tiles, exponentials):
    """The kernel's loop over tanh, and how many (query, key, hidden unit) a thread has in it.

    Args:
        launch: of the kernel.
        sass: its machine code.
        tiles: that one turn of the loop takes.
        exponentials: whether each element takes one.
    """
    sizes = dict(launch.constants)
    elements = sizes["BLOCK_K"] * tiles * sizes["BLOCK_H"]
    return hot(sass, exponentials), elements / (32 * launch.warps)
