"""Small matrix products inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, PRECISION: tl.constexpr, plus=None):
    """X (M,K) @ y (K,N) in fp32, added to ``plus``: on tensor cores if y has a half type.

    ``PRECISION`` is what tl.dot does with fp32: "ieee", or "tf32" where the user allows it. With
    "fp32" half types are multiplied as fp32, the same products, exactly: in the interpreter, which
    cannot multiply bf16, and where there are no tensor cores for them.
    """
    if PRECISION == "fp32":
        x, y = x.to(y.dtype).to(tl.float32), y.to(tl.float32)
        result = tl.dot(x, y, plus, input_precision="ieee")
    elif y.dtype == tl.float32:
        result = tl.dot(x.to(tl.float32), y, plus, input_precision=PRECISION)
    else:
        result = tl.dot(x.to(y.dtype), y, plus)
    return result
