"""What ``attend`` is made of, for exporters to formats that know no operators but their own (ONNX).

Compilers that can call the operator leave it whole: PyTorch's own do not ask for this.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import register_decomposition

import bahdanau_fast.ops  # noqa: F401  defines the operator
from bahdanau_fast import reference

__all__: list[str] = []


def _attend(
    queries: Tensor,
    keys: Tensor,
    table: Tensor | None,
    keys_max: Tensor | None,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    context, weights = reference.attend(queries, keys, values, w_v, valid_lens, dropout_p)
    return context, weights if need_weights else weights.new_empty((0,))


register_decomposition(torch.ops.bahdanau_fast.attend.default)(_attend)
