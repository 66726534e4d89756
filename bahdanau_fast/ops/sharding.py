"""How the operators run on DTensors: each rank its own batch rows, nothing gathered.

Batch rows do not see each other, so every operator takes its inputs sharded over the batch and
weights whole; gradients of weights come out as parts to be summed. :func:`register_for` tells
PyTorch so, once, at the first DTensor: DTensor takes longer to import than this package.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from bahdanau_fast.ops.attend import NEED, attend, attend_backward, attend_counted, exp_keys
from bahdanau_fast.ops.operator import Operator
from bahdanau_fast.ops.whole import additive_attention, additive_attention_backward, attend_step

__all__ = ["register_for"]


def register_for(tensor: Tensor) -> None:
    """Register the rules below before an operator meets a subclass of Tensor."""
    if type(tensor) is not Tensor and "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    rows, whole, parts = Shard(0), Replicate(), Partial("sum")
    # Names of what has no batch rows, among the arguments of an operator; and its results.
    attended = {"w_v", "w_f"}, [rows] * 2
    gradients = {"w_v", "w_f"}, [rows, rows, rows, parts, rows, parts]
    weights = {"w_q", "w_k", "w_v", "bias"}
    of_operators: dict[Operator, tuple[set[str], list[Any]]] = {
        exp_keys: (set(), [rows] * 2),
        attend: attended,
        attend_counted: (attended[0], [rows] * 3),
        attend_backward: gradients,
        attend_step: (weights, [rows] * 2),
        additive_attention: (weights, [rows] * 4),
        additive_attention_backward: (weights, [rows] * 3 + [parts] * 4),
    }

    def placements(operator: Operator, *args: Any) -> list[tuple[list[Any], list[Any]]]:
        without_rows, outputs = of_operators[operator]
        tensors = {n: hasattr(x, "tensor_meta") for n, x in operator.named(*args).items()}
        given = list(tensors.items())[: len(args)]
        one_by_one = [
            (whole if name in without_rows else rows) if tensor else None for name, tensor in given
        ]
        alike = [whole if tensor else None for _, tensor in given]
        if operator is attend_backward:
            # A gradient that is not asked for is empty, and has no rows.
            needs = args[attend_backward.names.index("needs")]
            asked = [bool(needs & NEED[name]) for name in attend.inputs]
            outputs = [out if ask else whole for out, ask in zip(outputs, asked, strict=True)]
        return [(outputs, one_by_one), ([whole] * len(outputs), alike)]

    for operator in of_operators:
        register_sharding(operator.overload)(functools.partial(placements, operator))
