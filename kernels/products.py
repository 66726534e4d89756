"""Small matrix products inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """X (M,K) @ y (K,N) in ACC: on tensor cores in y's type where that is a half type.

    ``PRECISION`` is what tl.dot does with fp32: "ieee", or "tf32" where the user allows it. In
    the interpreter ("host"), which cannot multiply bf16, half types are multiplied as fp32: the
    same products, exactly.
    """
    if tl.float64 == ACC:  # tl.dot takes no fp64 on every GPU, and these are small
        return tl.sum(x[:, :, None] * y.to(ACC)[None, :, :], axis=1)
    if PRECISION == "host":
        return tl.dot(x.to(y.dtype).to(tl.float32), y.to(tl.float32))
    if y.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), y, input_precision=PRECISION)
    return tl.dot(x.to(y.dtype), y)
