"""csrc/cuda as nvcc compiles it to PTX, and where a mistake can be planted in it."""

import shutil
from pathlib import Path

import pytest
import torch

from ptx_machine import built

__all__ = ["NVCC", "SOURCES", "line_of", "needs_nvcc", "nvcc", "ptx"]

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
