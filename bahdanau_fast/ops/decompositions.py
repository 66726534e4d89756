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

from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops.attention import attention, inside_of

__all__ = ["TABLE"]


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    named = attention.named(*args, **kwargs)
    names = ("queries", "keys", "values", "w_v", "valid_lens", "dropout_p", "mask")
    given = {name: named[name] for name in names}
    context, weights = reference.attend(**given, inside=inside_of(named))
    return context, weights if named["need_weights"] else weights.new_empty((0,))


#: For ``torch.export.ExportedProgram.run_decompositions``: plain operations for each operator.
TABLE: dict[Any, Callable[..., Any]] = {attention.overload: _attention}
