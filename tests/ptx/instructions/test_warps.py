"""Instructions of whole warps in the PTX machine: shuffles, votes, matrix products."""

import platform
import shutil

import numpy as np
import pytest
from small import applied, kernel, run

from .fragments import bits_of, pieces

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="the machine's core is compiled by g++ for x86-64",
)

RANDOM = np.random.default_rng(1)
S = RANDOM.integers(-(2**31), 2**31, 256).astype(np.int32)
U = S.view(np.uint32)

# ---- warps ---------------------------------------------------------------------------------------

LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("bfly.b32 %d, %a, 5, 31", LANE ^ 5),
        ("up.b32 %d, %a, 3, 0", np.where(LANE >= 3, LANE - 3, LANE)),
        ("down.b32 %d, %a, 3, 31", np.where(LANE + 3 < 32, LANE + 3, LANE)),
        ("idx.b32 %d, %a, 7, 31", np.full(32, 7)),
        ("down.b32 %d, %a, 1, 0x1807", np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(how, source):
    got = applied(f"shfl.sync.{how}, -1;", "u4", U[:32])
    np.testing.assert_array_equal(got, U[:32][source])


def test_votes_and_reductions():
    odd = "and.b32 %r10, %a, 1;\nsetp.eq.u32 %p1, %r10, 1;\n"
    ballot = sum(int(x & 1) << k for k, x in enumerate(U[:32]))
    got = applied(odd + "vote.sync.ballot.b32 %d, %p1, -1;", "u4", U[:32])
    np.testing.assert_array_equal(got, np.full(32, ballot))
    for how, want in (("any", 1), ("all", 0)):
        code = odd + f"vote.sync.{how}.pred %p2, %p1, -1;\nselp.u32 %d, 1, 0, %p2;"
        np.testing.assert_array_equal(applied(code, "u4", U[:32]), np.full(32, want))
    for how, want in (("max.u32", U[:32].max()), ("min.s32", S[:32].min().view("u4"))):
        got = applied(f"redux.sync.{how} %d, %a, -1;", "u4", U[:32])
        np.testing.assert_array_equal(got, np.full(32, want))
    same_value = applied("match.any.sync.b32 %d, %a, -1;", "u4", LANE % 8)
    np.testing.assert_array_equal(same_value, 0x01010101 << LANE % 8)


def test_lanes_that_went_apart_meet_again():
    # Lanes loop 1 to 4 times, then shuffle together.
    code = """and.b32 %r10, %a, 3;
    mov.u32 %r11, 0;
    LOOP: add.s32 %r11, %r11, 1;
    setp.lt.u32 %p1, %r10, %r11;
    @!%p1 bra LOOP;
    shfl.sync.idx.b32 %d, %r11, 3, 31, -1;"""
    np.testing.assert_array_equal(applied(code, "u4", LANE), np.full(32, 4))


def test_lanes_wait_for_those_their_mask_names():
    # The odd lanes come to the shuffle on a longer way, further down in the code.
    code = """and.b32 %r10, %a, 1;
    setp.eq.u32 %p1, %r10, 1;
    @%p1 bra ODD;
    TOGETHER: shfl.sync.bfly.b32 %d, %a, 1, 31, -1;
    bra END;
    ODD: bra TOGETHER;
    END:"""
    np.testing.assert_array_equal(applied(code, "u4", LANE), LANE ^ 1)


# ---- tensor cores --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((16, 8, 16), "bf16"), ((16, 8, 16), "f16"), ((16, 8, 8), "bf16"), ((16, 8, 8), "tf32"),
     ((8, 8, 4), "f64")],
    ids=str,
)  # fmt: skip
def test_tensor_cores(shape, kind):
    m, n, k = shape
    a, b, c = (RANDOM.integers(-8, 8, size).astype(float) for size in ((m, k), (k, n), (m, n)))
    each, result = 2 if kind.endswith("16") else 1, "f64" if kind == "f64" else "f32"
    word = 8 if kind == "f64" else 4
    reg, kinds = ("%fd", "f64") if kind == "f64" else ("%r", "u32")
    parts = [
        bits_of(pieces(x, per), of)
        for x, per, of in ((a, each, kind), (b.T, each, kind), (c, 2, result))
    ]
    counts = [p.shape[1] for p in parts]
    names, body, at = [], [], 4
    for p, (part, count) in enumerate(zip(parts, counts, strict=True)):
        assert part.itemsize == word
        body.append(f"mad.wide.u32 %rd10, %r0, {word * count}, %rd{p + 1};")
        names.append([f"{reg}{at + x}" for x in range(count)])
        body += [
            f"ld.global.{kinds} {name}, [%rd10+{word * x}];" for x, name in enumerate(names[-1])
        ]
        at += count
    out = [f"{reg}{at + x}" for x in range(counts[2])]
    lists = ", ".join("{" + ", ".join(x) + "}" for x in (out, *names))
    body.append(
        f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{result}.{kind}.{kind}.{result} {lists};\n"
        f"mad.wide.u32 %rd10, %r0, {word * counts[2]}, %rd0;"
    )
    body += [f"st.global.{kinds} [%rd10+{word * x}], {name};" for x, name in enumerate(out)]
    got = np.zeros((32, counts[2]), f"f{word}")
    text = kernel("\n".join(body), 4).replace("%fd<9>", "%fd<40>").replace("%r<40>", "%r<60>")
    run(text, [got, *parts])
    np.testing.assert_array_equal(got, pieces(a @ b + c, 2))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(trans):
    halves = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    got = np.zeros((32, 4), np.uint32)
    body = f"""mov.u32 %r10, buf;
    shl.b32 %r11, %r0, 4;
    add.s32 %r12, %r10, %r11;
    mad.wide.u32 %rd10, %r0, 16, %rd1;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd10];
    st.shared.v4.u32 [%r12], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r12];
    mad.wide.u32 %rd10, %r0, 16, %rd0;
    st.global.v4.u32 [%rd10], {{%r4, %r5, %r6, %r7}};"""
    run(kernel(body, 2, ".shared .align 16 .b8 buf[512];"), [got, halves])
    for matrix in range(4):
        x = halves[matrix].T if trans else halves[matrix]
        want = pieces(x, 2).astype(np.uint16).view(np.uint32).ravel()
        np.testing.assert_array_equal(got[:, matrix], want)


