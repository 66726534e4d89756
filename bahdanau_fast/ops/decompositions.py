"""The plain operations of the operators, for formats that know no other operators.

``torch.onnx.export(model, ..., dynamo=True)`` needs nothing from here: while it runs, attention is
plain PyTorch operations (:mod:`bahdanau_fast.backends`). A program of ``torch.export``
already holds the operator; :data:`TABLE` takes it apart::

    torch.onnx.export(program.run_decompositions(bf.decompositions.TABLE), (), "model.onnx")

It is not registered with PyTorch: compilers that can call the operator would find it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.ops.attention import attention, terms_of
from bahdanau_fast.ops.pool_in_chunks import plain_scores, pooling_scores


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    named = attention.named(*args, **kwargs)
    names = ("queries", "keys", "values", "w_v", "valid_lens", "dropout_p", "mask")
    arguments = {name: named[name] for name in names}
    context, weights = reference.attend(**arguments, terms=terms_of(named))
    return context, weights if named["need_weights"] else weights.new_empty((0,))


def _pooling_scores(*args: Any, **kwargs: Any) -> Tensor:
    scores = plain_scores(**pooling_scores.named(*args, **kwargs))
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


#: For ``torch.export.ExportedProgram.run_decompositions``: plain operations by operator.
TABLE: dict[Any, Callable[..., Any]] = {
    attention.overload: _attention,
    pooling_scores.overload: _pooling_scores,
}
