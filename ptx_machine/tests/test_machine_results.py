"""What instructions of the PTX machine give where the kernels' own results would not tell.

That they are right in all else is seen in the contract, which runs through them.
"""

import numpy as np
import pytest
import torch
from small import applied

from ptx_machine import needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

RANDOM = np.random.default_rng(1)
ODD = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1.5], np.float32)
A, B = np.repeat(ODD, 11), np.tile(ODD, 11)
NAN, ZERO = np.isnan(A) | np.isnan(B), (A == 0) & (B == 0)
PLUS, MINUS = np.array([[0.0, -0.0], [-0.0, 0.0]], np.float32)
TINY = np.array([1e-40, 1e-30, -1e-40], np.float32)
X, Y, Z = RANDOM.standard_normal((3, 512)).astype(np.float32)
# Small ones, ordinary ones, and some whose products overflow.
HALVES = (X * np.array([1e-4, 1.0, 1e-7, 300.0] * 128, "f4")).astype("f2").reshape(2, -1)
HOLES = np.where(HALVES > 1, np.float16(np.nan), HALVES)
F64 = RANDOM.standard_normal(300)
EDGES = np.concatenate([X, ODD[~np.isnan(ODD)], np.array([65504, 65520, 6e-8, 2.0**-25], "f4")])

S, T = RANDOM.integers(-(2**31), 2**31, (2, 256)).astype(np.int32)
U, V = S.view(np.uint32), T.view(np.uint32)
LONG = RANDOM.integers(0, 2**63, 64).astype(np.uint64)
FEW = RANDOM.integers(0, 5, (2, 64)) - 2
LANE = np.arange(32, dtype=np.uint32)

LIMITS = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf], np.float32)
TOP, LOW = 2**31 - 1, -(2**31)
WHOLE = np.array([-1, 300, -300, TOP], np.int32)
POWERS = np.arange(-60, 61).astype(np.float32)

YES = "selp.u32 %d, 1, 0, %p1;"
COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
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


# Statements, dtype of the result, the inputs, and what the result is.
with np.errstate(all="ignore"):
    EXACT = [
        # Floating point.
        ("div.rn.f32 %d, %a, %b;", "f4", (A, B), A / B),
        ("min.NaN.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.minimum(A, B)[~ZERO]),
        ("max.NaN.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.maximum(A, B)[~ZERO]),
        ("max.f32 %d, %a, %b;", "f4", (A[~ZERO], B[~ZERO]), np.fmax(A, B)[~ZERO]),
        ("min.f32 %d, %a, %b;", "f4", (PLUS, MINUS), np.full(2, -0.0, "f4")),
        ("mul.f32 %d, %a, %b;", "f4", (TINY, TINY[::-1]), TINY * TINY[::-1]),
        ("mul.f16x2 %d, %a, %b;", "u4", (HALVES[0].view("u4"), HALVES[1].view("u4")),
         (HALVES[0] * HALVES[1]).view("u4")),
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
        *((f"setp.{name}.f16x2 %p1|%p2, %a, %b;\nselp.u32 %r10, 1, 0, %p1;\n"
           "selp.u32 %r11, 2, 0, %p2;\nor.b32 %d, %r10, %r11;", "u4",
           (HOLES[0].view("u4"), HOLES[1].view("u4")), is_so.reshape(-1, 2) @ [1, 2])
          for name, is_so in (("lt", HOLES[0] < HOLES[1]), ("num", ~np.isnan(HOLES).any(0)),
                              ("nan", np.isnan(HOLES).any(0)))),
        ("abs.f16 %d, %a;", "f2", (HALVES[0],), np.abs(HALVES[0])),
        ("abs.f16x2 %d, %a;", "u4", (HALVES[0].view("u4"),), np.abs(HALVES[0]).view("u4")),
        # Conversions.
        ("cvt.rn.f16.f32 %d, %a;", "f2", (EDGES,), EDGES.astype("f2")),
        ("cvt.rn.bf16.f32 %d, %a;", "u2", (EDGES,),
         torch.from_numpy(EDGES).bfloat16().view(torch.int16).numpy().view("u2")),
        ("cvt.rn.f32.f64 %d, %a;", "f4", (F64,), F64.astype("f4")),
        ("cvt.sat.f32.f32 %d, %a;", "f4", (X,), np.clip(X, 0, 1)),
        ("cvt.rn.f16x2.f32 %d, %a, %b;", "u4", (X, Y),
         np.stack([Y, X], 1).astype("f2").view("u4").ravel()),
        ("cvt.rzi.s32.f32 %d, %a;", "i4", (LIMITS,), [1, 2, -1, TOP, LOW, 0, TOP]),
        ("cvt.rni.s32.f32 %d, %a;", "i4", (LIMITS,), [2, 2, -2, TOP, LOW, 0, TOP]),
        ("cvt.rzi.s64.f64 %d, %a;", "i8", (np.array([1e30, np.nan]),), [2**63 - 1, -(2**63)]),
        ("cvt.s64.s32 %d, %a;", "i8", (WHOLE,), WHOLE),
        ("cvt.s32.s8 %d, %a;", "i4", (WHOLE,), WHOLE.astype("i1")),
        # Integers.
        ("mul.wide.s32 %d, %a, %b;", "i8", (S, T), S.astype("i8") * T),
        ("div.s32 %d, %a, %b;", "i4", (S, T), np.trunc(S / T)),
        ("rem.s32 %d, %a, %b;", "i4", (S, T), np.fmod(S, T)),
        ("shl.b32 %d, %a, 32;", "u4", (U,), 0 * U),
        ("shr.s32 %d, %a, 40;", "i4", (S,), S >> 31),
        ("popc.b32 %d, %a;", "u4", (U,), [x.bit_count() for x in U.tolist()]),
        ("bfe.s32 %d, %a, 20, 20;", "i4", (S,), S >> 20),
        ("mov.b64 {_, %r10}, %a;\nmov.b32 {_, %h1}, %r10;\ncvt.u32.u16 %d, %h1;", "u4", (LONG,),
         LONG >> np.uint64(48)),
        # Lanes of a warp.
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


@pytest.mark.parametrize(("mode", "low", "high"), [("rn", -0.5, 0.5), ("rm", -1, 0)])
def test_fma_rounds_once(mode, low, high):
    got = applied(f"fma.{mode}.f32 %d, %a, %b, %c;", "f4", X, Y, Z).astype(np.longdouble)
    true = X.astype(np.longdouble) * Y + Z
    ulp = np.spacing(np.abs(got).astype(np.float32))
    error = got - true
    assert ((error >= low * ulp) & (error <= high * ulp)).all()


# The function, its largest error (that of rcp is an ulp), and what it is applied to.
APPROXIMATE = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22, X * 10),
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
