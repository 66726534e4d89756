"""What compilers made of the GPU kernels: their resources, their instructions."""

import importlib.util
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / f"objects-{sysconfig.get_platform()}" / "cuda"
KINDS = "f32", "bf16", "f16"


class Kernel(NamedTuple):
    """One instantiation for one GPU, as ptxas reported it: a thread's registers, and the bytes of
    its stack and of what it stores and loads because registers did not suffice.
    """

    entry: str
    kind: str
    arch: str
    registers: int
    stack: int
    spills: int


_REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes "
    r"spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def kernels() -> list[Kernel]:
    """Every kernel that was compiled; empty if the extension was not built."""
    found = []
    for kind in KINDS:
        path = OBJECTS / f"kernels_{kind}.txt"
        text = path.read_text() if path.exists() else ""
        for entry, arch, stack, stores, loads, registers in _REPORT.findall(text):
            spills = int(stores) + int(loads)
            found.append(Kernel(entry, kind, arch, int(registers), int(stack), spills))
    return found


def tool(name: str) -> str | None:
    """Path of a CUDA tool, from Triton's package or the toolkit; None if neither has it."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        if packaged.exists():
            return str(packaged)
    return shutil.which(name)


def run_tool(name: str, *arguments: str, folder: str | None = None) -> str:
    """Output of a CUDA tool, run in a folder."""
    command = [str(tool(name)), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def sass(kind: str, arch: str) -> dict[str, str]:
    """SASS by mangled name; empty without a disassembler, or with one older than the compiler."""
    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        objects = str(OBJECTS / f"kernels_{kind}.o")
        run_tool("cuobjdump", "-xelf", "all", objects, folder=folder)
        cubins = list(Path(folder).glob(f"*sm_{arch}.cubin"))
        if not cubins:
            return {}
        (cubin,) = cubins
        listing = run_tool("nvdisasm", "-c", str(cubin))
    parts = re.split(r"\.section\s+\.text\.(\w+)", listing)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# Issued to the fma pipe of sm_80 and later; FADD and FMUL are fma there.
FMA = ("FFMA", "FADD", "FMUL", "DFMA", "DADD", "DMUL")
ENDS = ("BRA", "EXIT", "BSYNC", "BRX", "RET")


class Block(Counter):
    """Instructions between two jumps, counted by opcode."""

    def of(self, *opcodes: str) -> int:
        """Number of instructions with one of these opcodes, any suffix."""
        return sum(n for name, n in self.items() if name.split(".")[0] in opcodes)


def blocks(listing: str) -> list[Block]:
    """The basic blocks of nvdisasm's or cuobjdump's listing."""
    found = [Block()]
    for line in listing.splitlines():
        if re.match(r"^\s*\.L_\w+:", line):
            found.append(Block())
        match = _INSTRUCTION.search(line)
        if match:
            found[-1][match[1]] += 1
            if match[1].split(".")[0] in ENDS:
                found.append(Block())
    return [block for block in found if block]


def hot(listing: str, exponentials: bool) -> Block | None:
    """The block with most reciprocals, of those with exponentials or of those without."""
    wanted = (x for x in blocks(listing) if x["MUFU.RCP"] and bool(x["MUFU.EX2"]) == exponentials)
    return max(wanted, key=lambda x: x["MUFU.RCP"], default=None)
