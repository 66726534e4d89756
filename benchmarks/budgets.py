"""Registers, shared memory and machine code of the GPU kernels; needs no GPU.

``python -m benchmarks.budgets`` compiles every Triton kernel with the tiles that it would be
launched with, and reads registers, shared memory, spills and the machine code of its inner loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from bahdanau_fast import limits
from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton import backward, call, forward

from .machine_code import cuda
from .machine_code.sass import hot
from .workloads.shapes import LIST, STEPS_ON_MEMORY

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FAMILIES = {"sm_100": "sm_90", "gfx942": "other"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel as it would be launched: argument types, constants and options."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).removesuffix("_kernel")

    @property
    def tiles(self) -> str:
        return " ".join(
            f"{key.removeprefix('BLOCK_')}{value}"
            for key, value in self.constants
            if key.startswith("BLOCK_")
        )


_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def _specialize(kernel: Any, arguments: dict[str, Any], warps: int) -> Launch:
    """The argument types and constants that Triton's launcher makes of real arguments."""
    signature, constants, aligned = [], [], []
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind = "constexpr"
        general = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not general):
            constants.append((parameter.name, value))
        elif isinstance(value, torch.Tensor):
            kind = _TYPES[value.dtype]
            aligned.append(index)
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not general:
                aligned.append(index)
        signature.append((parameter.name, kind))
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), warps)


