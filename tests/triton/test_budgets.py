"""Every Triton kernel compiles for GPUs that are not here, within what such a GPU has."""

import itertools

import pytest
import torch
from launched import block_of, compiled, launches_of, limits_of

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
    """Target, dtype, and each kernel in each configuration once, compiled."""
    target, dtype, shapes = request.param
    launches = dict.fromkeys(
        itertools.chain.from_iterable(launches_of(shape, dtype, target) for shape in shapes)
    )
    return target, dtype, {launch: compiled(launch, target) for launch in launches}


def test_every_kernel_fits_and_nothing_spills(run):
    target, _, budgets = run
    assert {launch.name for launch in budgets} >= KERNELS
    for launch, budget in budgets.items():
        assert budget.shared <= limits_of(target).shared, launch
        assert budget.spills == 0, launch


def of_half_types_on_sm_90(run, name):
    target, dtype, budgets = run
    if target != "sm_90" or dtype == torch.float32:
        pytest.skip("machine code is read of half types on sm_90")
    return [(launch, budget.sass) for launch, budget in budgets.items() if launch.name == name]


def test_many_queries_take_a_quarter_of_a_reciprocal(run):
    for launch, sass in of_half_types_on_sm_90(run, "scores"):
        factored, elements = block_of(launch, sass, tiles=4, exponentials=False)
        assert factored.special / elements <= 0.3, launch
        assert factored.fma / elements <= 4.0, launch
        # The other branch takes an exponential per element.
        direct, elements = block_of(launch, sass, tiles=2, exponentials=True)
        assert direct.special / elements >= 1.0, launch


def test_a_step_computes_faster_than_memory_is_read(run):
    for launch, sass in of_half_types_on_sm_90(run, "step"):
        if dict(launch.constants)["BLOCK_Q"] == 1:
            block, elements = block_of(launch, sass, tiles=2, exponentials=True)
            cycles = max(block.special / 16, block.fma / 128, block.total / 128) / elements
            # An H200 has 132 multiprocessors at 1.98 GHz, and reads 4 bytes an element (half types,
            # H = Dv) at 4.3 TB/s.
            assert 132 * 1.98e9 / cycles > 1.1e12, launch
