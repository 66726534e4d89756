"""The instructions of the PTX machine mean what PTX means."""

import platform
import shutil

import numpy as np
import pytest
import torch
from small import applied

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="the machine's core is compiled by g++ for x86-64",
)

RANDOM = np.random.default_rng(1)
ODD = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1.5], np.float32)
A, B = (np.repeat(ODD, 11).astype(np.float32), np.tile(ODD, 11).astype(np.float32))
X, Y, Z = RANDOM.standard_normal((3, 512)).astype(np.float32)


def same(got, want):
    """Bit for bit, but for the payload of a NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got[~nan].view(bits), want[~nan].view(bits))


# ---- floating point ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("add.f32 %d, %a, %b;", lambda a, b: a + b),
        ("sub.rn.f32 %d, %a, %b;", lambda a, b: a - b),
        ("mul.f32 %d, %a, %b;", lambda a, b: a * b),
        ("div.rn.f32 %d, %a, %b;", lambda a, b: a / b),
        ("neg.f32 %d, %a;", lambda a, b: -a),
        ("abs.f32 %d, %a;", lambda a, b: np.abs(a)),
        ("copysign.f32 %d, %a, %b;", lambda a, b: np.copysign(b, a)),
        ("min.NaN.f32 %d, %a, %b;", np.minimum),
        ("max.NaN.f32 %d, %a, %b;", np.maximum),
    ],
)
def test_single_precision(code, want):
    with np.errstate(all="ignore"):
        expected = want(A, B)
    got = applied(code, np.float32, A, B)
    zero = (expected == 0) & np.array("NaN" in code)  # numpy's sign of zero is open there
    same(got[~zero], expected[~zero])
    assert (got[zero] == 0).all()


def test_the_larger_of_a_number_and_nan_is_the_number():
    got = applied("max.f32 %d, %a, %b;", np.float32, A, B)
    np.testing.assert_array_equal(got, np.fmax(A, B))
    both = applied("min.f32 %d, %a, %b;", np.float32, *np.array([[0.0, -0.0], [-0.0, 0.0]], "f4"))
    assert np.signbit(both).all()


def test_ftz_takes_and_gives_no_subnormal_numbers():
    tiny = np.array([1e-40, 1e-30, -1e-40], np.float32)
    scale = np.array([1e20, 1e-10, 1.0], np.float32)
    np.testing.assert_array_equal(applied("mul.ftz.f32 %d, %a, %b;", "f4", tiny, scale), [0, 0, 0])
    assert applied("mul.f32 %d, %a, %b;", "f4", tiny, scale)[0] > 9e-21


@pytest.mark.parametrize("mode", ["rn", "rm", "rp", "rz"])
def test_fma_rounds_once(mode):
    x = np.float32(1 + 2**-12)
    a, b = np.full(2, x), np.array([x, -x])
    c = np.array([-1, 1], np.float32)
    exact = 2.0**-11 + 2.0**-24
    np.testing.assert_array_equal(
        applied(f"fma.{mode}.f32 %d, %a, %b, %c;", "f4", a, b, c), [exact, -exact]
    )
    got = applied(f"fma.{mode}.f32 %d, %a, %b, %c;", "f4", X, Y, Z).astype(np.longdouble)
    true = X.astype(np.longdouble) * Y + Z
    ulp = np.spacing(np.abs(got).astype(np.float32))
    error = got - true
    low, high = {"rn": (-0.5, 0.5), "rm": (-1, 0), "rp": (0, 1), "rz": (-1, 1)}[mode]
    assert ((error >= low * ulp) & (error <= high * ulp)).all()
    if mode == "rz":
        assert (np.abs(got) <= np.abs(true)).all()


def test_fma_in_double_precision_rounds_once():
    a = np.array([1 + 2.0**-30, 3.0])
    c = np.array([-1 - 2.0**-29, 2.0])
    got = applied("fma.rn.f64 %d, %a, %b, %c;", "f8", a, a, c)
    np.testing.assert_array_equal(got, [2.0**-60, 11.0])


def test_half_precision():
    a, b = (x.astype(np.float16) for x in (X, Y))
    for op, want in (("add", a + b), ("mul", a * b), ("sub", a - b)):
        got = applied(f"{op}.f16 %d, %a, %b;", np.float16, a, b)
        same(got, want)
    pairs = a.view(np.uint32), b.view(np.uint32)
    got = applied("fma.rn.f16x2 %d, %a, %b, %a;", np.uint32, *pairs).view(np.float16)
    same(got, (a.astype("f8") * b + a).astype(np.float16))


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARE)
def test_comparisons(name):
    code = "setp.{}.{} %p1, %a, %b;\nselp.u32 %d, 1, 0, %p1;"
    nan = np.isnan(A) | np.isnan(B)
    want = COMPARE[name](A, B)
    got = applied(code.format(name, "f32"), "u4", A, B)
    np.testing.assert_array_equal(got, want & ~nan)
    got = applied(code.format(name + "u", "f32"), "u4", A, B)
    np.testing.assert_array_equal(got, want | nan)
    for dtype, kind in (("i4", "s32"), ("u4", "u32"), ("i8", "s64")):
        a, b = RANDOM.integers(0, 5, (2, 64)) - 2
        a, b = a.astype(dtype), b.astype(dtype)
        got = applied(code.format(name, kind), "u4", a, b)
        np.testing.assert_array_equal(got, COMPARE[name](a, b))


def test_comparisons_join_and_give_both():
    code = """setp.lt.f32 %p1, %a, 0f00000000;
    setp.gt.and.f32 %p2|%p3, %b, 0f00000000, %p1;
    selp.u32 %r10, 1, 0, %p2;
    selp.u32 %r11, 2, 0, %p3;
    or.b32 %d, %r10, %r11;"""
    got = applied(code, "u4", X, Y)
    np.testing.assert_array_equal(got & 1, (Y > 0) & (X < 0))
    np.testing.assert_array_equal(got >> 1, ~(Y > 0) & (X < 0))


APPROXIMATE = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22, X * 10),
    "rsqrt.approx.f32": (lambda x: x**-0.5, 2.0**-22.9, np.abs(X)),
    "sqrt.approx.f32": (np.sqrt, 2.0**-23, np.abs(X)),
    "tanh.approx.f32": (np.tanh, 2.0**-11, X * 3),
    "lg2.approx.f32": (np.log2, 2.0**-22, np.abs(X) + 4),
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximations_use_the_room_they_have(opcode):
    function, error, x = APPROXIMATE[opcode]
    true = function(x.astype(np.float64))
    drawn = [applied(f"{opcode} %d, %a;", "f4", x, seed=seed) for seed in range(4)]
    off = np.array([np.abs(y - true) / np.abs(true) for y in drawn])
    assert off.max() <= error
    assert off.max() > 0.7 * error
    same(drawn[0], applied(f"{opcode} %d, %a;", "f4", x, seed=0))
    assert (drawn[0] != drawn[1]).any()


def test_a_reciprocal_is_off_by_an_ulp_at_most():
    true = 1 / X.astype(np.float64)
    drawn = np.array([applied("rcp.approx.ftz.f32 %d, %a;", "f4", X, seed=k) for k in range(4)])
    off = np.abs(drawn - true) / np.spacing(np.abs(true).astype(np.float32))
    assert off.max() <= 1
    assert off.max() > 0.9


def test_exact_powers_of_two_are_exact():
    # libdevice's tanh in fp64 takes them from ex2.approx.
    x = np.arange(-60, 61).astype(np.float32)
    np.testing.assert_array_equal(applied("ex2.approx.ftz.f32 %d, %a;", "f4", x), np.exp2(x))


# ---- conversions ---------------------------------------------------------------------------------


def test_conversions_between_floats():
    x = np.concatenate([X, ODD, np.array([65504, 65520, 6e-8, 2.0**-25], np.float32)])
    with np.errstate(over="ignore"):
        same(applied("cvt.rn.f16.f32 %d, %a;", np.float16, x), x.astype(np.float16))
    got = applied("cvt.rn.bf16.f32 %d, %a;", "u2", x)
    want = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[number], want[number])
    wide = RANDOM.standard_normal(300)
    same(applied("cvt.rn.f32.f64 %d, %a;", "f4", wide), wide.astype(np.float32))
    down = applied("cvt.rz.f32.f64 %d, %a;", "f4", wide)
    assert (np.abs(down) <= np.abs(wide)).all()
    same(applied("cvt.sat.f32.f32 %d, %a;", "f4", X), np.clip(X, 0, 1))
    pairs = applied("cvt.rn.f16x2.f32 %d, %a, %b;", "u4", X, Y).view(np.float16).reshape(-1, 2)
    same(pairs[:, 0].copy(), Y.astype(np.float16))
    same(pairs[:, 1].copy(), X.astype(np.float16))


def test_conversions_to_integers_stop_at_their_limits():
    x = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf], np.float32)
    got = applied("cvt.rzi.s32.f32 %d, %a;", "i4", x)
    top, low = 2**31 - 1, -(2**31)
    np.testing.assert_array_equal(got, [1, 2, -1, top, low, 0, top])
    np.testing.assert_array_equal(
        applied("cvt.rni.s32.f32 %d, %a;", "i4", x), [2, 2, -2, top, low, 0, top]
    )
    np.testing.assert_array_equal(
        applied("cvt.rzi.u32.f32 %d, %a;", "u4", x), [1, 2, 0, 3 * 10**9, 0, 0, 2**32 - 1]
    )
    np.testing.assert_array_equal(
        applied("cvt.rzi.s64.f64 %d, %a;", "i8", np.array([1e30, np.nan])), [2**63 - 1, -(2**63)]
    )


def test_conversions_between_integers():
    x = np.array([-1, 300, -300, 2**31 - 1], np.int32)
    np.testing.assert_array_equal(applied("cvt.s64.s32 %d, %a;", "i8", x), x)
    np.testing.assert_array_equal(applied("cvt.u64.u32 %d, %a;", "u8", x), x.view("u4"))
    np.testing.assert_array_equal(applied("cvt.s32.s8 %d, %a;", "i4", x), x.astype("i1"))
    np.testing.assert_array_equal(
        applied("cvt.sat.s8.s32 %r10, %a;\ncvt.s32.s8 %d, %r10;", "i4", x), [-1, 127, -128, 127]
    )
    np.testing.assert_array_equal(applied("cvt.rn.f32.s32 %d, %a;", "f4", x), x.astype("f4"))


# ---- integers ------------------------------------------------------------------------------------

S, T = RANDOM.integers(-(2**31), 2**31, (2, 256)).astype(np.int32)
U, V = S.view(np.uint32), T.view(np.uint32)
WIDE = S.astype(np.int64), T.astype(np.int64)
EIGHT, HALF = np.uint32(8), np.uint32(16)


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("add.s32 %d, %a, %b;", lambda: S + T),
        ("mul.lo.s32 %d, %a, %b;", lambda: (WIDE[0] * WIDE[1]).astype("i4")),
        ("mul.hi.s32 %d, %a, %b;", lambda: (WIDE[0] * WIDE[1] >> 32).astype("i4")),
        ("mul.hi.u32 %d, %a, %b;", lambda: (U.astype("u8") * V >> np.uint64(32)).astype("u4")),
        ("mad.lo.s32 %d, %a, %b, %a;", lambda: (WIDE[0] * WIDE[1] + WIDE[0]).astype("i4")),
        ("div.u32 %d, %a, %b;", lambda: U // V),
        ("rem.u32 %d, %a, %b;", lambda: U % V),
        ("div.s32 %d, %a, %b;", lambda: np.trunc(S / T).astype("i4")),
        ("rem.s32 %d, %a, %b;", lambda: np.fmod(S, T)),
        ("min.s32 %d, %a, %b;", lambda: np.minimum(S, T)),
        ("max.u32 %d, %a, %b;", lambda: np.maximum(U, V)),
        ("and.b32 %d, %a, %b;", lambda: S & T),
        ("xor.b32 %d, %a, %b;", lambda: S ^ T),
        ("not.b32 %d, %a;", lambda: ~S),
        ("shl.b32 %d, %a, 5;", lambda: U << np.uint32(5)),
        ("shl.b32 %d, %a, 32;", lambda: 0 * S),
        ("shr.s32 %d, %a, 40;", lambda: S >> 31),
        ("shr.u32 %d, %a, 7;", lambda: U >> np.uint32(7)),
        ("popc.b32 %d, %a;", lambda: [bin(x).count("1") for x in U.tolist()]),
        ("clz.b32 %d, %a;", lambda: [32 - x.bit_length() for x in U.tolist()]),
        ("brev.b32 %d, %a;", lambda: [int(f"{x:032b}"[::-1], 2) for x in U.tolist()]),
        ("bfe.u32 %d, %a, 5, 9;", lambda: U >> np.uint32(5) & np.uint32(511)),
        ("bfe.s32 %d, %a, 20, 20;", lambda: S >> 20),
        ("bfi.b32 %d, %a, %b, 8, 4;", lambda: V & ~np.uint32(0xF00) | (U & np.uint32(15)) << EIGHT),
        ("prmt.b32 %d, %a, %b, 0x3276;", lambda: V >> HALF | U >> HALF << HALF),
        ("lop3.b32 %d, %a, %b, 0x0000ffff, 0xE8;", lambda: (U & V) | ((U | V) & np.uint32(0xFFFF))),
        ("shf.l.wrap.b32 %d, %a, %b, 8;", lambda: V << EIGHT | U >> np.uint32(24)),
        ("shf.r.clamp.b32 %d, %a, %b, 8;", lambda: U >> EIGHT | V << np.uint32(24)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_integers(code, want):
    got = applied(code, "u4", U, V)
    np.testing.assert_array_equal(got, np.array(want()).astype("i8").astype("u4"))


def test_wide_products():
    np.testing.assert_array_equal(
        applied("mul.wide.s32 %d, %a, %b;", "i8", S, T), WIDE[0] * WIDE[1]
    )
    want = U.astype("u8") * V + np.uint64(7)
    np.testing.assert_array_equal(applied("mad.wide.u32 %d, %a, %b, 7;", "u8", U, V), want)


def test_parts_of_registers():
    code = "mov.b64 {%r10, %r11}, %a;\nmov.b64 %d, {%r11, %r10};"
    x = RANDOM.integers(0, 2**63, 64).astype(np.uint64)
    want = x >> np.uint64(32) | x << np.uint64(32)
    np.testing.assert_array_equal(applied(code, "u8", x), want)


def test_a_part_that_nobody_wants():
    x = RANDOM.integers(0, 2**63, 64).astype(np.uint64)
    got = applied("mov.b64 {_, %r10}, %a;\nmov.b32 {_, %h1}, %r10;\ncvt.u32.u16 %d, %h1;", "u4", x)
    np.testing.assert_array_equal(got, x >> np.uint64(48))
