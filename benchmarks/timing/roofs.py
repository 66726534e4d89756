"""The roofs of this machine, measured in the same run as the kernels under them.

A kernel is limited by reading DRAM, by multiply-adds, or by the special function of the formula. A
CPU has no unit for special functions: our kernels need a quarter of a division per element; other
code calls the library's vectorised tanh.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
typedef float v16 __attribute__((vector_size(64)));
#define CHAINS 12
#define LOOP(NAME, STEP)                                              \
  float NAME(const float* x, long n) {                                \
    v16 sums[CHAINS], a = {0}, b = {0};                               \
    for (int k = 0; k < 16; ++k) a[k] = x[0], b[k] = x[1];            \
    for (int j = 0; j < CHAINS; ++j) sums[j] = a + (float)j;          \
    for (long i = 0; i < n; ++i)                                      \
      for (int j = 0; j < CHAINS; ++j) sums[j] = STEP;                \
    float total = 0;                                                  \
    for (int j = 0; j < CHAINS; ++j)                                  \
      for (int k = 0; k < 16; ++k) total += sums[j][k];               \
    return total;                                                     \
  }
LOOP(multiply_add, sums[j] * a + b)
LOOP(divide, b / sums[j])
"""
_PER_ROUND = 12 * 16  # CHAINS vectors of 16


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
        built = _build()
        if built is not None:
            kernel = built["read_all"]
            self.readers["C sum, one thread per core"] = lambda: self._read(kernel)

    def _read(self, kernel: Callable[[int, int], float]) -> float:
        # ctypes releases the interpreter lock during the call.
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


def compute_roofs(seconds: float = 0.3) -> dict[str, float]:
    """Operations per second of all cores together, on data in registers or caches.

    ``multiply_add`` and ``divide`` in fp32 registers, where there is a C compiler; ``tanh`` is
    ``torch.tanh`` on 256 KiB per thread.

    Args:
        seconds: for each roof, about.
    """
    threads = torch.get_num_threads()
    x = torch.full((threads * (1 << 16),), 0.5)
    out = torch.empty_like(x)
    constants = torch.tensor([0.999, 0.001])  # the sums neither grow nor become denormal
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    rounds = 500_000
    with ThreadPoolExecutor(threads) as pool:
        for name, kernel in (_build() or {}).items():
            if name != "read_all":

                def run(kernel: Callable[[int, int], float] = kernel) -> object:
                    given = [constants.data_ptr()] * threads
                    return list(pool.map(lambda at: kernel(at, rounds), given))

                calls[name] = (run, rounds * _PER_ROUND * threads)
        calls["tanh"] = (lambda: torch.tanh(x, out=out), x.numel())
        return {name: work / _fastest(call, seconds) for name, (call, work) in calls.items()}


def _fastest(call: Callable[[], object], seconds: float) -> float:
    call()
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def _build() -> dict[str, Callable[[int, int], float]] | None:
    """The C functions, or None without a compiler."""
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
        library = ctypes.CDLL(str(binary))
    functions: dict[str, Callable[[int, int], float]] = {}
    for name in ("read_all", "multiply_add", "divide"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]
        functions[name] = function
    return functions
