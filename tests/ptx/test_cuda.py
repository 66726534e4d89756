"""The machine code of csrc/cuda, run without a GPU: right, without races, within its memory.

What only the PTX machine proves: that the instructions nvcc made are right in any order of blocks
and warps, race nowhere, and read nothing that was not written. Here every kernel runs once, in
bf16; test_cuda_contract.py has the contract.
"""

import re

import decoding
import pytest
import torch
from driven import CudaPtx, needs_nvcc, planted, ptx
from targets import FEW, STEPS

from ptx_machine import Order, PtxError, needs_compiler

pytestmark = [needs_compiler, needs_nvcc, pytest.mark.thorough]


def test_every_kernel_is_right():
    kernels = CudaPtx("90a")
    shares = {name: kernels.worst(name, "bf16") for name in FEW}
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
    for lstm in (False, True):
        kernels.begin(4, torch.bfloat16)
        decoding.check(kernels.operator, decoding.Case(lstm), torch.bfloat16)
    assert kernels.places("bf16") - kernels.launched == set()


def test_nothing_is_computed_in_fp64():
    """A gaming GPU does one operation in fp64 in the time of 64 in fp32."""
    for kind, arch in (("bf16", "90a"), ("f32", "80")):
        assert re.findall(r"\S*\.f64\S*", ptx(kind, arch)) == []


@pytest.mark.deep
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("order", [Order.BACKWARDS, Order.RANDOM])
@pytest.mark.parametrize(
    "case", ["decoder step", "split keys", "lens per query", "eight splits", *STEPS]
)
def test_any_order_of_blocks_and_warps(case, order, arch):
    assert CudaPtx(arch, order=order, seed=1).worst(case, "bf16") <= 1


SYNC, CLUSTER, WAIT = (
    ("__syncthreads()", "bar.sync"),
    ("cluster_barrier();", "barrier.cluster"),
    ("wait_for_copies", "cp.async.wait_group"),
)
RELEASE, RELAXED = "barrier.cluster.arrive.release", "barrier.cluster.arrive.relaxed"
BLOCK, DECODE, COMBINE = "decode_block.h", "decode.h", "decode_combine.h"
BACKWARD, KEYS = "decode_backward.h", "backward_keys.h"
EIGHT, APART = "eight splits", "split keys, 1000 processors"
STEP, LARGEST = "decoder step", "large step, 16 beams"
VECTORS, SHARING = "decoder step, whole vectors", "a cluster shares W_q"
# Mistakes in the machine code that may change no result: what is left out (the file, the text
# before it, the words of source and PTX) or, where there is a third word, becomes that; and where
# it shows.
MISTAKES = {
    "before queries are read": (BLOCK, "smem.sums[warp] = sum_w;", SYNC, STEP),
    "the wait for a stage": (DECODE, "for (int t = 0, slot = 0;", WAIT, VECTORS),
    "before parts lie where rings were": (DECODE, "void store_partials(", SYNC, STEP),
    "before warps meet": (DECODE, "const auto remote", SYNC, STEP),
    "of a cluster, before splits meet": (DECODE, "const auto remote", CLUSTER, EIGHT),
    "of a cluster, a relaxed barrier before splits meet": (
        DECODE, "const auto remote", ("cluster_b", RELEASE, RELAXED), EIGHT,
    ),
    "of a cluster, after splits met": (DECODE, "relaxed_cluster_b", CLUSTER, EIGHT),
    "between parts and a context": (COMBINE, "store_four(context, parts", SYNC, APART),
    "before values are met": (BACKWARD, "smem.weights[index] = x;", SYNC, STEP),
    "before moments": (BACKWARD, "void sum_moments() {", SYNC, STEP),
    "between parts and sums": (KEYS, "add_keys(i0, c0);", SYNC, LARGEST),
    "after scores are loaded": (KEYS, "load_scores(i0);", SYNC, LARGEST),
    "of a cluster, before it shares": (BLOCK, "const T* w_q = static_cast", CLUSTER, SHARING),
    "of a cluster, after it shared": (BLOCK, "*in_block(smem.queries", CLUSTER, SHARING),
    "a stage is read too early": (
        DECODE, "wait_for_copies<kStages - 1>();",
        ("wait_for", "cp.async.wait_group 1", "cp.async.wait_group 2"), VECTORS,
    ),
}  # fmt: skip
# Mistakes that change the result.
FORGOTTEN = {
    "splits of other blocks": (
        DECODE, "const auto remote", ("first + m", "add.s32", "min.s32"), EIGHT,
    ),
    "splits of a turn": (COMBINE, "context[u] += run[u];", ("+=", "add.f32", "max.f32"), APART),
}  # fmt: skip
QUICK = (
    "the wait for a stage", "of a cluster, before splits meet", "of a cluster, after splits met",
    "of a cluster, a relaxed barrier before splits meet", "before moments",
    "a stage is read too early",
)  # fmt: skip


def measured_with(mistake):
    """The case of a mistake, with it."""
    *where, case = mistake
    return CudaPtx("90a", change=planted(*where)).worst(case, "bf16")


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=() if m in QUICK else pytest.mark.deep) for m in MISTAKES]
)
def test_mistakes_are_found(mistake):
    with pytest.raises(PtxError, match=r"race:|where nothing was written|may not have begun"):
        measured_with(MISTAKES[mistake])


@pytest.mark.parametrize("mistake", FORGOTTEN)
def test_what_is_forgotten_is_found(mistake):
    assert not measured_with(FORGOTTEN[mistake]) <= 1
