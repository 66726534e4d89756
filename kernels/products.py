"""Small matrix products inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """X (M,K) @ y (K,N) in fp32: on tensor cores in y's type where that is a half type.

    ``PRECISION`` is what tl.dot does with fp32: "ieee", or "tf32" where the user allows it. In
    the interpreter ("host"), which cannot multiply bf16, half types are multiplied as fp32: the
    same products, exactly.
    """
    if PRECISION == "host":
        result = tl.dot(x.to(y.dtype).to(tl.float32), y.to(tl.float32))
    elif y.dtype == tl.float32:
        result = tl.dot(x.to(tl.float32), y, input_precision=PRECISION)
    else:
        result = tl.dot(x.to(y.dtype), y)
    return result
