"""Compares the results of every backend with those of plain PyTorch: ``bahdanau-fast check``."""

from __future__ import annotations

import torch

from bahdanau_fast import backends
from bahdanau_fast.check.calls import CASES, check_one

__all__ = ["check"]


def check() -> bool:
    """Print the parity of every available backend; True if all are within the rule."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    print("largest error of outputs and gradients, as a share of what the parity rule allows")
    print(f"{'backend':<11}{'dtype':<10}{'case':<14}{'ours':>8}{'eager':>8}   worst in")
    passed = True
    for name in backends.available():
        for dtype in dtypes:
            for case in CASES:
                share, eager, label = check_one(name, case, dtype)
                good = share <= 1.0
                passed &= good
                kind = str(dtype).removeprefix("torch.")
                row = f"{name:<11}{kind:<10}{case.name:<14}{share:>8.3f}{eager:>8.3f}   {label}"
                print(row if good else f"{row}  FAIL")
    for name in backends.NAMES:
        if name not in backends.available():
            print(f"{name:<11}not checked: {backends.why_not(name)}")
    print("PASS" if passed else "FAIL")
    return passed
