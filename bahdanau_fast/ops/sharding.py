"""How the operators run on DTensors: ranks compute their batch rows, nothing is gathered.

No batch row depends on another, so every operator takes its inputs sharded over the batch and
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


def register_for(tensor: Tensor) -> None:
    """Register the rules below before an operator meets a subclass of Tensor."""
    if type(tensor) is not Tensor and "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    rows, whole, parts = Shard(0), Replicate(), Partial("sum")
    # Names of the arguments without batch rows; placements of the results.
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
        by_name = list(zip(operator.names, metas, strict=False))
        one_by_one = [  # what has no elements has no rows
            None if x is None else whole if name in without_rows or 0 in x.shape else rows
            for name, x in by_name
        ]
        alike = [None if x is None else whole for _, x in by_name]
        # A result that is not requested is empty, and has no rows.
        if operator is attention_backward:
            requested = [bool(named["needs"] & NEED[name]) for name in attention.inputs]
        elif operator is attention.recorded:
            counted = named["valid_lens"] is not None and named["mask"] is None
            by_weights = (named[name] is not None for name in ("w_q", "w_k"))
            requested = [True, True, counted, *by_weights]
        else:
            requested = [True] * len(outputs)
        outputs = [x if used else whole for x, used in zip(outputs, requested, strict=True)]
        return [(outputs, one_by_one), ([whole] * len(outputs), alike)]

    for operator in of_operators:
        register_sharding(operator.overload)(functools.partial(placements, operator))
