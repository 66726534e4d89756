"""What instructions of the PTX machine give: a row each, bit for bit."""

import numpy as np
import pytest
import torch
from built import needs_compiler
from small import applied

pytestmark = needs_compiler

RANDOM = np.random.default_rng(1)
ODD = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1.5], np.float32)
A, B = np.repeat(ODD, 11), np.tile(ODD, 11)
NAN, ZERO = np.isnan(A) | np.isnan(B), (A == 0) & (B == 0)
PLUS, MINUS = np.array([[0.0, -0.0], [-0.0, 0.0]], np.float32)
TINY, SCALE = np.array([[1e-40, 1e-30, -1e-40], [1e20, 1e-10, 1.0]], np.float32)
X, Y, Z = RANDOM.standard_normal((3, 512)).astype(np.float32)
F64 = RANDOM.standard_normal(300)
HALVES = X.astype(np.float16), Y.astype(np.float16)
PAIRS = HALVES[0].view(np.uint32), HALVES[1].view(np.uint32)
EDGES = np.concatenate([X, ODD[~np.isnan(ODD)], np.array([65504, 65520, 6e-8, 2.0**-25], "f4")])

S, T = RANDOM.integers(-(2**31), 2**31, (2, 256)).astype(np.int32)
U, V = S.view(np.uint32), T.view(np.uint32)
P, Q = S.astype(np.int64), T.astype(np.int64)
LONG = RANDOM.integers(0, 2**63, 64).astype(np.uint64)
FEW = RANDOM.integers(0, 5, (2, 64)) - 2
LANE = np.arange(32, dtype=np.uint32)
WARP, SIGNED = U[:32], S[:32]
BALLOT = sum(int(x & 1) << k for k, x in enumerate(WARP))

LIMITS = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf], np.float32)
TOP, LOW = 2**31 - 1, -(2**31)
WHOLE = np.array([-1, 300, -300, TOP], np.int32)
POWERS = np.arange(-60, 61).astype(np.float32)

YES = "selp.u32 %d, 1, 0, %p1;"
ODDS = "and.b32 %r10, %a, 1;\nsetp.eq.u32 %p1, %r10, 1;\n"
COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
BOTH = """setp.lt.f32 %p1, %a, 0f00000000;
setp.gt.and.f32 %p2|%p3, %b, 0f00000000, %p1;
selp.u32 %r10, 1, 0, %p2;
selp.u32 %r11, 2, 0, %p3;
or.b32 %d, %r10, %r11;"""
# Lanes loop 1 to 4 times, then shuffle together.
MEET = """and.b32 %r10, %a, 3;
mov.u32 %r11, 0;
LOOP: add.s32 %r11, %r11, 1;
setp.lt.u32 %p1, %r10, %r11;
@!%p1 bra LOOP;
shfl.sync.idx.b32 %d, %r11, 3, 31, -1;"""
# The odd lanes come to the shuffle on a longer way, further down in the code.
AWAIT = """and.b32 %r10, %a, 1;
setp.eq.u32 %p1, %r10, 1;
@%p1 bra ODD;
TOGETHER: shfl.sync.bfly.b32 %d, %a, 1, 31, -1;
bra END;
ODD: bra TOGETHER;
END:"""


def u32(x):
    return np.uint32(x)


def toward_zero(x):
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


