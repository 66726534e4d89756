"""The PTX machine sees what must not be done to memory, and races.

Fences between blocks, clusters, asynchronous copies and products of warpgroups: in the kernels that
have them, where test_cuda.py and test_triton_kernels.py plant mistakes.
"""

import re

import numpy as np
import pytest
from small import kernel, run

from ptx_machine import Buffer, Order, PtxError, needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

ORDERS = Order.GIVEN, Order.BACKWARDS, Order.RANDOM

FOUR = "mad.wide.u32 %rd10, %r2, 4, %rd0;\n"
SHARED = ".shared .align 16 .b8 buf[1024];"
OWN = "mov.u32 %r10, buf;\nshl.b32 %r11, %r0, 2;\nadd.s32 %r12, %r10, %r11;\n"


def data(count=64):
    return np.zeros(count, np.uint32)


MISTAKES = {
    "past the end": (FOUR + "st.global.u32 [%rd10+4], %r0;", "outside of every buffer"),
    "before the beginning": (FOUR + "ld.global.u32 %r4, [%rd10+-4];", "outside of every buffer"),
    "misaligned": (FOUR + "ld.global.v2.u32 {%r4, %r5}, [%rd10];", "misaligned access"),
    "past shared memory": (OWN + "st.shared.u32 [%r12+900], %r0;", "outside of shared memory"),
    "uninitialised": (OWN + "ld.shared.u32 %r4, [%r12];", "where nothing was written"),
    "constant": (FOUR + "ld.global.nc.u32 %r4, [%rd10];\nst.global.u32 [%rd10], %r4;", "constant"),
    "endless": ("LOOP: bra LOOP;", "does not end"),
    "barrier": ("setp.lt.u32 %p1, %r0, 8;\n@%p1 ret;\nbar.sync 0;", "not all threads"),
    "another barrier": ("bar.sync 1;", "not supported"),
    "lanes": (
        "setp.lt.u32 %p1, %r0, 8;\n@%p1 ret;\nshfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;", "has ended"
    ),
    "own mask": ("shfl.sync.bfly.b32 %r4, %r0, 1, 31, 255;", "its own mask leaves out"),
    "other half": ("shfl.sync.bfly.b32 %r4, %r0, 16, 31, 65535;", "which takes no part"),
    "parameters": ("ld.param.u64 %rd4, [p0+8];", "past the parameters"),
    "unknown opcode": ("frob.u32 %r4, %r5;", "frob.u32"),
    "unknown modifier": ("add.frob.f32 %f1, %f2, %f3;", "add.frob.f32"),
    "unknown shape": ("mma.sync.aligned.m1n1k1.f32;", "mma.sync.aligned.m1n1k1.f32"),
    "unknown register": ("mov.u32 %r4, %frob.x;", "%frob"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake):
    code, said = MISTAKES[mistake]
    with pytest.raises(PtxError, match=re.escape(said)) as caught:
        run(kernel(code, 1, SHARED), [data(32)], fuel=100_000)
    assert mistake.startswith("unknown") or "PTX line" in str(caught.value)


def test_a_workspace_has_to_be_written_before_it_is_read():
    code = FOUR + "ld.global.u32 %r4, [%rd10];\nst.global.u32 [%rd10], %r4;"
    run(kernel(code), [data(32)])
    with pytest.raises(PtxError, match=r"workspace.*where nothing was written"):
        run(kernel(code), [Buffer("workspace", data(32), np.zeros(128, np.uint8))])


BOTH = "barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n"
WRITE = OWN + "st.shared.u32 [%r12], 0;\nbar.sync 0;\nst.shared.u32 [%r12], %r0;\n"
NEXT = "xor.b32 %r13, %r11, {};\nadd.s32 %r13, %r10, %r13;\n"
READ = "ld.shared.u32 %r4, [%r13];\n" + FOUR + "st.global.u32 [%rd10], %r4;\n"
# Code, threads, whether it races. XOR 4 is the lane beside, XOR 128 one of another warp.
RACES = {
    "no barrier": (WRITE + NEXT.format(128) + READ, 64, True),
    "a barrier": (WRITE + NEXT.format(128) + "bar.sync 0;\n" + READ, 64, False),
    "lanes without a barrier": (WRITE + NEXT.format(4) + READ, 32, True),
    "a shuffle is no barrier": (
        WRITE + NEXT.format(4) + "shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;\n" + READ, 32, True),
    "a barrier of a cluster of one": (
        WRITE + NEXT.format(128) + BOTH + READ, 64, False),
    "a relaxed barrier of a cluster": (
        WRITE + NEXT.format(128) + BOTH.replace("release", "relaxed") + READ, 64, True),
    "a barrier of a cluster behind a relaxed one": (
        WRITE + NEXT.format(128) + BOTH.replace("release", "relaxed") + BOTH + READ, 64, False),
    "written again too early": (
        WRITE + NEXT.format(128) + "bar.sync 0;\n" + READ + "st.shared.u32 [%r12], %r4;", 64, True),
    "written again behind a barrier": (
        WRITE + NEXT.format(128) + "bar.sync 0;\n" + READ + "bar.sync 0;\n"
        "st.shared.u32 [%r12], %r4;", 64, False),
    "two write one place": (OWN + "st.shared.u32 [%r10], %r0;", 32, True),
    "two write the same": (OWN + "st.shared.u32 [%r10], 7;", 64, False),
    "a reader among many": (
        WRITE + "bar.sync 0;\nld.shared.u32 %r4, [%r10];\nsetp.eq.u32 %p1, %r0, 63;\n"
        "@%p1 st.shared.u32 [%r10], %r4;", 64, True),
    "everybody takes part": (
        "mov.u32 %r10, buf;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.u32 [%r10], 0;\n"
        "bar.sync 0;\natom.shared.add.u32 %r4, [%r10], 1;", 64, False),
    "global memory": (
        FOUR + "st.global.u32 [%rd10], %r0;\nxor.b32 %r4, %r2, 1;\n"
        "mad.wide.u32 %rd11, %r4, 4, %rd0;\nld.global.u32 %r5, [%rd11];", 64, True),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RACES)
def test_races(name, order):
    code, threads, races = RACES[name]
    found = run(kernel(code, 1, SHARED), [data()], threads=threads, order=order)
    assert bool(found) == races, found
    for race in found:
        assert race.count("PTX line") == 2


def test_one_of_the_lanes_may_win_where_that_is_meant():
    for code, threads, races in ((OWN, 32, False), (OWN, 64, True)):
        text = kernel(code + "st.shared.u32 [%r10], %r0;", 1, SHARED)
        assert bool(run(text, [data()], threads=threads, lanes_clash=True)) == races
