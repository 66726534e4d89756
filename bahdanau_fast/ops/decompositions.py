"""What the operators are made of, for formats that know none but their own.

``torch.onnx.export(model, ..., dynamo=True)`` needs nothing from here: while it runs, attention is
plain PyTorch operations (:mod:`bahdanau_fast.backends`). A program that ``torch.export`` has made
already holds the operator; :data:`TABLE` takes it apart::

    torch.onnx.export(program.run_decompositions(bf.decompositions.TABLE), (), "model.onnx")

It is not registered with PyTorch: compilers that can call the operator would find it there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bahdanau_fast.ops  # noqa: F401  defines the operator
from bahdanau_fast import reference

__all__ = ["TABLE"]

_OPERATOR = torch.ops.bahdanau_fast.attend.default
_NAMES = tuple(argument.name for argument in _OPERATOR._schema.arguments)


def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = dict(zip(_NAMES, args, strict=False), **kwargs)
    wanted = ("queries", "keys", "values", "w_v", "valid_lens", "dropout_p")
    context, weights = reference.attend(*(given[name] for name in wanted))
    return context, weights if given["need_weights"] else weights.new_empty((0,))


#: For ``torch.export.ExportedProgram.run_decompositions``: plain operations for each operator.
TABLE: dict[Any, Callable[..., Any]] = {_OPERATOR: _attend}
