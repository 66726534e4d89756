"""No plan asks for more shared memory than the GPU has that it was made for."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from warmed_up import kernels_of

from bahdanau_fast.backends.route import is_gpu_step
from bahdanau_fast.backends.triton import call
from bahdanau_fast.kernels import plans
from bahdanau_fast.limits import GPU_FAMILIES

KB = 1024
HAS = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_120": 99, "other": 64}


def test_what_a_block_may_have():
    assert {name: family.shared for name, family in GPU_FAMILIES.items()} == {
        name: size * KB for name, size in HAS.items()
    }


@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_the_tile_of_values_fits(family):
    limits, served = GPU_FAMILIES[family], set()
    for size, wide, queries, batch in itertools.product(
        (2, 4), (False, True), (1, 2, 16), (1, 999)
    ):
        for features in (1, 255, 256, 257, 511, 512, 513, 1024, 1025, 2047, 2048, 2049):
            needs = plans.step_shared(queries, features, size)
            if (wide and size == 2) or not is_gpu_step(queries, features, wide, needs, limits):
                continue
            served.add((size, queries, features))
            sizes = (batch, queries, 1000, 512, features, wide)
            for plan in plans.step(*sizes, 132, size, limits.shared):
                values = plan.blocks["BLOCK_K"] * plan.blocks["BLOCK_D"] * (8 if wide else size)
                assert queries == 1 or values + 4 * KB <= limits.shared, (plan, queries)
    for size in (2, 4):
        assert (size, 1, 2048) in served
        # 16 values of 1025 features are a tile of 2048, 128 KB in fp32.
        several = max(features for of, queries, features in served if of == size and queries > 1)
        large = HAS[family] > 128
        assert several == {2: 2048, 4: 2048 if large else 1024}[size] // (1 + (HAS[family] == 64))


# The widest values of a step, and of its tiles of two sizes; 8 warps, and 4. Quick: the first.
WIDEST = [
    (torch.float32, "tf32", 16, 1024, 64),
    (torch.float32, "tf32", 2, 512, 999),
    (torch.float32, "tf32", 2, 2048, 64),  # no step: 128 KB
    (torch.float32, "ieee", 1, 2048, 64),
    (torch.bfloat16, "ieee", 16, 2048, 64),
    (torch.float16, "ieee", 2, 1024, 64),
]


@pytest.mark.parametrize(
    ("dtype", "precision", "queries", "features", "batch"),
    [pytest.param(*case, marks=pytest.mark.deep if k else ()) for k, case in enumerate(WIDEST)],
)
def test_every_plan_compiles_within_what_sm_86_has(dtype, precision, queries, features, batch):
    step, taken, found = plans.step, [], {}

    def one_of(number, *sizes):
        every = list({str(plan.blocks): plan for plan in step(*sizes)}.values())
        taken.append(len(every))
        return [every[number % len(every)]]

    for plan in range(3):
        with (
            patch.object(plans, "step", partial(one_of, plan)),
            patch.object(call, "precision", lambda: precision),
        ):
            shape = (batch, queries, 700, 64, features)
            found |= kernels_of(shape, dtype, "sm_86", only="step_kernel")
    assert len(found) >= max(taken, default=0)
    assert all(kernel.shared <= HAS["sm_86"] * KB for kernel in found.values())
    assert bool(found) == (features < 2048 or dtype != torch.float32 or queries == 1)
