"""The roofs of this machine, measured in the same run as the kernels under them.

A kernel is limited by reading DRAM, by multiply-adds, or by the special function of the formula. A
CPU has no unit for special functions: our kernels need a quarter of a division per element; other
code calls the library's vectorised tanh.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
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
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
#define CHAINS 12
#define LOOP(NAME, STEP)                                              \
  float NAME(const float* x, long n) {                                \
    vec sums[CHAINS], a = {0}, b = {0};                               \
    for (int k = 0; k < LANES; ++k) a[k] = x[0], b[k] = x[1];         \
    for (int j = 0; j < CHAINS; ++j) sums[j] = a + (float)j;          \
    for (long i = 0; i < n; i += CHAINS * LANES)                      \
      for (int j = 0; j < CHAINS; ++j) sums[j] = STEP;                \
    float total = 0;                                                  \
    for (int j = 0; j < CHAINS; ++j)                                  \
      for (int k = 0; k < LANES; ++k) total += sums[j][k];            \
    return total;                                                     \
  }
LOOP(multiply_add, sums[j] * a + b)
LOOP(divide, b / sums[j])
"""
_OPERATIONS = 96_000_000  # of a call and thread


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
        if "read_all" in _build():
            self.readers["C sum, one thread per core"] = self._read

    def _read(self) -> float:
        share = self.buffer.numel() // self._threads
        starts = [self.buffer.data_ptr() + 4 * share * i for i in range(self._threads)]
        return _together(self._pool, "read_all", starts, share)

    def measure(self, repeats: int = 5) -> Bandwidth:
        """The fastest of some reads by each reader."""
        best = Bandwidth(0.0, "nothing")
        for name, read in self.readers.items():
            rate = self.buffer.nbytes / _fastest(read, repeats=repeats)
            best = max(best, Bandwidth(rate, name), key=lambda found: found.bytes_per_second)
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
    starts = [constants.data_ptr()] * threads
    with ThreadPoolExecutor(threads) as pool:
        calls: dict[str, tuple[Callable[[], object], int]] = {
            name: (partial(_together, pool, name, starts, _OPERATIONS), _OPERATIONS * threads)
            for name in _build()
            if name != "read_all"
        }
        calls["tanh"] = (lambda: torch.tanh(x, out=out), x.numel())
        return {n: work / _fastest(call, seconds=seconds) for n, (call, work) in calls.items()}


def _together(pool: ThreadPoolExecutor, name: str, starts: list[int], count: int) -> float:
    """A C function on several addresses at a time: ctypes releases the interpreter lock."""
    return sum(pool.map(_build()[name], starts, [count] * len(starts)))


def _fastest(call: Callable[[], object], repeats: int = 1, seconds: float = 0.0) -> float:
    """Seconds of the fastest of so many calls, or of so many as fit into ``seconds``."""
    timer = timeit.Timer(call)
    timer.timeit(1)
    return min(timer.repeat(max(repeats, int(seconds / timer.timeit(1))), number=1))


@cache
def _build() -> dict[str, Callable[[int, int], float]]:
    """The C functions; none without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "roofs.c"), Path(folder, "roofs.so")
        source.write_text(_SOURCE)
        command = [compiler, "-x", "c", "-O3", "-march=native", "-shared", "-fPIC"]
        done = subprocess.run([*command, str(source), "-o", str(binary)], check=False)
        if done.returncode != 0:
            return {}
        library = ctypes.CDLL(str(binary))
    functions: dict[str, Callable[[int, int], float]] = {}
    for name in ("read_all", "multiply_add", "divide"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]
        functions[name] = function
    return functions
