"""All steps of a decoder in one launch of csrc/cuda, run in the PTX machine with all blocks alive.

Against the CPU's operators in fp64, with what single steps in the same dtype are off by as measure.
"""

import ctypes
import dataclasses
import subprocess

import decoding
import pytest
import torch
from decoding import BF16, FP16, Case, by_operators, cast
from driven import SOURCES, CudaPtx, needs_nvcc, nvcc, planted
from mock_cuda import FILLED

from ptx_machine import Order, PtxError, needs_compiler

pytestmark = [needs_compiler, needs_nvcc, pytest.mark.thorough]


def check(kernels, case, dtype, multiprocessors=4):
    kernels.begin(multiprocessors, dtype)
    decoding.check(kernels.operator, case, dtype)


def check_tokens(kernels, *given, **more):
    kernels.begin(4, BF16)
    return decoding.check_tokens(kernels.operator, *given, **more)


@pytest.mark.parametrize("lstm", [False, True], ids=["gru", "lstm"])
def test_tokens(lstm):
    steps = set()
    for seed in range(8):
        kernels = CudaPtx("90a", order=Order.RANDOM, seed=seed)
        case = Case(lstm, B=2 if seed % 2 else 11, lens=torch.tensor([4, 1]) if seed % 2 else None)
        steps.add(check_tokens(kernels, case, seed, most=24))
    assert len(steps) > 2, "rows should end at several steps"


LENS = torch.tensor([3, 0, 5])
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool().unsqueeze(1)
CASES = {
    "plain": {},
    "lens": {"lens": LENS},
    "lens of floats": {"lens": torch.tensor([2.5, 9.0, -1.0])},
    "mask": {"mask": MASK},
    "mask and lens": {"mask": MASK, "lens": LENS},
    "dropout": {"dropout_p": 0.4, "lens": LENS},
    "states alone": {"grads": (True, False, False, False)},
    "weights alone": {"grads": (False, False, False, True)},
    "one row, one key": {"B": 1, "Tk": 1, "T": 1},
    "more rows than blocks": {"B": 19, "T": 2},
    "odd sizes": {"B": 11, "T": 3, "Tk": 37, "F": 96, "Dv": 160, "H": 224},
    "many steps": {"B": 2, "T": 60},
    "large": {"scale": 4.0},
}


CELLS = pytest.mark.parametrize("lstm", [False, True], ids=["gru", "lstm"])
DEEP = [pytest.param(FP16, arch, marks=pytest.mark.deep) for arch in ("80", "90a")]


