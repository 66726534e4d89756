"""Builds what the machine needs: its own library, and PTX of csrc/cuda."""

from __future__ import annotations

import shutil
from pathlib import Path

from built import built

ROOT = Path(__file__).resolve().parents[1]
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


def ptx(kind: str, arch: str) -> str:
    """PTX of csrc/cuda/op/kernels_<kind>.cu for an architecture, such as "80" or "90a"."""
    if NVCC is None:
        raise FileNotFoundError("nvcc must be installed to compile csrc/cuda")
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-ptx", "-lineinfo", f"-I{SOURCES}"]
    source = SOURCES / "cuda" / "op" / f"kernels_{kind}.cu"
    command = [NVCC, *flags, f"-arch=sm_{arch}", str(source)]
    folders = SOURCES / "common", SOURCES / "cuda"
    files = [source, *sorted(path for folder in folders for path in folder.rglob("*.h"))]
    return built(f"ptx/{kind}_{arch}", files, command).read_text()
