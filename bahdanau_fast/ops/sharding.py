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

from bahdanau_fast.ops.attention import NEED, attention, attention_backward, exp_keys
from bahdanau_fast.ops.operator import Operator

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
    weights = {"w_q", "w_k", "w_v", "bias", "w_f"}
    gradients = [parts if name in weights else rows for name in attention.inputs]
    of_operators: dict[Operator, tuple[set[str], list[Any]]] = {
        exp_keys: (set(), [rows] * 2),
        attention: (weights, [rows] * 2),
        attention.recorded: (weights, [rows] * 5),
        attention_backward: (weights, gradients),
    }

    def placements(operator: Operator, *args: Any) -> list[tuple[list[Any], list[Any]]]:
        without_rows, outputs = of_operators[operator]
        named = operator.named(*args)
        metas = [getattr(x, "tensor_meta", None) for x in args]
        given = list(zip(operator.names, metas, strict=False))
        one_by_one = [  # what has no elements has no rows
            None if x is None else whole if name in without_rows or 0 in x.shape else rows
            for name, x in given
        ]
        alike = [None if x is None else whole for _, x in given]
        # A result that is not asked for is empty, and has no rows.
        if operator is attention_backward:
            asked = [bool(named["needs"] & NEED[name]) for name in attention.inputs]
        elif operator is attention.recorded:
            counted = named["valid_lens"] is not None and named["mask"] is None
            asked = [True, True, counted, named["w_q"] is not None, named["w_k"] is not None]
        else:
            asked = [True] * len(outputs)
        outputs = [out if ask else whole for out, ask in zip(outputs, asked, strict=True)]
        return [(outputs, one_by_one), ([whole] * len(outputs), alike)]

    for operator in of_operators:
        register_sharding(operator.overload)(functools.partial(placements, operator))
