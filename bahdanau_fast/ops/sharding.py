"""How the operators run on DTensors: each rank its own batch rows, nothing gathered.

Batch rows do not see each other, so every operator takes its inputs sharded over the batch and
weights whole; gradients of weights come out as parts to be summed. :func:`register_for` tells
PyTorch so, once, at the first DTensor: DTensor takes longer to import than this package.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["dropout_seed", "is_sharded", "register_for"]


def register_for(tensor: Tensor) -> None:
    """Register the rules below before an operator meets a subclass of Tensor."""
    if type(tensor) is not Tensor and "torch.distributed.tensor" in sys.modules:
        _register()


def dropout_seed(dropout_p: float, queries: Tensor) -> Tensor | None:
    """A seed for the dropout mask from torch's own generator, so that manual_seed governs it.

    For a DTensor, one for each rank: ranks count their batch rows from zero each, and with one seed
    they would drop the same weights.

    Args:
        dropout_p: probability of dropping a weight.
        queries: of the call.

    Returns:
        (1,) int64; None without dropout.
    """
    if dropout_p <= 0.0:
        return None
    return _seed_like(queries, torch.randint(2**62, (1,), device=queries.device))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) is Tensor or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _seed_like(tensor: Tensor, seed: Tensor) -> Tensor:
    if not is_sharded(tensor):
        return seed
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    position = 0
    for size, at in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        position = position * size + at
    seed = seed ^ (position << 40)
    return DTensor.from_local(seed, mesh, [Shard(0)] * mesh.ndim, run_check=False)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    rows, whole, parts = Shard(0), Replicate(), Partial("sum")
    ops = torch.ops.bahdanau_fast
    # Positions of what has no batch rows, among the arguments of an operator.
    weights = {
        ops.exp_keys.default: (),
        ops.attend.default: (5,),
        ops.attend_backward.default: (5,),
        ops.attend_step.default: (1, 6, 8, 9),
        ops.additive_attention.default: (3, 4, 5, 6),
        ops.additive_attention_backward.default: (3, 4, 5, 6),
    }
    results: dict[Any, list[Any]] = {
        ops.exp_keys.default: [rows] * 2,
        ops.attend.default: [rows] * 2,
        ops.attend_backward.default: [rows, rows, rows, parts],
        ops.attend_step.default: [rows] * 2,
        ops.additive_attention.default: [rows] * 4,
        ops.additive_attention_backward.default: [rows] * 3 + [parts] * 4,
    }

    def placements(op: Any, outputs: list[Any], *args: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors = [hasattr(arg, "tensor_meta") for arg in args]
        one_by_one = [
            (whole if i in weights[op] else rows) if is_tensor else None
            for i, is_tensor in enumerate(tensors)
        ]
        alike = [whole if is_tensor else None for is_tensor in tensors]
        if args[-1] is not None and op is ops.attend_backward.default:
            # A gradient that is not asked for is empty, and has no rows.
            asked = [bool(args[-1] >> bit & 1) for bit in range(4)]
            outputs = [out if ask else whole for out, ask in zip(outputs, asked, strict=True)]
        return [(outputs, one_by_one), ([whole] * len(outputs), alike)]

    for op, outputs in results.items():
        register_sharding(op)(functools.partial(placements, op, outputs))
