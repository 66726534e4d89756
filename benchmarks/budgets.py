"""What the kernels cost on paper, compiled here for GPUs that need not be here.

``python -m benchmarks.budgets`` (``make budgets``) compiles every kernel with the tiles it would be
launched with, and reads registers, shared memory, spills and the inner loop's machine code.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bahdanau_fast import triton_backward, triton_call, triton_forward
from benchmarks.sass import hot

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory a program may have.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
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


@contextmanager
def recording(native: bool) -> Iterator[list[Launch]]:
    """Launches are noted down instead of made."""
    launches: list[Launch] = []
    jit = triton.JITFunction

    def run(self: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
        names = [parameter.name for parameter in self.params]
        arguments = dict(zip(names, args, strict=False)) | options
        launches.append(_specialize(self, arguments, num_warps))

    before, native_before = jit.run, triton_call.native
    jit.run, triton_call.native = run, lambda: native
    try:
        yield launches
    finally:
        jit.run, triton_call.native = before, native_before


def launches_of(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, native: bool, lens: bool = True
) -> list[Launch]:
    """Every launch of forward and backward at (B,Tq,Tk,H,Dv), on tensors without data."""
    batch, queries_len, keys_len, hidden, features = shape
    make = functools.partial(torch.empty, dtype=dtype, device="meta")
    queries, keys = make(batch, queries_len, hidden), make(batch, keys_len, hidden)
    values, w_v = make(batch, keys_len, features), make(1, hidden)
    valid = torch.empty(batch, dtype=torch.int64, device="meta") if lens else None
    with recording(native) as launches:
        inputs = (queries, keys, None, None, values, w_v, valid, None, 0.0)
        context, weights = triton_forward.attend(*inputs, True)
        triton_backward.attend_backward(*inputs, weights, context, weights, 15)
    return launches


@dataclasses.dataclass
class Budget:
    """What one compiled kernel takes."""

    registers: int
    shared: int
    spills: int
    warps: int
    sass: str


@functools.cache
def compile_launch(launch: Launch, target: str) -> Budget:
    """Compile for a target; raises what Triton raises where it does not compile."""
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    names = [name for name, _ in launch.signature]
    constants = {(names.index(name),): value for name, value in launch.constants}
    source = ASTSource(launch.kernel, dict(launch.signature), constants, attributes)
    options = {"num_warps": launch.warps}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        return Budget(registers, shared, spills, launch.warps, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(path))
        sass = _tool("nvdisasm", "-c", str(path))
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
    spills = stack + len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return Budget(registers, shared, spills, launch.warps, sass)


def _tool(name: str, *arguments: str) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    result = subprocess.run(
        [str(folder / name), *arguments], capture_output=True, text=True, check=True
    )
    return result.stdout


def occupancy(budget: Budget) -> int:
    """Warps a multiprocessor of an H200 can hold of such programs, of 64."""
    per_warp = -(-budget.registers * 32 // 256) * 256
    by_registers = 65536 // (per_warp * budget.warps)
    by_shared = 227 * 1024 // (budget.shared + 1024)
    return min(by_registers, by_shared, 64 // budget.warps, 32) * budget.warps


@dataclasses.dataclass(frozen=True)
class Rate:
    """Per (query, key, hidden unit) of the loop that a kernel spends its time in.

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
        """Elements per second that an H200 does at most: 132 multiprocessors at 1.98 GHz."""
        cycles = max(self.special / 16, self.fma / 128, self.issued / 128)
        return 132 * 1.98e9 / cycles


# Elements of one turn of a kernel's loop, in tiles: (factored, direct).
_TURN = {
    "scores": (("BLOCK_K", 4), ("BLOCK_K", 2)),
    "grad_tanh": (("BLOCK_R", 2), ("BLOCK_R", 2)),
    "step": (None, ("BLOCK_K", 2)),
}


def rates(launch: Launch, budget: Budget) -> list[Rate]:
    """Instructions per element of the loops over tanh; none for kernels that have no tanh."""
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


# What is compiled: (B,Tq,Tk,H,Dv) of the acceptance shapes and of odd sizes that need every mask.
SHAPES = (
    (64, 1, 50, 512, 512),
    (256, 1, 400, 512, 512),
    (1, 1, 40000, 512, 512),
    (32, 1, 196, 512, 2048),
    (128, 10, 128, 1024, 1024),
    (32, 33, 34, 1024, 1024),
    (16, 512, 512, 512, 512),
    (3, 17, 53, 71, 29),
)


def distinct(targets: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[str, str, Launch]]:
    """(target, dtype, launch), each kernel in each configuration once."""
    for target, dtype in itertools.product(targets, dtypes):
        seen = set()
        for shape in SHAPES:
            for launch in launches_of(shape, DTYPES[dtype], not target.startswith("gfx")):
                if launch not in seen:
                    seen.add(launch)
                    yield target, dtype, launch


def _line(target: str, dtype: str, launch: Launch) -> list[str]:
    budget = compile_launch(launch, target)
    cells = [launch.name, target, dtype, f"{launch.tiles}, {launch.warps} warps"]
    cells += [str(budget.registers), f"{budget.shared / 1024:.1f}", str(budget.spills)]
    nvidia = target.startswith("sm")
    cells.append(f"{occupancy(budget)} of 64" if nvidia else "-")
    found = rates(launch, budget) if nvidia else []
    per_element = [f"{r.way} {r.special:.2f} / {r.fma:.2f} / {r.loads:.2f}" for r in found]
    cells.append("; ".join(per_element) or "-")
    cells.append("; ".join(f"{r.bound / 1e12:.1f}" for r in found) or "-")
    return cells


HEAD = (
    *("kernel", "target", "dtype", "tiles", "registers", "shared KB", "spills", "warps per SM"),
    *("special / fma / loads per element", "10^12 elements/s at most"),
)
NOTE = """
Reading Ek and v from the DRAM of an H200 (4.3 TB/s, copied) gives a step in bf16, H = Dv, at most
1.1 10^12 elements/s: its loop has to stay above that. One tanh by the special-function unit per
element would hold many queries at 4.2 10^12."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for target, dtype, launch in distinct(arguments.targets, arguments.dtypes):
        print(f"| {' | '.join(_line(target, dtype, launch))} |", flush=True)
    print(NOTE)


if __name__ == "__main__":
    main()
