"""Products of warpgroups (wgmma) in the PTX machine: what they give, and the mistakes it sees."""

import numpy as np
import pytest
from built import needs_compiler
from fragments import bits_of, pieces
from machine.parse import PtxError
from small import kernel, run

pytestmark = needs_compiler

ROWS, THREADS, IMAGE, OF_B = 64, 128, 40960, 8192
MODES = {0: 0, 32: 3, 64: 2, 128: 1}  # in a descriptor, by the bytes that are swizzled
RANDOM = np.random.default_rng(2)


def offset(shape, strides, place):
    """Where a CuTe layout of one axis puts a number."""
    found = 0
    for size, stride in zip(shape, strides, strict=True):
        found += place % size * stride
        place //= size
    return found


class Stored:
    """A matrix in shared memory, in a canonical layout of the PTX ISA.

    Args:
        x: (rows, K) numbers; of B transposed.
        kind: of the numbers.
        swizzle: bytes: 0, 32, 64 or 128.
        transposed: whether the numbers of a column are neighbours.
        start: a multiple of 1024.
    """

    def __init__(self, x, kind, swizzle, transposed, start):
        self.start, self.mode, self.size = start, MODES[swizzle], 4 if kind == "tf32" else 2
        (rows, columns), each, row = x.shape, 16 // self.size, swizzle or 16
        if transposed:
            strip = 8 * row * -(-rows * self.size // row)
            of_row = (each, row // 16, rows), (self.size, 16, 8 * row)
            of_column = (8, columns), (row, strip)
            self.leading, self.stride = (8 * row, strip) if swizzle else (strip, 8 * row)
            self.step = 2 * strip
        else:
            self.leading, self.stride = 16 if swizzle else 16 * rows, 8 * row
            of_row = (8, rows), (row, self.stride)
            of_column = (each, columns), (self.size, self.leading)
            self.step = 2 * self.leading
        self.places = start + np.array(
            [
                [offset(*of_row, r) + offset(*of_column, k) for k in range(columns)]
                for r in range(rows)
            ]
        )
        self.places ^= (self.places >> 7 & row // 16 - 1) << 4
        self.numbers = bits_of(x, kind).view(f"u{self.size}").reshape(x.shape)

    def fill(self, image):
        """Write the matrix into the bytes of shared memory."""
        for k in range(self.size):
            image[self.places + k] = self.numbers >> 8 * k & 255

    def descriptor(self, step):
        """Of what the product of a number reads."""
        begin = self.start + step * self.step
        return begin >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | self.mode << 62


class Product:
    """A kernel that multiplies (64, K) by (K, N), and its data.

    Args:
        kind: of the numbers: "bf16", "f16" or "tf32".
        columns: N.
        of_a: swizzle and transposition of A; None where it is in registers.
        of_b: those of B.
        signs: that A and B are multiplied by.
        adds: whether the accumulator counts.
    """

    def __init__(self, kind, columns, of_a=None, of_b=(128, False), signs=(1, 1), adds=True):
        k = 8 if kind == "tf32" else 16
        # Where numbers of a row are swizzled, as many as lie together.
        rows = [x[0] // 32 for x in (of_a, of_b) if x is not None and x[0] and not x[1]]
        self.steps = min([4 * k // 16, *rows])
        size = k * self.steps
        a, b, self.c = (
            RANDOM.integers(-8, 8, shape).astype(float)
            for shape in ((ROWS, size), (columns, size), (ROWS, columns))
        )
        self.want = signs[0] * signs[1] * a @ b.T + (self.c if adds else 0)
        self.image, self.columns = np.zeros(IMAGE, np.uint8), columns
        stored = [Stored(b, kind, *of_b, OF_B)]
        if of_a is not None:
            stored.append(Stored(a, kind, *of_a, 0))
        for matrix in stored:
            matrix.fill(self.image)
        each = 1 if kind == "tf32" else 2
        parts = [
            bits_of(self.shared_out(a[:, k * s : k * (s + 1)], each), kind)
            for s in range(self.steps)
        ]
        self.fragments = np.stack(parts, 1).astype(np.uint32)
        self.body = self.code(
            stored, f"m64n{columns}k{k}.f32.{kind}.{kind}", of_a, of_b, signs, adds
        )

    @staticmethod
    def shared_out(x, each):
        """(128, numbers) of the registers of a fragment: 16 rows a warp."""
        return np.concatenate([pieces(x[16 * w : 16 * w + 16], each) for w in range(4)])

    def code(self, stored, form, of_a, of_b, signs, adds):
        sums = [f"%f{n}" for n in range(self.columns // 2)]
        lines = ["mov.u32 %r10, buf;", "mad.lo.u32 %r11, %r0, 16, %r10;"]
        lines.append("mad.wide.u32 %rd10, %r0, 16, %rd1;")
        for at in range(0, IMAGE, 16 * THREADS):
            lines.append(f"ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd10+{at}];")
            lines.append(f"st.shared.v4.u32 [%r11+{at}], {{%r4, %r5, %r6, %r7}};")
        lines.append(f"mad.wide.u32 %rd10, %r0, {4 * len(sums)}, %rd2;")
        lines += [f"ld.global.f32 {x}, [%rd10+{4 * n}];" for n, x in enumerate(sums)]
        lines.append(f"mad.wide.u32 %rd10, %r0, {16 * self.steps}, %rd3;")
        lines += [f"ld.global.u32 %r{20 + n}, [%rd10+{4 * n}];" for n in range(4 * self.steps)]
        lines += ["shr.u32 %r10, %r10, 4;", "cvt.u64.u32 %rd11, %r10;"]
        lines.append(f"setp.eq.u32 %p1, {int(adds)}, 1;\nsetp.eq.u32 %p2, 0, 0;")
        lines += ["fence.proxy.async.shared::cta;", "bar.sync 0;", "wgmma.fence.sync.aligned;"]
        halves = "tf32" not in form
        for s in range(self.steps):
            a = "{" + ", ".join(f"%r{20 + 4 * s + n}" for n in range(4)) + "}"
            for n, matrix in enumerate(stored):
                lines.append(f"add.s64 %rd{12 + n}, %rd11, 0x{matrix.descriptor(s):x};")
            flags = [f"%p{1 if s == 0 else 2}", *(str(x) for x in signs)]
            flags += [str(int(x[1])) for x in (of_a, of_b) if halves and x is not None]
            operands = [
                "{" + ", ".join(sums) + "}",
                a if of_a is None else "%rd13",
                "%rd12",
                *flags,
            ]
            lines.append(f"wgmma.mma_async.sync.aligned.{form} {', '.join(operands)};")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        lines.append(f"mad.wide.u32 %rd10, %r0, {4 * len(sums)}, %rd0;")
        lines += [f"st.global.f32 [%rd10+{4 * n}], {x};" for n, x in enumerate(sums)]
        return "\n".join(lines)

    def run(self, old="", new="", threads=THREADS):
        """The result, of PTX where ``new`` stands in the place of ``old``."""
        assert old in self.body
        text = kernel(self.body.replace(old, new, 1), 4, f".shared .align 1024 .b8 buf[{IMAGE}];")
        got = np.zeros((THREADS, self.columns // 2), np.float32)
        c = self.shared_out(self.c, 2).astype(np.float32)
        report = run(text, [got, self.image, c, self.fragments], threads=threads)
        if report.races:
            raise PtxError("\n".join(race.text for race in report.races))
        np.testing.assert_array_equal(got, self.shared_out(self.want, 2))


LAYOUTS = [(swizzle, transposed) for transposed in (False, True) for swizzle in MODES]


@pytest.mark.parametrize("of_a", [None, *LAYOUTS], ids=str)
@pytest.mark.parametrize("of_b", LAYOUTS, ids=str)
def test_products_of_halves(of_a, of_b):
    for kind, columns in (("bf16", 64), ("f16", 16)):
        Product(kind, columns, of_a, of_b).run()


@pytest.mark.parametrize("of_b", LAYOUTS[:4], ids=str)
def test_products_of_single_precision(of_b):
    for of_a in (None, *LAYOUTS[:4]):
        Product("tf32", 32, of_a, of_b).run()


@pytest.mark.parametrize("columns", [8, 24, 256])
def test_widths(columns):
    Product("bf16", columns, None, (0, False)).run()


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_signs_and_a_new_sum(signs):
    Product("f16", 16, (128, False), signs=signs).run()
    Product("f16", 16, signs=signs, adds=False).run()


# ---- mistakes ------------------------------------------------------------------------------------

PROXY, FENCE, COMMIT, WAIT = (
    "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
)  # fmt: skip
STORE = "st.shared.u32 [buf+8192], %r4;"
MISTAKES = {
    "no fence": (FENCE, "", "no wgmma.fence"),
    "a sum is used after the fence": (FENCE, FENCE + "\nmov.f32 %f0, %f1;", "no wgmma.fence"),
    "a fragment is used after the fence": (FENCE, FENCE + "\nmov.u32 %r4, %r20;", "no wgmma.fence"),
    "no wait": (WAIT, "", "has not awaited"),
    "no group": (COMMIT, "", "has not awaited"),
    "a wait for earlier groups": (WAIT, WAIT.replace("0;", "1;"), "has not awaited"),
    "a fragment is written too early": (COMMIT, COMMIT + "\nmov.u32 %r20, 0;", "has not awaited"),
    "no fence between proxies": (PROXY, "", "without fence.proxy.async"),
    "the fence of global memory": (PROXY, "fence.proxy.async.global;", "without fence.proxy.async"),
    "a store after the fence between proxies": (
        PROXY, PROXY + "\n" + STORE, "without fence.proxy.async",
    ),
    "no barrier": ("bar.sync 0;", "", "race:|where nothing was written"),
    "a store before the wait": (COMMIT, f"{COMMIT}\nbar.sync 0;\n{STORE}", "under way and write"),
    "a store without a barrier": (WAIT, f"{WAIT}\n{STORE}", "race: write and read"),
    "a warp goes without": (
        FENCE, "setp.gt.u32 %p3, %r0, 95;\n@%p3 bra OUT;\n" + FENCE, "different products",
    ),
    "a descriptor of a lane": (FENCE, "cvt.u64.u32 %rd11, %r0;\n" + FENCE, "lanes of a product"),
    "a shifted pattern": (
        FENCE, "add.s64 %rd11, %rd11, 0x2000000000000;\n" + FENCE, "a base offset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name):
    old, new, said = MISTAKES[name]
    product = Product("bf16", 16)
    if "OUT" in new:
        product.body += "\nOUT:"
    with pytest.raises(PtxError, match=said):
        product.run(old, new)


def test_mistakes_with_both_matrices_in_shared_memory():
    product = Product("f16", 16, (64, False))
    with pytest.raises(PtxError, match=r"without fence\.proxy\.async"):
        product.run(PROXY)
    with pytest.raises(PtxError, match="under way and write"):
        product.run(COMMIT, f"{COMMIT}\nbar.sync 0;\n{STORE.replace('+8192', '')}")


def test_the_fence_may_come_after_the_barrier():
    product = Product("bf16", 16)
    product.run(PROXY + "\nbar.sync 0;", "bar.sync 0;\n" + PROXY)


def test_a_warpgroup_is_whole():
    with pytest.raises(PtxError, match="not whole"):
        Product("bf16", 16).run(threads=96)
