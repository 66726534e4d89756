"""The read bandwidth of this machine's memory, measured in the same run as the kernels under it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

BUFFER_BYTES = 768 << 20

# Sixteen independent vector sums: enough loads in flight to be limited by memory, not by latency.
_SOURCE = """
typedef float v8 __attribute__((vector_size(32), aligned(4)));
float read_all(const float* x, long n) {
  v8 sums[16] = {0};
  long i = 0;
  for (; i + 128 <= n; i += 128)
    for (int j = 0; j < 16; ++j) sums[j] += *(const v8*)(x + i + 8 * j);
  float total = 0;
  for (int j = 0; j < 16; ++j) for (int k = 0; k < 8; ++k) total += sums[j][k];
  for (; i < n; ++i) total += x[i];
  return total;
}
"""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, and the reader that reached them."""

    bytes_per_second: float
    reader: str


class Reader:
    """A buffer far larger than the caches, and ways to read it once."""

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        self.buffer = torch.ones(nbytes // 4)
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        self.readers: dict[str, Callable[[], object]] = {"torch.sum": self.buffer.sum}
        if _read_all() is not None:
            self.readers["C sum, one thread per core"] = self._read

    def _read(self) -> float:
        share, read = self.buffer.numel() // self._threads, _read_all()
        assert read is not None
        starts = [self.buffer.data_ptr() + 4 * share * i for i in range(self._threads)]
        # ctypes releases the interpreter lock, so the threads read side by side.
        return sum(self._pool.map(read, starts, [share] * self._threads))

    def measure(self, repeats: int = 5) -> Bandwidth:
        """The fastest of some reads by each reader."""
        best = Bandwidth(0.0, "nothing")
        for name, read in self.readers.items():
            read()
            fastest = min(timeit.repeat(read, number=1, repeat=repeats))
            rate = Bandwidth(self.buffer.nbytes / fastest, name)
            best = max(best, rate, key=lambda found: found.bytes_per_second)
        return best


@cache
def _read_all() -> Callable[[int, int], float] | None:
    """The C function; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "roofs.c"), Path(folder, "roofs.so")
        source.write_text(_SOURCE)
        command = [compiler, "-x", "c", "-O3", "-march=native", "-shared", "-fPIC"]
        done = subprocess.run([*command, str(source), "-o", str(binary)], check=False)
        if done.returncode != 0:
            return None
        read: Callable[[int, int], float] = ctypes.CDLL(str(binary)).read_all
    read.restype, read.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]  # type: ignore[attr-defined]
    return read
