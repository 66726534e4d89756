"""Dropout of attention weights: the seed of a call, and what it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks


def dropout_seed(queries: Tensor) -> Tensor:
    """A seed for the dropout mask from torch's generator, so that manual_seed governs it.

    For a DTensor, one per rank: every rank counts its batch rows from zero, and with one seed
    they would drop the same weights. (1,) int64.
    """
    seed = torch.randint(2**62, (1,), device=queries.device)
    if not checks.is_sharded(queries):
        return seed
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = queries.device_mesh  # type: ignore[attr-defined]
    position = 0
    for size, at in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        position = position * size + at
    seed = seed ^ (position << 40)
    return DTensor.from_local(seed, mesh, [Shard(0)] * mesh.ndim, run_check=False)


def dropout_factors(
    seed: Tensor, shape: tuple[int, ...], dropout_p: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What weights (B,Tq,Tk) are multiplied by: 0 or 1 / (1 - p), as in csrc/common/philox.h."""
    low = 2**32 - 1
    rows = torch.arange(shape[0] * shape[1], device=seed.device).unsqueeze(1)
    blocks = torch.arange(-(-shape[2] // 4), device=seed.device)
    zeros = torch.zeros_like(rows * blocks)
    counter = [zeros + blocks, zeros + (rows & low), zeros + (rows >> 32), zeros]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        # Products of 32 bits wrap around in int64; their bits are those of unsigned ones.
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        left = (second >> 32 & low) ^ counter[1] ^ key[0]
        right = (first >> 32 & low) ^ counter[3] ^ key[1]
        counter = [left, second & low, right, first & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    numbers = torch.stack(counter, -1).flatten(1)[:, : shape[2]].view(shape)
    scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
    return (numbers >= -int(-dropout_p * 2**32 // 1)).to(dtype) * scale
