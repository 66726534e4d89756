"""The machine code of csrc/cuda, run without a GPU: right, without races, within its memory.

What only the PTX machine proves: that the instructions nvcc made are right in any order of blocks
and warps, race nowhere, and read nothing that was not written. Here every kernel runs once, in
bf16; ``make ptx`` runs every case in every dtype.
"""

import subprocess

import numpy as np
import pytest
from built import needs_compiler
from cases import STEPS, measured
from driven import CudaPtx, needs_nvcc
from machine import build
from machine.launch import Order
from small import run
from table import name_of

pytestmark = [needs_compiler, needs_nvcc]

FEW = (
    "lens per query", "decoder step", "fp32 in small", "large step, 16 beams",
    "long step of few units", "split keys, lens inside a chunk", "keys projected, cut",
    "keys are values, beams", "a cluster shares W_q",
)  # fmt: skip


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_every_kernel_is_right(arch):
    kernels = CudaPtx(arch)
    shares = {name: measured(kernels, name, "bf16") for name in FEW}
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
    missed = {place for place in kernels.places() if place[0] == "bf16"} - kernels.took()
    assert sorted(map(name_of, missed)) == []


@pytest.mark.deep
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("order", [Order.BACKWARDS, Order.RANDOM])
@pytest.mark.parametrize("case", ["decoder step", "split keys", "lens per query", *STEPS])
def test_any_order_of_blocks_and_warps(case, order, arch):
    assert measured(CudaPtx(arch, order=order, seed=1), case, "bf16") <= 1


EXPONENTIAL = """
#include "cuda/kernels/tanh.h"
extern "C" __global__ void k(float* y, const float* x) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  y[at] = bahdanau_fast::gpu::exp_of_two<float>(x[at]);
}
"""


@pytest.mark.deep
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
