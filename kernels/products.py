"""Small matrix products inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, PRECISION: tl.constexpr, plus=None):
    """X (M,K) @ y (K,N) in fp32, added to ``plus``: on tensor cores if y has a half type.

    ``PRECISION`` is what tl.dot does with fp32: "ieee", or "tf32" where the user allows it. In
    the interpreter ("host"), which cannot multiply bf16, half types are multiplied as fp32: the
    same products, exactly.
    """
    if PRECISION == "host":
        result = tl.dot(x.to(y.dtype).to(tl.float32), y.to(tl.float32), plus)
    elif y.dtype == tl.float32:
        result = tl.dot(x.to(tl.float32), y, plus, input_precision=PRECISION)
    else:
        result = tl.dot(x.to(y.dtype), y, plus)
    return result