STORED = """mov.u32 %r10, buf;
    mad.wide.u32 %rd10, %r0, 16, %rd1;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd10];
    and.b32 %r11, %r0, {rows};
    mad.lo.u32 %r10, %r11, 16, %r10;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r10], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r10];
    mad.wide.u32 %rd10, %r0, 16, %rd0;
    st.global.v4.u32 [%rd10], {{%r4, %r5, %r6, %r7}};"""


def stored(registers, trans="", rows=31):
    """What threads find where stmatrix has stored, and the report; all warps store to one place."""
    got = np.zeros_like(registers)
    text = kernel(STORED.format(trans=trans, rows=rows), 2, ".shared .align 16 .b8 buf[512];")
    return got, run(text, [got, registers], threads=len(registers), lanes_clash=True)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(trans):
    halves = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    parts = [pieces(x.T if trans else x, 2).astype(np.uint16).view(np.uint32) for x in halves]
    got, report = stored(np.ascontiguousarray(np.concatenate(parts, 1)), trans)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(4, 8, 8), halves)
    assert not report.races


def test_warps_may_store_the_same_matrices_to_one_place():
    registers = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    assert not stored(np.tile(registers, (2, 1)))[1].races
    (race,) = stored(np.concatenate([registers, registers + 1]))[1].races
    assert "write and write" in race.text


def test_rows_of_a_matrix_may_be_stored_to_one_place():
    assert not stored(np.ones((32, 4), np.uint32), rows=27)[1].races