def limits_of(target: str) -> limits.GpuLimits:
    """Those that launches on a target are planned by."""
    return limits.GPU_FAMILIES[FAMILIES.get(target, target)]


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Inside, kernel launches are recorded instead of executed, as planned for the target."""
    launches: list[Launch] = []
    jit = triton.JITFunction

    def run(self: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
        names = [parameter.name for parameter in self.params]
        arguments = dict(zip(names, args, strict=False)) | options
        launches.append(_specialize(self, arguments, num_warps))

    with (
        patch.object(jit, "run", run),
        patch.object(call, "native", lambda: target.startswith("sm")),
        patch.object(limits, "of_gpu", lambda device: limits_of(target)),
    ):
        yield launches


def launches_of(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, target: str, lens: bool = True
) -> list[Launch]:
    """Every launch of forward and backward at (B,Tq,Tk,H,Dv), on tensors without data."""
    batch, queries_len, keys_len, hidden, features = shape
    make = functools.partial(torch.empty, dtype=dtype, device="meta")
    queries, keys = make(batch, queries_len, hidden), make(batch, keys_len, hidden)
    values, w_v = make(batch, keys_len, features), make(1, hidden)
    valid = torch.empty(batch, dtype=torch.int64, device="meta") if lens else None
    with recording(target) as launches:
        inputs = (queries, keys, values, w_v)
        context, weights = forward.attend(*inputs, valid_lens=valid)
        grads = (weights, context, weights, 15)
        backward.attend_backward(*grads, *inputs, valid_lens=valid)
        if queries_len <= GPU_STEP_QUERIES and dtype != torch.float32:
            square = make(hidden, hidden)
            forward.attend_step(queries, keys, values, square, square, None, w_v, valid)
    return launches


@dataclasses.dataclass
class Budget:
    """The resources of one compiled kernel."""

    registers: int
    shared: int
    spills: int
    warps: int
    sass: str


def _compile(launch: Launch, target: str) -> Any:
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    names = [name for name, _ in launch.signature]
    constants = {(names.index(name),): value for name, value in launch.constants}
    source = ASTSource(launch.kernel, dict(launch.signature), constants, attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": launch.warps})


class _Allocated(Exception):
    """Ends a compilation where shared memory has been allocated, with its bytes."""


def shared_memory(launch: Launch, target: str) -> int:
    """Bytes of shared memory of one program on an NVIDIA target, without its machine code."""

    def stop(self: Any, source: Any, metadata: dict[str, Any], *rest: Any) -> None:
        raise _Allocated(metadata["shared"])

    with patch.object(CUDABackend, "make_ptx", stop):
        try:
            return int(_compile(launch, target).metadata.shared)  # compiled before
        except _Allocated as found:
            return int(found.args[0])


@functools.cache
def compile_launch(launch: Launch, target: str) -> Budget:
    """Compile for a target; raises what Triton raises where it does not compile."""
    compiled = _compile(launch, target)
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        return Budget(registers, shared, spills, launch.warps, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = cuda.run_tool("cuobjdump", "-res-usage", str(path))
        sass = cuda.run_tool("nvdisasm", "-c", str(path))
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
    spills = stack + len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return Budget(registers, shared, spills, launch.warps, sass)


@dataclasses.dataclass(frozen=True)
class Rate:
    """Instructions per (query, key, hidden unit) in the inner loop of a kernel.

    Attributes:
        way: "factored", or "direct" where each element takes an exponential.
        special: special-function operations.
        fma: operations of the fma pipe.
        loads: load instructions.
        issued: all instructions.
    """

    way: str
    special: float
    fma: float
    loads: float
    issued: float

    @property
    def bound(self) -> float:
        """Elements per second of an H200 at most: 132 multiprocessors at 1.98 GHz."""
        cycles = max(self.special / 16, self.fma / 128, self.issued / 128)
        return 132 * 1.98e9 / cycles


# Elements of one turn of a kernel's loop, in tiles: (factored, direct).
_TURN = {
    "scores": (("BLOCK_K", 4), ("BLOCK_K", 2)),
    "grad_tanh": (("BLOCK_R", 2), ("BLOCK_R", 2)),
    "step": (None, ("BLOCK_K", 2)),
}


def rates(launch: Launch, budget: Budget) -> list[Rate]:
    """Instructions per element of the loops over tanh; empty for kernels without tanh."""
    constants, found = dict(launch.constants), []
    for way, turn in zip(("factored", "direct"), _TURN.get(launch.name, ()), strict=False):
        if turn is None or (way == "factored" and not constants["FACTORED"]):
            continue
        block = hot(budget.sass, exponentials=way == "direct")
        if block is None:
            continue
        tile = constants[turn[0]] * turn[1] * constants["BLOCK_H"]
        each = tile / (32 * launch.warps)
        counts = (block.special, block.fma, block.loads, block.total)
        found.append(Rate(way, *(count / each for count in counts)))
    return found


# (B,Tq,Tk,H,Dv) of the acceptance shapes; one of odd sizes needs every mask.
FEW_SHAPES = ((256, 1, 400, 512, 512), (16, 512, 512, 512, 512))
ODD_SHAPE = (3, 17, 53, 71, 29)
_REAL = ((s.batch, s.queries, s.keys, s.hidden, s.value_size) for s in (*LIST, *STEPS_ON_MEMORY))
ALL_SHAPES = tuple(dict.fromkeys((*FEW_SHAPES, ODD_SHAPE, *_REAL)))


def distinct(target: str, dtype: str, quick: bool) -> list[Launch]:
    """Each kernel in each configuration once."""
    shapes = FEW_SHAPES if quick else ALL_SHAPES
    launches = (launches_of(shape, DTYPES[dtype], target) for shape in shapes)
    return list(dict.fromkeys(itertools.chain.from_iterable(launches)))


def row(target: str, dtype: str, launch: Launch) -> dict[str, Any]:
    """The resources of one kernel on one architecture."""
    budget = compile_launch(launch, target)
    found = rates(launch, budget) if target.startswith("sm") else []
    return {
        "kernel": launch.name,
        "target": target,
        "dtype": dtype,
        "tiles": f"{launch.tiles}, {launch.warps} warps",
        "registers": budget.registers,
        "shared": budget.shared,
        "spills": budget.spills,
        "rates": [dataclasses.asdict(rate) | {"bound": rate.bound} for rate in found],
    }


def main() -> None:
    """Print the rows, a line of JSON each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--quick", action="store_true", help="the acceptance shapes only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    rows = []
    for target, dtype in itertools.product(arguments.targets, arguments.dtypes):
        for launch in distinct(target, dtype, arguments.quick):
            rows.append(row(target, dtype, launch))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
