"""The DRAM read bandwidth of this machine, measured beside what it is compared with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Bandwidth", "Reader"]

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
    """Bytes per second, and which reader reached it."""

    bytes_per_second: float
    reader: str


class Reader:
    """A buffer far larger than the caches, and ways to read it once."""

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        self.buffer = torch.ones(nbytes // 4)
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        self.readers: dict[str, Callable[[], object]] = {"torch.sum": self.buffer.sum}
        kernel = _build()
        if kernel is not None:
            self.readers["C sum, one thread per core"] = lambda: self._read(kernel)

    def _read(self, kernel: Callable[[int, int], float]) -> float:
        # ctypes lets go of the interpreter lock for the time of the call.
        share = self.buffer.numel() // self._threads
        starts = [self.buffer.data_ptr() + 4 * share * i for i in range(self._threads)]
        return sum(self._pool.map(lambda start: kernel(start, share), starts))

    def measure(self, repeats: int = 5) -> Bandwidth:
        """The fastest of some reads by each reader."""
        best = Bandwidth(0.0, "nothing")
        for name, read in self.readers.items():
            read()
            for _ in range(repeats):
                start = time.perf_counter()
                read()
                rate = 4 * self.buffer.numel() / (time.perf_counter() - start)
                if rate > best.bytes_per_second:
                    best = Bandwidth(rate, name)
        return best


def _build() -> Callable[[int, int], float] | None:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "read.c"), Path(folder, "read.so")
        source.write_text(_SOURCE)
        command = [compiler, "-x", "c", "-O3", "-march=native", "-shared", "-fPIC"]
        done = subprocess.run([*command, str(source), "-o", str(binary)], check=False)
        if done.returncode != 0:
            return None
        function = ctypes.CDLL(str(binary)).read_all
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]
    typed: Callable[[int, int], float] = function
    return typed
