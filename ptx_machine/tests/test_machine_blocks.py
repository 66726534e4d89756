"""Blocks of a cooperative launch in the PTX machine: barriers between them, and mistakes there."""

import numpy as np
import pytest
from small import kernel, run

from ptx_machine import Buffer, Order, PtxError, needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

ORDERS = [(Order.GIVEN, 0), (Order.BACKWARDS, 0), *((Order.RANDOM, seed) for seed in range(3))]
BLOCKS, THREADS, STEPS = 5, 64, 3
ALL = BLOCKS * THREADS

# In each step a thread stores its number, which the blocks beside it read behind a barrier.
# p0: results, p1: the counter, p2: room for two steps.
ROOM = "and.b32 %r17, %r11, 1;\n"
STORE = (
    f"mad.wide.u32 %rd10, %r17, {4 * ALL}, %rd2;\nmad.wide.u32 %rd11, %r2, 4, %rd10;\n"
    f"st.global.u32 [%rd11], %r10;\nadd.u32 %r12, %r12, {BLOCKS};\n"
)
BEFORE, AFTER = "bar.sync 0;\n", "barrier.sync 0;\n"
ARRIVE = "@!%p1 red.release.gpu.global.add.u32 [%rd1], 1;\n"
WAIT = (
    "@%p1 bra PASS;\nWAIT: ld.acquire.gpu.global.u32 %r13, [%rd1];\n"
    "setp.lt.u32 %p2, %r13, %r12;\n@%p2 bra WAIT;\nPASS:\n"
)
BARRIER = BEFORE + ARRIVE + WAIT + AFTER
READ = "".join(
    f"add.u32 %r14, %r2, {by};\nrem.u32 %r14, %r14, {ALL};\nmad.wide.u32 %rd12, %r14, 4, %rd10;\n"
    f"ld.global.cg.u32 {to}, [%rd12];\n"
    for by, to in ((THREADS, "%r15"), (ALL - THREADS, "%r16"))
)
CODE = (
    "mov.u32 %r10, %r2;\nmov.u32 %r11, 0;\nmov.u32 %r12, 0;\nsetp.ne.u32 %p1, %r0, 0;\nSTEP:\n"
    f"{ROOM}{STORE}{BARRIER}{READ}mad.lo.u32 %r10, %r10, 3, %r15;\nsub.u32 %r10, %r10, %r16;\n"
    f"add.u32 %r11, %r11, 1;\nsetp.lt.u32 %p3, %r11, {STEPS};\n@%p3 bra STEP;\n"
    "mad.wide.u32 %rd11, %r2, 4, %rd0;\nst.global.u32 [%rd11], %r10;"
)


def said_of(code, at_first=0, grid=BLOCKS, zeroed=True, **options):
    """What is wrong with it."""
    results, room = np.zeros(ALL, np.uint32), np.zeros(2 * ALL, np.uint32)
    counter = np.full(1, at_first, np.uint32)
    buffers = [
        Buffer("results", results),
        Buffer("counter", counter, None if zeroed else np.zeros(4, np.uint8)),
        Buffer("room", room, np.zeros(room.nbytes, np.uint8)),
    ]
    options = {"cooperative": True, "threads": THREADS, "fuel": 20_000_000, **options}
    try:
        said = run(kernel(code, 3), buffers, grid, **options)
    except PtxError as error:
        return str(error)
    want = np.arange(ALL, dtype=np.uint32)
    for _ in range(STEPS):
        want = 3 * want + np.roll(want, -THREADS) - np.roll(want, THREADS)
    return "\n".join(said if np.array_equal(results, want) else [*said, "wrong results"])


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_barrier_of_blocks(order, seed):
    assert said_of(CODE, order=order, seed=seed) == ""


