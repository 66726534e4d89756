"""The tutorial's module at a small size, inputs for it, and what counts as equal results."""

import told
import torch


def tutorial(size=16):
    torch.manual_seed(0)
    return told.Tutorial(size)


def inputs(size=16, batch=3, length=9):
    torch.manual_seed(1)
    return torch.randn(batch, 1, size), torch.randn(batch, length, size)


def close(ours, theirs):
    """As close as fp32 gets in sums of some dozen terms: 2**-18."""
    return all(bool(((a - b).abs() < 2.0**-18).all()) for a, b in zip(ours, theirs, strict=True))
