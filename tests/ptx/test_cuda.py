"""The real PTX of csrc/cuda, run without a GPU: right, without races, within its memory.

A part of what ``make ptx`` runs, on every entry for sm_80 and the clusters of sm_90a.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import DTYPES, STEPS, Drivers, measure_row, measure_step
from cuda_on_host import KINDS
from machine import build
from machine.launch import Order
from small import run

pytestmark = pytest.mark.skipif(build.NVCC is None, reason="nvcc is not on this machine")

# All dtypes on sm_80; of clusters, which no dtype changes, one.
BUILT = [("80", kind) for kind in KINDS] + [("90a", "bf16")]
FEW = (
    "no lens", "lens per query", "whole row masked", "one of each", "wide values", "decoder step",
    "split keys, lens inside a chunk", "sliced inputs", "large step", "large step, beams",
    "large step, 16 beams", "long step",
)  # fmt: skip


@pytest.fixture(scope="module")
def drivers(request):
    if len(request.session.items) > len(FEW):  # fewer may not need all the kinds
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: build.ptx(each[1], each[0]), BUILT))
            list(pool.map(lambda kind: build.driver(kind, *KINDS[kind]), KINDS))
    running = {}

    def of(arch, **options):
        key = arch, tuple(options.items())
        if key not in running:
            running[key] = Drivers(arch, **options)
        return running[key]

    yield of
    for each in running.values():
        each.close()


def check(drivers, measure, arch, name, dtype, **options):
    assert measure(drivers(arch, **options), name, dtype) <= 1


@pytest.mark.parametrize("row", FEW)
def test_contract(drivers, row):
    dtypes = list(DTYPES)
    for dtype in {dtypes[FEW.index(row) % 4], "fp32"}:
        check(drivers, measure_row, "80", row, dtype)
    check(drivers, measure_row, "90a", row, "bf16")


@pytest.mark.parametrize("order", [Order.BACKWARDS, Order.RANDOM])
@pytest.mark.parametrize("row", ["decoder step", "split keys", "lens per query"])
def test_any_order_of_blocks_and_warps(drivers, row, order):
    for arch in ("80", "90a"):
        check(drivers, measure_row, arch, row, "bf16", order=order, seed=1)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_one_launch(drivers, name):
    check(drivers, measure_step, "90a", name, "bf16")
    check(drivers, measure_step, "80", name, "fp32" if STEPS[name].Dk is None else "fp16")


EXPONENTIAL = """
#include "cuda/kernels/tanh.h"
extern "C" __global__ void k(float* y, const float* x) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  y[at] = bahdanau_fast::gpu::exp_of_two<float>(x[at]);
}
"""


def test_exponentials_of_queries_and_keys_are_exact_to_an_ulp(tmp_path):
    source, made = tmp_path / "k.cu", tmp_path / "k.ptx"
    source.write_text(EXPONENTIAL)
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-ptx", "-arch=sm_80", f"-I{build.SOURCES}"]
    subprocess.run([build.NVCC, *flags, source, "-o", made], check=True)
    x = np.linspace(-40, 40, 256 * 255 + 1, dtype=np.float32)
    x.resize(256 * 256)  # with zeros
    y = np.zeros_like(x)
    run(made.read_text(), [y, x], grid=256, threads=256)
    exact = np.exp(2 * x.astype(np.longdouble))
    assert np.abs((y - exact) / np.spacing(exact.astype(np.float32))).max() <= 0.9
    np.testing.assert_array_equal(y[x == 0], 1)
