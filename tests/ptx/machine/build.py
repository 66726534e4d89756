"""Builds what the machine needs: its own library, and PTX of csrc/cuda."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from built import built

from benchmarks.machine_code import tool

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "csrc"
CORE = Path(__file__).resolve().parent / "core"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def core() -> Path:
    """The machine's library."""
    source = str(CORE / "machine.cpp")
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-frounding-math"]
    return built(
        "ptx/machine.so",
        sorted(path for path in CORE.rglob("*") if path.is_file()),
        ["g++", *flags, "-fPIC", "-shared", "-Wall", "-Wextra", source],
    )


def ptx_file(kind: str, arch: str) -> Path:
    """PTX of csrc/cuda/op/kernels_<kind>.cu for an architecture, such as "80" or "90a"."""
    if NVCC is None:
        raise FileNotFoundError("nvcc must be installed to compile csrc/cuda")
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-ptx", "-lineinfo", f"-I{SOURCES}"]
    source = SOURCES / "cuda" / "op" / f"kernels_{kind}.cu"
    command = [NVCC, *flags, f"-arch=sm_{arch}", str(source)]
    files = [source, *sorted(SOURCES.rglob("*.h"))]
    return built(f"ptx/{kind}_{arch}", files, command)


def ptx(kind: str, arch: str) -> str:
    """The same as text."""
    return ptx_file(kind, arch).read_text()


def machine_code(text: str, arch: str) -> str:
    """What ptxas says of PTX, then its machine code, with the lines that it is of."""
    path = ROOT / "build" / "sass" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.ptx"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # whole or not there: another process may look at the same time
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(text)
        own.replace(path)
    ptxas = shutil.which("ptxas") or Path(NVCC or "").parent / "ptxas"
    script = (
        f'{ptxas} -v -lineinfo -arch=sm_{arch} {path} -o "$1.cubin" 2> "$1"'
        f' && {tool("nvdisasm")} -g -c "$1.cubin" >> "$1"; rm "$1.cubin"'
    )
    return built(f"sass/{path.stem}_{arch}", [path], ["sh", "-c", script]).read_text()