@CELLS
@pytest.mark.parametrize(("dtype", "arch"), [(BF16, "90a"), *DEEP], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_option(name, dtype, arch, lstm):
    check(CudaPtx(arch), Case(lstm, **CASES[name]), dtype)


CUTS = {  # groups, sentences of a block, whether keys and values stay, by multiprocessors and bytes
    (1, 1, 1): ({"B": 5, "H": 64}, 16, 227 << 10),
    (1, 3, 1): ({"B": 8}, 3, 227 << 10),
    (2, 1, 1): ({"B": 12}, 13, 227 << 10),
    (4, 3, 1): ({"B": 27, "Tk": 3}, 12, 227 << 10),
    (1, 2, 0): ({"B": 8, "Tk": 200, "F": 64, "Dv": 64}, 7, 96 << 10),
    (2, 2, 0): ({"B": 17, "Tk": 200, "F": 64, "Dv": 64}, 10, 96 << 10),
}


ORDERS = [
    pytest.param(order, arch, marks=pytest.mark.deep)
    for order in (Order.BACKWARDS, Order.RANDOM)
    for arch in ("80", "90a")
]


@CELLS
@pytest.mark.parametrize(("order", "arch"), [(Order.GIVEN, "90a"), *ORDERS])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_in_any_order_of_blocks_and_warps(cut, order, arch, lstm):
    sizes, multiprocessors, shared = CUTS[cut]
    case, kernels = Case(lstm, **sizes), CudaPtx(arch, shared=shared, order=order, seed=1)
    for backward in (False, True):
        of = case.B, case.Tk, case.F, case.Dv, case.H
        plan = kernels.gpu.plan(lstm, backward, of, multiprocessors, shared)
        assert (plan["groups"], plan["sentences"], plan["resident"]) == cut
    check(kernels, case, BF16, multiprocessors)


class Counting(CudaPtx):
    """Notes of each launch of a decoder how often its blocks met, and the instructions of warps."""

    counter, launches = None, ()

    def _memory(self, address, size, which):
        super()._memory(address, size, which)
        if which == FILLED and size == 128:
            self.counter = address

    def run(self, machine, name, blocks, *launch, **more):
        super().run(machine, name, blocks, *launch, **more)
        if more["cooperative"]:
            met = ctypes.c_uint32.from_address(self.counter).value
            self.launches = (*self.launches, (met / blocks, machine.instructions))


def counted(case, multiprocessors, T):
    kernels = Counting("90a")
    kernels.begin(multiprocessors, BF16)
    by_operators(kernels.operator, case, *cast(*dataclasses.replace(case, T=T).draw(BF16), BF16))
    return kernels.launches


@CELLS
def test_a_step_has_three_barriers(lstm):
    for T in (1, 4):
        (forward, _), (backward, _) = counted(Case(lstm), 4, T)
        assert (forward, backward) == (3 * T - 1, 3 * T)


@pytest.mark.deep
def test_instructions_of_a_step():
    """Of a GRU of 512 units, 32 sentences of 50 keys on half of a GPU: docs/how-it-works.md."""
    case = Case(False, B=32, Tk=50, F=512, Dv=512, H=512)
    one, three = counted(case, 66, 1), counted(case, 66, 3)
    step = [(b[1] - a[1]) / 2 for a, b in zip(one, three, strict=True)]
    forward, backward = (x / (64 * 8) for x in step)  # of each warp of the blocks
    print(f"{forward:.0f} instructions forward, {backward:.0f} backward")
    assert forward < 3000
    assert backward < 3900


WAIT, SYNC = ("group.wait();", "bra"), ("__syncthreads()", "bar.sync")
ARRIVE, ACQUIRE = "red.release.gpu.global.add.u32", "ld.acquire.gpu.global.u32"
BOTH, FORWARD, BACKWARD = "persistent.h", "persistent_forward.h", "persistent_backward.h"
# As MISTAKES of test_cuda.py.
MISTAKES = {
    "no barrier past the queries": (FORWARD, "add_inputs(t);", WAIT),
    "no barrier past the contexts": (FORWARD, "attend(t, s);", WAIT),
    "no barrier past the states": (FORWARD, "if (t + 1 == f.T && !greedy()) break;", WAIT),
    "no barriers backward": ("device.h", "void sync() {", ("wait();", "bra")),
    "a counter that releases nothing": (
        "device.h", "all += blocks;", ("red.release", ARRIVE, ARRIVE.replace("release", "relaxed")),
    ),
    "a counter that acquires nothing": (
        "device.h", "unsigned now = 0;",
        ("ld.acquire", ACQUIRE, ACQUIRE.replace("acquire", "relaxed")),
    ),
    "a block that does not wait for its warps": ("device.h", "void arrive() {", SYNC),
    "a stale copy in the L1": (
        "device.h", "Bytes16 load16_of_others(", ("__ldcg", "ld.global.cg", "ld.global.nc"),
    ),
    "sums before they are laid down": (BOTH, "sums[m][k];", SYNC),
    "parts before they are read": (BOTH, "store(r0 + r, b0 + n, sum);", SYNC),
    "before scores": (FORWARD, "2.0f * kLog2e, this->query);", SYNC),
    "before the softmax": (FORWARD, "sees(p, b, 0, j) ? score : -INFINITY;", SYNC),
    "before values": (FORWARD, "x * dropout.factor(b, j);", SYNC),
    "before the mean": (BACKWARD, "sum * dropout.factor(b, j) + others;", SYNC),
    "after the mean": (BACKWARD, "mean = warp_sum(dot)", SYNC),
    "before keys": (BACKWARD, "this->scores[j] = score;", SYNC),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    kernels = CudaPtx("90a", change=planted(*MISTAKES[mistake]))
    with pytest.raises(PtxError, match=r"race:|where nothing was written|reads it as constant"):
        check(kernels, Case(False, B=9, T=3), BF16)


@pytest.mark.parametrize("after", ["multiply_dense(t);", "clear_best(t);"])
def test_mistakes_with_tokens_are_found(after):
    kernels = CudaPtx("90a", change=planted(FORWARD, after, WAIT))
    with pytest.raises(PtxError, match=r"race:|never comes|nothing was written"):
        check_tokens(kernels, Case(False, B=11), 0, most=4)


def test_tokens_that_are_compared_with_those_of_before_are_found():
    stored = planted(FORWARD, "(t + 1) % 2 * p.B", ("(t + 1)", "st.global"))
    kernels = CudaPtx("90a", change=stored)
    with pytest.raises(AssertionError):
        check_tokens(kernels, Case(False, B=11), 0, most=8)


def test_a_counter_that_was_not_reset_is_found():
    class Left(CudaPtx):
        def _memory(self, address, size, which):
            super()._memory(address, size, which)
            if which == FILLED and size % 128 == 0 and size < 1024:  # what a launch of before left
                (ctypes.c_uint32 * (size // 4)).from_address(address)[0] = 4

    with pytest.raises((PtxError, AssertionError)):
        check(Left("90a"), Case(False, B=9, T=3), BF16)


def test_a_state_that_is_read_a_step_early_is_found(tmp_path):
    """The kernel is compiled anew, from a changed copy of its source."""
    kernels = SOURCES / "cuda" / "kernels"
    text, right = (kernels / FORWARD).read_text(), ": states_at(t, 0);"
    assert text.count(right) == 1
    (tmp_path / FORWARD).write_text(text.replace(right, ": states_at(t + 1, 0);"))
    (tmp_path / "early.cu").write_text(
        f'#include "{FORWARD}"\nnamespace bahdanau_fast::gpu {{\ntemplate __global__ void '
        "persistent_forward<bf16, false>(const Persistent<DecoderForward>);\n}\n"
    )
    made = tmp_path / "early.ptx"
    command = [*nvcc(tmp_path / "early.cu", "90a"), f"-I{kernels}", "-o", str(made)]
    subprocess.run(command, check=True)
    with pytest.raises(PtxError, match="where nothing was written"):
        check(CudaPtx("90a", change=lambda _: made.read_text()), Case(False, B=9, T=3), BF16)
