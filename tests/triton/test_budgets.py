"""Every Triton kernel compiles for GPUs that are not here, within what such a GPU has."""

import pytest
import torch
from machine_code import FMA, blocks, hot
from triton_target import SHARED, TARGETS
from warmed_up import kernels_of

from bahdanau_fast.kernels import plans
from benchmarks.cases import LIST, STEPS_ON_MEMORY

pytestmark = pytest.mark.thorough

# (B,Tq,Tk,H,Dv) of the acceptance shapes; one of odd sizes needs every mask.
FEW = ((256, 1, 400, 512, 512), (16, 4, 50, 512, 512), (64, 50, 50, 512, 512))
FEW += ((16, 512, 512, 512, 512),)
REAL = ((s.batch, s.queries, s.keys, s.hidden, s.value_size) for s in (*LIST, *STEPS_ON_MEMORY))
SOME = (*FEW, (3, 17, 53, 71, 29))
ALL = tuple(dict.fromkeys((*SOME, *REAL)))
# Deep: every real shape in one dtype on one target, the acceptance shapes elsewhere, each target
# and each dtype somewhere.
QUICK = [("sm_90", torch.bfloat16, FEW), ("sm_75", torch.float16, SOME)]
DEEP = [
    ("sm_90", torch.bfloat16, ALL),
    *((target, torch.float32, FEW) for target in ("sm_80", "sm_90", "gfx942")),
    *((target, torch.bfloat16, FEW) for target in ("sm_80", "sm_86", "sm_100")),
    *((target, torch.float16, FEW) for target in ("sm_90", "sm_100", "gfx90a", "gfx950")),
    *(("sm_75", dtype, SOME) for dtype in (torch.float32, torch.bfloat16)),
    *(("gfx1100", dtype, SOME) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
KERNELS = {"decode", "softmax", "grad_weights", "grad_softmax", "step_values", "step_keys"}
KERNELS |= {"step_sums"}


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(run, marks=pytest.mark.deep) for run in DEEP)]
)
def run(request):
    """Target, dtype, and each kernel in each configuration once."""
    target, dtype, shapes = request.param
    kernels = {}
    for shape in shapes:
        kernels |= kernels_of(shape, dtype, target)
    return target, dtype, kernels.values()


def test_every_kernel_fits_and_nothing_spills(run):
    target, dtype, kernels = run
    tanh = {"tables", "grad_tanh"}
    if dtype != torch.float32 and plans.Gpu(132, SHARED[target], target).halves:
        tanh |= {"rational_terms", "rational_scores", "grad_fourier"}
    else:
        tanh |= {"scores", *(["grad_values"] if dtype == torch.float32 else [])}
    assert {kernel.name for kernel in kernels} - {"lengths", "combine"} == KERNELS | tanh
    for kernel in kernels:
        assert kernel.shared <= SHARED[target], kernel.made
        assert kernel.spills == 0, kernel.made


def of_half_types_on_sm_90(run, name):
    target, dtype, kernels = run
    if target != "sm_90" or dtype == torch.float32:
        pytest.skip("machine code is read of half types on sm_90")
    return [kernel for kernel in kernels if kernel.name == name]


def test_many_queries_take_an_eighth_of_a_reciprocal(run):
    for kernel in of_half_types_on_sm_90(run, "rational_scores"):
        elements = 8 * kernel.sizes["BLOCK_Q"] * kernel.sizes["BLOCK_K"] / (32 * kernel.warps)
        fractions = hot(kernel.sass, exponentials=False)
        assert fractions.of("MUFU") == elements / 8, kernel.made
        if kernel.sizes["BLOCK_Q"] == 64:  # less of the rest is shared by fewer
            assert fractions.total() / elements <= 1.4, kernel.made


def test_gradients_of_many_queries_take_two_instructions_each(run):
    for kernel in of_half_types_on_sm_90(run, "grad_fourier"):
        if kernel.sizes["BLOCK_R"] < 128:  # sinusoids are made anew for fewer rows
            continue
        elements = 128 * kernel.sizes["BLOCK_O"] * kernel.sizes["BLOCK_H"] / (32 * kernel.warps)
        products = [block for block in blocks(kernel.sass) if block.of("HGMMA")]
        assert 0 < sum(block.total() for block in products) / elements <= 2.0, kernel.made


def test_a_step_computes_faster_than_memory_is_read(run):
    for kernel in of_half_types_on_sm_90(run, "decode"):
        hidden = kernel.sizes["BLOCK_H"]
        if hidden < 128 or kernel.sizes["BLOCK_D"] != hidden or kernel.sizes["BLOCK_C"]:
            continue  # the bound is for H = Dv, and for rows that outweigh what a key takes
        # (query, key, hidden unit) of a thread in one turn of the loop over tanh.
        elements = kernel.sizes["BLOCK_K"] * hidden / (32 * kernel.warps)
        block = hot(kernel.sass, exponentials=True)
        # Special functions, the fma pipe, and all that is issued, by what of each a cycle takes.
        cycles = max(block.of("MUFU") / 16, block.of(*FMA) / 128, block.total() / 128) / elements
        # An H200 has 132 multiprocessors at 1.98 GHz, and reads 4 bytes an element (half types)
        # at 4.3 TB/s.
        assert 132 * 1.98e9 / cycles > 1.1e12, kernel.made
        if hidden == 512:  # copies are under way while it computes
            assert kernel.sass.count("LDGSTS") >= 16, kernel.made


# ---- no plan asks for more shared memory than the GPU has that it was made for -----------------

# The widest keys and values of a step. Quick: the first.
WIDEST = [
    ("sm_86", torch.float32, 2048, 2048),
    ("sm_86", torch.bfloat16, 2048, 2048),
    ("gfx942", torch.float32, 2048, 2048),
    ("gfx942", torch.float16, 64, 2048),
    ("sm_75", torch.float32, 2048, 2048),
    ("sm_75", torch.float16, 2048, 2048),
]


@pytest.mark.parametrize(
    ("target", "dtype", "hidden", "features"),
    [pytest.param(*case, marks=pytest.mark.deep if k else ()) for k, case in enumerate(WIDEST)],
)
def test_the_widest_step_compiles_within_what_a_gpu_has(target, dtype, hidden, features):
    for batch in (16, 999):
        shape = (batch, 16, 700, hidden, features)
        found = kernels_of(shape, dtype, target, only="decode_kernel")
        assert found
        assert all(kernel.shared <= SHARED[target] for kernel in found.values())


@pytest.mark.parametrize("target", TARGETS)
def test_tf32_is_asked_for_where_triton_has_it(target):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = kernels_of((16, 18, 20, 32, 64), torch.float32, target, only="grad_values")
    finally:
        torch.set_float32_matmul_precision(before)
    asked = {kernel.sizes["PRECISION"] for kernel in found.values()}
    assert asked == {
        "tf32" if target in ("gfx942", "sm_80", "sm_86", "sm_90", "sm_100") else "ieee"
    }


@pytest.mark.parametrize("size", [1, 16, 100, 257, 3000])
def test_blocks_are_powers_of_two(size):
    """A compiler takes no others; the interpreter does."""
    for plan in (plans.combine(size, size), plans.tables(size)):
        for name, block in plan.items():
            assert block & (block - 1) == 0, name