RACE = "race: ", "where nothing was written"  # or, as it came about, too early for even that
DEADLOCK = ("waits for a change of counter + 0 that never comes",)
# What is replaced by what, options of the launch, and one of what is said.
MISTAKES = {
    "no barrier": (BARRIER, "", {}, RACE),
    "no barrier of the block before": (BEFORE + ARRIVE, ARRIVE, {}, RACE),
    "no barrier of the block after": (AFTER, "", {}, RACE),
    "no release": ("red.release.gpu", "red", {}, RACE),
    "a relaxed arrival": ("red.release.gpu", "red.relaxed.gpu", {}, RACE),
    "a stored arrival": (ARRIVE, "st.global.u32 [%rd1], %r12;\n", {}, RACE),
    "a relaxed look": ("ld.acquire.gpu", "ld.relaxed.gpu", {}, RACE),
    "a volatile look": ("ld.acquire.gpu", "ld.volatile", {}, RACE),
    "an ordinary look": ("ld.acquire.gpu.global", "ld.global.cg", {}, RACE),
    "read too early": (BARRIER + READ, READ + BARRIER, {}, RACE),
    "room for one step": (ROOM, "mov.u32 %r17, 0;\n", {}, ("race: ", "wrong results")),
    "not zero at first": ("", "", {"at_first": 1}, RACE),
    "never zeroed": ("", "", {"zeroed": False}, ("counter + 0, where nothing was written",)),
    "one too few counted": (f"%r12, {BLOCKS};", f"%r12, {BLOCKS - 1};", {}, RACE),
    "one too many counted": (f"%r12, {BLOCKS};", f"%r12, {BLOCKS + 1};", {}, DEADLOCK),
    "a block is missing": ("", "", {"grid": BLOCKS - 1}, DEADLOCK),
    "one block after another": ("", "", {"cooperative": False}, DEADLOCK),
    "stale": ("ld.global.cg", "ld.global.nc", {}, ("launch that reads it as constant",)),
    "a thread ends early": (
        "STEP:\n", "STEP:\nsetp.eq.u32 %p4, %r2, 9;\n@%p4 ret;\n", {},
        ("a barrier that not all threads of the block reach",)),
}  # fmt: skip


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, order, seed):
    right, wrong, options, known = MISTAKES[mistake]
    assert right in CODE
    code = CODE.replace(right, wrong) if right else CODE
    said = said_of(code, order=order, seed=seed, **options)
    assert any(each in said for each in known), said


def test_blocks_come_in_between_each_other():
    """Each of two blocks draws fifty numbers in turn; in a random order they alternate."""
    code = (
        "mov.u32 %r10, 0;\nDRAW: atom.add.u32 %r11, [%rd1], 1;\n"
        "mad.wide.u32 %rd10, %r11, 4, %rd0;\n"
        "st.global.u32 [%rd10], %r1;\nadd.u32 %r10, %r10, 1;\nsetp.lt.u32 %p1, %r10, 50;\n"
        "@%p1 bra DRAW;"
    )

    def changes(**options):
        drawn = np.zeros(100, np.uint32)
        counter = np.zeros(1, np.uint32)
        assert not run(kernel(code, 2), [drawn, counter], 2, 1, cooperative=True, **options)
        return np.count_nonzero(np.diff(drawn))

    assert changes() == changes(order=Order.BACKWARDS) == 1
    assert max(changes(order=Order.RANDOM, seed=seed) for seed in range(9)) > 5


@pytest.mark.parametrize("order", [Order.GIVEN, Order.BACKWARDS])
def test_a_reader_in_another_block_is_not_forgotten(order):
    """All read a place, then the second block, behind a barrier of its own, writes there."""
    code = (
        "ld.global.u32 %r10, [%rd0];\nbar.sync 0;\nsetp.eq.u32 %p1, %r2, 64;\n"
        "@%p1 st.global.u32 [%rd0], 1;"
    )
    place = np.zeros(1, np.uint32)
    (race,) = run(kernel(code), [place], 2, 64, cooperative=True, order=order)
    assert "thread 0 of block 1" in race
