"""Threads meet seldom in a small decoder: where others use the cores too, each meeting is long."""

import shutil
import subprocess

import pytest
from fresh import python

COUNT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, void *, void *);
static long regions;
long regions_so_far(void) { return regions; }
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void *f, void *context) {
  static parallel_for real;
  if (!real)
    real = (parallel_for)dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY),
                               "torch_parallel_for");
  if (end - begin > grain) ++regions;
  return real(begin, end, grain, f, context);
}
"""
DECODE = """
import ctypes, sys, torch, bahdanau_fast as bf
assert bf.backends.available() == ("cpu", "reference")
count = ctypes.CDLL(sys.argv[1]).regions_so_far
count.restype = ctypes.c_long
for units in map(int, sys.argv[2:]):
    layer = bf.AttentionGRU(units, units, num_layers=2)
    inputs, keys = torch.randn(10, 64, units), torch.randn(64, 10, units)
    before = count()
    outputs = layer(inputs, keys=keys)[0]
    forward = count() - before
    outputs.sum().backward()
    print(forward, count() - before - forward)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="makes a library with gcc")
def test_regions_of_threads_in_a_small_decoder(tmp_path):
    # The course's translator: 2 layers of 32 units, batches of 64, 10 steps. A step without its
    # attention is a few microseconds of work.
    library = tmp_path / "count.so"
    (tmp_path / "count.c").write_text(COUNT)
    command = ["gcc", "-shared", "-fPIC", str(tmp_path / "count.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    sizes = "32", "256"
    with_it = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "2"}
    done = python("-W", "ignore", "-c", DECODE, str(library), *sizes, **with_it)
    small, large = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    steps = 10
    assert small[0] <= steps + 2  # the attention's of each step, and the keys'
    assert small[1] <= steps + 2
    assert large[0] >= 5 * steps  # where there is work, all threads share it
