"""What a recurrent decoder takes for all its steps; sizes and gates as in :mod:`ops.decode`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Arguments", "Rest"]


class Arguments(NamedTuple):
    """The differentiable inputs of :func:`decode`.

    Attributes:
        inputs: (T,B,E); greedily the embedding (V,E).
        w_inputs: (G,E), of the first layer.
        input_bias: (G,), likewise.
        hidden: (L,B,H), the first states.
        cell: (L,B,H) of an LSTM, None for a GRU.
        keys: (B,Tk,F), projected.
        values: (B,Tk,Dv).
        w_query: (F,H).
        w_v: (1,F) or (F,).
        w_context: (G,Dv).
        w_input: (L-1,G,H), of the layers above the first.
        w_hidden: (L,G,H).
        bias: (L,4H), of all the gates; of the first layer only what ``input_bias`` leaves out.
    """

    inputs: Tensor
    w_inputs: Tensor
    input_bias: Tensor
    hidden: Tensor
    cell: Tensor | None
    keys: Tensor
    values: Tensor
    w_query: Tensor
    w_v: Tensor
    w_context: Tensor
    w_input: Tensor
    w_hidden: Tensor
    bias: Tensor


class Rest(NamedTuple):
    """The other inputs of :func:`decode`.

    Attributes:
        table: of ``ops.exp_keys``, or None.
        keys_max: likewise.
        valid_lens: None or (B,).
        mask: None, or bool (B,1,Tk).
        masks: (L-1,T,B,H), factors on what goes from layer to layer, or None.
        seed: (1,) int64, with dropout of the attention weights.
        dropout_p: probability of that.
    """

    table: Tensor | None = None
    keys_max: Tensor | None = None
    valid_lens: Tensor | None = None
    mask: Tensor | None = None
    masks: Tensor | None = None
    seed: Tensor | None = None
    dropout_p: float = 0.0
