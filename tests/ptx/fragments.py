"""Matrices as the lanes of a warp hold them."""

import numpy as np
import torch


def pieces(x, each):
    """Registers of a fragment, as PTX draws it: (32, n) numbers of a matrix (rows, columns)."""
    rows, columns = x.shape
    lanes = []
    for lane in range(32):
        numbers = [
            x[lane // 4 + 8 * down, 4 * each * across + lane % 4 * each + k]
            for across in range(columns // (4 * each))
            for down in range(rows // 8)
            for k in range(each)
        ]
        lanes.append(numbers)
    return np.array(lanes)


def bits_of(x, kind):
    """Numbers as 32-bit registers (64-bit ones for fp64), (32, n)."""
    if kind == "f64":
        return x.view(np.uint64)
    if kind in ("tf32", "f32"):
        return x.astype(np.float32).view(np.uint32)
    half = torch.from_numpy(x).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    return half.view(torch.int16).numpy().copy().view(np.uint32)
