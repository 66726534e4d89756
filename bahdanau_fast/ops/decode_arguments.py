"""What a recurrent decoder takes for all its steps; sizes and gates as in :mod:`ops.decode`."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

__all__ = ["Arguments", "Rest", "padded"]

#: What F, Dv and H are multiples of in the operators of a device, with zeros behind others.
MULTIPLES = {"cuda": 32}


def padded(size: int, device: str) -> int:
    """The size that an operator of such a device takes in its place."""
    multiple = MULTIPLES.get(device, 1)
    return -(-size // multiple) * multiple


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

    def padded(self) -> Arguments:
        """Those of one layer with F, Dv and H of the operators; all that is added stays zero."""
        a, units = self, self.hidden.shape[2]
        if self.keys.device.type not in MULTIPLES:
            return self
        sizes = a.keys.shape[2], a.values.shape[2], units
        f, v, h = (padded(size, a.keys.device.type) - size for size in sizes)
        if not (f or v or h):
            return self

        def each_gate(x: Tensor, at: int, *more: int) -> Tensor:
            blocks = x.unflatten(at, (x.shape[at] // units, units))
            return F.pad(blocks, more).flatten(at, at + 1)

        return Arguments(
            inputs=a.inputs,
            w_inputs=each_gate(a.w_inputs, 0, 0, 0, 0, h),
            input_bias=each_gate(a.input_bias, 0, 0, h),
            hidden=F.pad(a.hidden, (0, h)),
            cell=None if a.cell is None else F.pad(a.cell, (0, h)),
            keys=F.pad(a.keys, (0, f)),
            values=F.pad(a.values, (0, v)),
            w_query=F.pad(a.w_query, (0, h, 0, f)),
            w_v=F.pad(a.w_v, (0, f)),
            w_context=each_gate(a.w_context, 0, 0, v, 0, h),
            w_input=each_gate(a.w_input, 1, 0, h, 0, h),
            w_hidden=each_gate(a.w_hidden, 1, 0, h, 0, h),
            bias=each_gate(a.bias, 1, 0, h),
        )


class Rest(NamedTuple):
    """The other inputs of :func:`decode`."""

    table: Tensor | None = None  # of ops.exp_keys
    keys_max: Tensor | None = None  # likewise
    valid_lens: Tensor | None = None  # (B,)
    mask: Tensor | None = None  # bool (B,1,Tk)
    masks: Tensor | None = None  # (L-1,T,B,H), factors on what goes from layer to layer
    seed: Tensor | None = None  # (1,) int64, with dropout of the attention weights
    dropout_p: float = 0.0
