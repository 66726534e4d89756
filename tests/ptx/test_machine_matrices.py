"""Matrices that the lanes of a warp hold together, in the PTX machine: mma, ldmatrix, stmatrix."""

import numpy as np
import pytest
from built import needs_compiler
from fragments import bits_of, pieces
from small import kernel, run

pytestmark = needs_compiler

RANDOM = np.random.default_rng(1)
HALVES = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
SHARED = ".shared .align 16 .b8 buf[512];"


def registers(prefix, first, count):
    return [f"%{prefix}{first + k}" for k in range(count)]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((16, 8, 16), "bf16"), ((16, 8, 16), "f16"), ((16, 8, 8), "bf16"), ((16, 8, 8), "tf32"),
     ((8, 8, 4), "f64")],
    ids=str,
)  # fmt: skip
def test_tensor_cores(shape, kind):
    m, n, k = shape
    a, b, c = (RANDOM.integers(-8, 8, size).astype(float) for size in ((m, k), (k, n), (m, n)))
    each, wide = 2 if kind.endswith("16") else 1, kind == "f64"
    word, prefix, move, sums = (8, "fd", "f64", "f64") if wide else (4, "r", "u32", "f32")
    drawn = (a, each, kind), (b.T, each, kind), (c, 2, sums)
    parts = [bits_of(pieces(x, per), of) for x, per, of in drawn]
    held, body, first = [], [], 4
    for p, part in enumerate(parts):
        count = part.shape[1]
        held.append(registers(prefix, first, count))
        body.append(f"mad.wide.u32 %rd10, %r0, {word * count}, %rd{p + 1};")
        body += [f"ld.global.{move} {x}, [%rd10+{word * at}];" for at, x in enumerate(held[-1])]
        first += count
    out = registers(prefix, first, parts[2].shape[1])
    lists = ", ".join("{" + ", ".join(x) + "}" for x in (out, *held))
    body.append(f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{sums}.{kind}.{kind}.{sums} {lists};")
    body.append(f"mad.wide.u32 %rd10, %r0, {word * len(out)}, %rd0;")
    body += [f"st.global.{move} [%rd10+{word * at}], {x};" for at, x in enumerate(out)]
    got = np.zeros((32, len(out)), f"f{word}")
    run(kernel("\n".join(body), 4), [got, *parts])
    np.testing.assert_array_equal(got, pieces(a @ b + c, 2))


def moved(code, given, threads=32):
    """What threads find in %r4 to %r7 after code that uses shared memory, and the report.

    Thread n begins with row n of the data there, and with its address in %r12.
    """
    body = f"""mov.u32 %r10, buf;
    mad.lo.u32 %r12, %r0, 16, %r10;
    mad.wide.u32 %rd10, %r0, 16, %rd1;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd10];
    {code}
    mad.wide.u32 %rd10, %r0, 16, %rd0;
    st.global.v4.u32 [%rd10], {{%r4, %r5, %r6, %r7}};"""
    got = np.zeros((threads, 4), np.uint32)
    return got, run(kernel(body, 2, SHARED), [got, given], threads=threads, lanes_clash=True)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(trans):
    code = f"""st.shared.v4.u32 [%r12], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r12];"""
    got, _ = moved(code, HALVES)
    for matrix, x in enumerate(HALVES):
        want = pieces(x.T if trans else x, 2).astype(np.uint16).view(np.uint32).ravel()
        np.testing.assert_array_equal(got[:, matrix], want)


def stored(registers, trans="", rows=31):
    """What threads find where stmatrix has stored, and the report; all warps store to one place."""
    code = f"""and.b32 %r11, %r0, {rows};
    mad.lo.u32 %r10, %r11, 16, %r10;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r10], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r10];"""
    return moved(code, registers, len(registers))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(trans):
    parts = [pieces(x.T if trans else x, 2).astype(np.uint16).view(np.uint32) for x in HALVES]
    got, report = stored(np.ascontiguousarray(np.concatenate(parts, 1)), trans)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(4, 8, 8), HALVES)
    assert not report.races


def test_places_where_several_store():
    """Warps that store the same matrices do not race, nor rows of one that lie in one place."""
    given = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    assert not stored(np.tile(given, (2, 1)))[1].races
    (race,) = stored(np.concatenate([given, given + 1]))[1].races
    assert "write and write" in race.text
    assert not stored(np.ones((32, 4), np.uint32), rows=27)[1].races
