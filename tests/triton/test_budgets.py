"""Every Triton kernel compiles for GPUs that are not here, within what such a GPU has."""

import pytest
import torch
from warmed_up import kernels_of, limits_of

from benchmarks.machine_code import hot
from benchmarks.workloads.shapes import LIST, STEPS_ON_MEMORY

# (B,Tq,Tk,H,Dv) of the acceptance shapes; one of odd sizes needs every mask.
FEW = ((256, 1, 400, 512, 512), (16, 512, 512, 512, 512))
REAL = ((s.batch, s.queries, s.keys, s.hidden, s.value_size) for s in (*LIST, *STEPS_ON_MEMORY))
ALL = tuple(dict.fromkeys((*FEW, (3, 17, 53, 71, 29), *REAL)))
# Deep: every real shape in one dtype on one target, the acceptance shapes elsewhere, each target
# and each dtype somewhere.
QUICK = ("sm_90", torch.bfloat16, FEW)
DEEP = [
    ("sm_90", torch.bfloat16, ALL),
    *((target, torch.float32, FEW) for target in ("sm_80", "sm_90", "gfx942")),
    ("sm_80", torch.bfloat16, FEW),
    *((target, torch.float16, FEW) for target in ("sm_90", "sm_100")),
]
KERNELS = {"step", "scores", "softmax", "tables"}
KERNELS |= {"grad_weights", "grad_softmax", "grad_values", "grad_tanh"}


@pytest.fixture(
    scope="module", params=[QUICK, *(pytest.param(run, marks=pytest.mark.deep) for run in DEEP)]
)
def run(request):
    """Target, dtype, and each kernel in each configuration once."""
    target, dtype, shapes = request.param
    kernels = {}
    for shape in shapes:
        kernels |= kernels_of(shape, dtype, target)
    return target, dtype, kernels.values()


def test_every_kernel_fits_and_nothing_spills(run):
    target, _, kernels = run
    assert {kernel.name for kernel in kernels} >= KERNELS
    for kernel in kernels:
        assert kernel.shared <= limits_of(target).shared, kernel.made
        assert kernel.spills == 0, kernel.made


def of_half_types_on_sm_90(run, name):
    target, dtype, kernels = run
    if target != "sm_90" or dtype == torch.float32:
        pytest.skip("machine code is read of half types on sm_90")
    return [kernel for kernel in kernels if kernel.name == name]


def counted(kernel, tiles, exponentials):
    """The kernel's loop over tanh, and how many (query, key, hidden unit) a thread has in it.

    Args:
        kernel: compiled.
        tiles: that one turn of the loop takes.
        exponentials: whether each element takes one.
    """
    elements = kernel.sizes["BLOCK_K"] * tiles * kernel.sizes["BLOCK_H"]
    return hot(kernel.sass, exponentials), elements / (32 * kernel.warps)


def test_many_queries_take_a_quarter_of_a_reciprocal(run):
    for kernel in of_half_types_on_sm_90(run, "scores"):
        factored, elements = counted(kernel, tiles=4, exponentials=False)
        assert factored.special / elements <= 0.3, kernel.made
        assert factored.fma / elements <= 4.0, kernel.made
        # The other branch takes an exponential per element.
        direct, elements = counted(kernel, tiles=2, exponentials=True)
        assert direct.special / elements >= 1.0, kernel.made


def test_a_step_computes_faster_than_memory_is_read(run):
    for kernel in of_half_types_on_sm_90(run, "step"):
        if kernel.sizes["BLOCK_Q"] == 1:
            block, elements = counted(kernel, tiles=2, exponentials=True)
            cycles = max(block.special / 16, block.fma / 128, block.total / 128) / elements
            # An H200 has 132 multiprocessors at 1.98 GHz, and reads 4 bytes an element (half types,
            # H = Dv) at 4.3 TB/s.
            assert 132 * 1.98e9 / cycles > 1.1e12, kernel.made
