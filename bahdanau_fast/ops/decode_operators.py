"""The operators of a whole decoder: schemas, and the shapes of their results; see :mod:`decode`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.ops.operator import Operator


def _fake(
    input_gates: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    keys: Tensor,
    values: Tensor,
    keep: bool,
    **_: Any,
) -> tuple[Tensor, ...]:
    (layers, batch, units), steps = hidden.shape, input_gates.shape[0]
    saved_steps, cells = steps if keep else 1, 0 if cell is None else layers
    weights_dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((layers, steps + 1, batch, units)),
        hidden.new_empty((cells, steps + 1, batch, units)),
        hidden.new_empty((saved_steps, batch, values.shape[2])),
        hidden.new_empty((saved_steps, batch, keys.shape[2])),
        hidden.new_empty((steps, batch, keys.shape[1]), dtype=weights_dtype),
        hidden.new_empty((layers, saved_steps, batch, 4 * units)),
    )


def _backward_fake(
    hidden: Tensor, cell: Tensor | None, queries: Tensor, dropout_p: float, **named: Any
) -> tuple[Tensor, ...]:
    named |= {"hidden": hidden, "cell": cell, "input_gates": queries, "keep": True}
    _, _, contexts, queries, weights, gates = _fake(**named)
    scores = weights
    if hidden.device.type == "cuda":  # which writes them as the pass over the keys reads them
        scores = weights.transpose(0, 1).contiguous().transpose(0, 1)
    return (
        gates,
        hidden.new_empty(hidden.shape),
        hidden.new_empty((0 if cell is None else hidden.shape[0], *hidden.shape[1:])),
        queries,
        contexts,
        scores,
        hidden.new_empty((weights.shape[0] if dropout_p > 0.0 else 0, *weights.shape[1:])),
    )


def _greedy_fake(keys: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    steps = torch.library.get_ctx().new_dynamic_size(min=1)
    (batch, keys_len), dtype = keys.shape[:2], torch.promote_types(keys.dtype, torch.float32)
    tokens = keys.new_empty((batch, steps), dtype=torch.int64)
    return tokens, keys.new_empty((batch, steps, keys_len), dtype=dtype)


_MEMORY = (
    "Tensor hidden, Tensor? cell, Tensor keys, Tensor? table, Tensor? keys_max, Tensor values, "
    "Tensor? valid_lens, Tensor? mask"
)
_WEIGHTS = (
    "Tensor w_query, Tensor w_v, Tensor w_context, Tensor w_input, Tensor w_hidden, Tensor bias"
)
_INPUTS = f"{_MEMORY}, {_WEIGHTS}, Tensor? masks, Tensor? seed, float dropout_p"
decode = Operator(
    f"decode(Tensor input_gates, {_INPUTS}, bool keep=True) -> (Tensor states, Tensor cells, "
    "Tensor contexts, Tensor queries, Tensor weights, Tensor gates)",
    _fake,
)
decode_backward = Operator(
    f"decode_backward({_INPUTS}, Tensor states, Tensor cells, Tensor queries, Tensor weights, "
    "Tensor gates, Tensor? grad_states, Tensor? grad_hidden, Tensor? grad_cell, "
    "Tensor? grad_weights) -> (Tensor grad_gates, Tensor grad_first, Tensor grad_first_cell, "
    "Tensor grad_queries, Tensor grad_contexts, Tensor grad_scores, Tensor dropped)",
    _backward_fake,
)
decode_greedy = Operator(
    "decode_greedy(Tensor embedding, Tensor w_embedded, Tensor input_bias, "
    f"{_MEMORY}, {_WEIGHTS}, Tensor w_dense, Tensor dense_bias, Tensor left_out, int first, "
    "int last, int blank, int max_steps) -> (Tensor tokens, Tensor weights)",
    _greedy_fake,
)