# Statements, dtype of the result, the inputs, and what the result is.
with np.errstate(all="ignore"):
    EXACT = [
        # Floating point.
        ("add.f32 %d, %a, %b;", "f4", (A, B), A + B),
        ("sub.rn.f32 %d, %a, %b;", "f4", (A, B), A - B),
        ("mul.f32 %d, %a, %b;", "f4", (A, B), A * B),
        ("div.rn.f32 %d, %a, %b;", "f4", (A, B), A / B),
        ("neg.f32 %d, %a;", "f4", (A,), -A),
        ("abs.f32 %d, %a;", "f4", (A,), np.abs(A)),
        ("copysign.f32 %d, %a, %b;", "f4", (A, B), np.copysign(B, A)),
        ("min.NaN.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.minimum(A, B)[~ZERO]),
        ("max.NaN.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.maximum(A, B)[~ZERO]),
        ("max.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.fmax(A, B)[~ZERO]),
        ("min.f32 %d, %a, %b;", "f4", (PLUS, MINUS), np.full(2, -0.0, "f4")),
        ("mul.ftz.f32 %d, %a, %b;", "f4", (TINY, SCALE), np.array([0, 0, -0.0], "f4")),
        ("mul.f32 %d, %a, %b;", "f4", (TINY, SCALE), TINY * SCALE),
        ("fma.rn.f64 %d, %a, %a, %b;", "f8",
         (np.array([1 + 2.0**-30, 3.0]), np.array([-1 - 2.0**-29, 2.0])), np.array([2.0**-60, 11])),
        ("add.f16 %d, %a, %b;", "f2", HALVES, HALVES[0] + HALVES[1]),
        ("sub.f16 %d, %a, %b;", "f2", HALVES, HALVES[0] - HALVES[1]),
        ("mul.f16 %d, %a, %b;", "f2", HALVES, HALVES[0] * HALVES[1]),
        ("fma.rn.f16x2 %d, %a, %b, %a;", "u4", PAIRS,
         (HALVES[0].astype("f8") * HALVES[1] + HALVES[0]).astype("f2").view("u4")),
        # libdevice's tanh in fp64 takes exact powers of two from ex2.approx.
        ("ex2.approx.ftz.f32 %d, %a;", "f4", (POWERS,), np.exp2(POWERS)),
        # Comparisons.
        *((f"setp.{name}.f32 %p1, %a, %b;\n{YES}", "u4", (A, B), compare(A, B) & ~NAN)
          for name, compare in COMPARED.items()),
        *((f"setp.{name}u.f32 %p1, %a, %b;\n{YES}", "u4", (A, B), compare(A, B) | NAN)
          for name, compare in COMPARED.items()),
        *((f"setp.{name}.{kind} %p1, %a, %b;\n{YES}", "u4", FEW.astype(dtype),
           compare(*FEW.astype(dtype)))
          for name, compare in COMPARED.items()
          for kind, dtype in (("s32", "i4"), ("u32", "u4"), ("s64", "i8"))),
        (BOTH, "u4", (X, Y), ((Y > 0) & (X < 0)) + 2 * (~(Y > 0) & (X < 0))),
        # Conversions.
        ("cvt.rn.f16.f32 %d, %a;", "f2", (EDGES,), EDGES.astype("f2")),
        ("cvt.rn.bf16.f32 %d, %a;", "u2", (EDGES,),
         torch.from_numpy(EDGES).bfloat16().view(torch.int16).numpy().view("u2")),
        ("cvt.rn.f32.f64 %d, %a;", "f4", (F64,), F64.astype("f4")),
        ("cvt.rz.f32.f64 %d, %a;", "f4", (F64,), toward_zero(F64)),
        ("cvt.sat.f32.f32 %d, %a;", "f4", (X,), np.clip(X, 0, 1)),
        ("cvt.rn.f16x2.f32 %d, %a, %b;", "u4", (X, Y),
         np.stack([Y, X], 1).astype("f2").view("u4").ravel()),
        ("cvt.rzi.s32.f32 %d, %a;", "i4", (LIMITS,), [1, 2, -1, TOP, LOW, 0, TOP]),
        ("cvt.rni.s32.f32 %d, %a;", "i4", (LIMITS,), [2, 2, -2, TOP, LOW, 0, TOP]),
        ("cvt.rzi.u32.f32 %d, %a;", "u4", (LIMITS,), [1, 2, 0, 3 * 10**9, 0, 0, 2**32 - 1]),
        ("cvt.rzi.s64.f64 %d, %a;", "i8", (np.array([1e30, np.nan]),), [2**63 - 1, -(2**63)]),
        ("cvt.s64.s32 %d, %a;", "i8", (WHOLE,), WHOLE),
        ("cvt.u64.u32 %d, %a;", "u8", (WHOLE,), WHOLE.view("u4")),
        ("cvt.s32.s8 %d, %a;", "i4", (WHOLE,), WHOLE.astype("i1")),
        ("cvt.sat.s8.s32 %r10, %a;\ncvt.s32.s8 %d, %r10;", "i4", (WHOLE,), [-1, 127, -128, 127]),
        ("cvt.rn.f32.s32 %d, %a;", "f4", (WHOLE,), WHOLE.astype("f4")),
        # Integers.
        ("add.s32 %d, %a, %b;", "i4", (S, T), S + T),
        ("mul.lo.s32 %d, %a, %b;", "i4", (S, T), P * Q),
        ("mul.hi.s32 %d, %a, %b;", "i4", (S, T), P * Q >> 32),
        ("mul.hi.u32 %d, %a, %b;", "u4", (U, V), U.astype("u8") * V >> np.uint64(32)),
        ("mad.lo.s32 %d, %a, %b, %a;", "i4", (S, T), P * Q + P),
        ("mul.wide.s32 %d, %a, %b;", "i8", (S, T), P * Q),
        ("mad.wide.u32 %d, %a, %b, 7;", "u8", (U, V), U.astype("u8") * V + np.uint64(7)),
        ("div.u32 %d, %a, %b;", "u4", (U, V), U // V),
        ("rem.u32 %d, %a, %b;", "u4", (U, V), U % V),
        ("div.s32 %d, %a, %b;", "i4", (S, T), np.trunc(S / T)),
        ("rem.s32 %d, %a, %b;", "i4", (S, T), np.fmod(S, T)),
        ("min.s32 %d, %a, %b;", "i4", (S, T), np.minimum(S, T)),
        ("max.u32 %d, %a, %b;", "u4", (U, V), np.maximum(U, V)),
        ("and.b32 %d, %a, %b;", "i4", (S, T), S & T),
        ("xor.b32 %d, %a, %b;", "i4", (S, T), S ^ T),
        ("not.b32 %d, %a;", "i4", (S,), ~S),
        ("shl.b32 %d, %a, 5;", "u4", (U,), U << u32(5)),
        ("shl.b32 %d, %a, 32;", "u4", (U,), 0 * U),
        ("shr.s32 %d, %a, 40;", "i4", (S,), S >> 31),
        ("shr.u32 %d, %a, 7;", "u4", (U,), U >> u32(7)),
        ("popc.b32 %d, %a;", "u4", (U,), [x.bit_count() for x in U.tolist()]),
        ("clz.b32 %d, %a;", "u4", (U,), [32 - x.bit_length() for x in U.tolist()]),
        ("brev.b32 %d, %a;", "u4", (U,), [int(f"{x:032b}"[::-1], 2) for x in U.tolist()]),
        ("bfe.u32 %d, %a, 5, 9;", "u4", (U,), U >> u32(5) & u32(511)),
        ("bfe.s32 %d, %a, 20, 20;", "i4", (S,), S >> 20),
        ("bfi.b32 %d, %a, %b, 8, 4;", "u4", (U, V), V & ~u32(0xF00) | (U & u32(15)) << u32(8)),
        ("prmt.b32 %d, %a, %b, 0x3276;", "u4", (U, V), V >> u32(16) | U >> u32(16) << u32(16)),
        ("lop3.b32 %d, %a, %b, 0x0000ffff, 0xE8;", "u4", (U, V), (U & V) | ((U | V) & u32(65535))),
        ("shf.l.wrap.b32 %d, %a, %b, 8;", "u4", (U, V), V << u32(8) | U >> u32(24)),
        ("shf.r.clamp.b32 %d, %a, %b, 8;", "u4", (U, V), U >> u32(8) | V << u32(24)),
        ("mov.b64 {%r10, %r11}, %a;\nmov.b64 %d, {%r11, %r10};", "u8", (LONG,),
         LONG >> np.uint64(32) | LONG << np.uint64(32)),
        ("mov.b64 {_, %r10}, %a;\nmov.b32 {_, %h1}, %r10;\ncvt.u32.u16 %d, %h1;", "u4", (LONG,),
         LONG >> np.uint64(48)),
        # Lanes of a warp.
        ("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;", "u4", (WARP,), WARP[LANE ^ 5]),
        ("shfl.sync.up.b32 %d, %a, 3, 0, -1;", "u4", (WARP,),
         WARP[np.where(LANE >= 3, LANE - 3, LANE)]),
        ("shfl.sync.down.b32 %d, %a, 3, 31, -1;", "u4", (WARP,),
         WARP[np.where(LANE < 29, LANE + 3, LANE)]),
        ("shfl.sync.idx.b32 %d, %a, 7, 31, -1;", "u4", (WARP,), np.full(32, WARP[7])),
        ("shfl.sync.down.b32 %d, %a, 1, 0x1807, -1;", "u4", (WARP,),
         WARP[np.where(LANE % 8 < 7, LANE + 1, LANE)]),
        (ODDS + "vote.sync.ballot.b32 %d, %p1, -1;", "u4", (WARP,), np.full(32, BALLOT)),
        (ODDS + f"vote.sync.any.pred %p1, %p1, -1;\n{YES}", "u4", (WARP,), np.ones(32)),
        (ODDS + f"vote.sync.all.pred %p1, %p1, -1;\n{YES}", "u4", (WARP,), np.zeros(32)),
        ("redux.sync.max.u32 %d, %a, -1;", "u4", (WARP,), np.full(32, WARP.max())),
        ("redux.sync.min.s32 %d, %a, -1;", "i4", (SIGNED,), np.full(32, SIGNED.min())),
        ("match.any.sync.b32 %d, %a, -1;", "u4", (LANE % 8,), 0x01010101 << LANE % 8),
        (MEET, "u4", (LANE,), np.full(32, 4)),
        (AWAIT, "u4", (LANE,), LANE ^ 1),
    ]  # fmt: skip


def same(got, want):
    """Bit for bit, but for the payload of a NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got[~nan].view(bits), want[~nan].view(bits))


@pytest.mark.parametrize(("code", "out", "inputs", "want"), EXACT, ids=[row[0] for row in EXACT])
def test_results(code, out, inputs, want):
    want = np.asarray(want)
    whole = out[0] != "f" and want.dtype != np.uint64
    same(applied(code, out, *inputs), (want.astype("i8") if whole else want).astype(out))


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


# The function, its largest error, and what it is applied to. The error of rcp is an ulp.
APPROXIMATE = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22, X * 10),
    "rsqrt.approx.f32": (lambda x: x**-0.5, 2.0**-22.9, np.abs(X)),
    "sqrt.approx.f32": (np.sqrt, 2.0**-23, np.abs(X)),
    "tanh.approx.f32": (np.tanh, 2.0**-11, X * 3),
    "lg2.approx.f32": (np.log2, 2.0**-22, np.abs(X) + 4),
    "rcp.approx.ftz.f32": (np.reciprocal, None, X),
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximations_use_the_room_they_have(opcode):
    function, error, x = APPROXIMATE[opcode]
    true = np.abs(function(x.astype(np.float64)))
    room = np.spacing(true.astype(np.float32)) if error is None else error * true
    drawn = [applied(f"{opcode} %d, %a;", "f4", x, seed=seed) for seed in range(4)]
    off = np.array([np.abs(np.abs(y) - true) / room for y in drawn])
    assert (0.9 if error is None else 0.7) < off.max() <= 1
    same(drawn[0], applied(f"{opcode} %d, %a;", "f4", x, seed=0))
    assert (drawn[0] != drawn[1]).any()
