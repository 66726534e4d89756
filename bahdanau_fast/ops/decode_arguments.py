"""What a recurrent decoder takes for all its steps; sizes and gates as in :mod:`ops.decode`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Arguments", "Rest"]


class Arguments(NamedTuple):
    """The differentiable inputs of :func:`decode`."""

    inputs: Tensor  # (T,B,E); greedily the embedding (V,E)
    w_inputs: Tensor  # (G,E), of the first layer
    input_bias: Tensor  # (G,), likewise
    hidden: Tensor  # (L,B,H), the first states
    cell: Tensor | None  # (L,B,H) of an LSTM, None for a GRU
    keys: Tensor  # (B,Tk,F), projected
    values: Tensor  # (B,Tk,Dv)
    w_query: Tensor  # (F,H)
    w_v: Tensor  # (1,F) or (F,)
    w_context: Tensor  # (G,Dv)
    w_input: Tensor  # (L-1,G,H), of the layers above the first
    w_hidden: Tensor  # (L,G,H)
    bias: Tensor  # (L,4H), of all the gates; of the first layer what input_bias leaves out


class Rest(NamedTuple):
    """The other inputs of :func:`decode`."""

    table: Tensor | None = None  # of ops.exp_keys
    keys_max: Tensor | None = None  # likewise
    valid_lens: Tensor | None = None  # (B,)
    mask: Tensor | None = None  # bool (B,1,Tk)
    masks: Tensor | None = None  # (L-1,T,B,H), factors on what goes from layer to layer
    seed: Tensor | None = None  # (1,) int64, with dropout of the attention weights
    dropout_p: float = 0.0
