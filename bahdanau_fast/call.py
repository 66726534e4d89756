"""What a call of additive attention is: one value, decided once and run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from bahdanau_fast.memory.key_cache import KeyCache
from bahdanau_fast.memory.projected_keys import ProjectedKeys
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Call", "Located"]


class Located(NamedTuple):
    """Features of the keys that are a convolution of where earlier steps looked.

    Attributes:
        location: (B,inputs,Tk), the weights of earlier steps.
        w_conv: (C,inputs,taps), an odd number of taps.
        b_conv: (C,) or None.
    """

    location: Tensor
    w_conv: Tensor
    b_conv: Tensor | None


class Call(NamedTuple):
    """The arguments of a call, in three dimensions.

    Attributes:
        queries: (B,Tq,Dq); projected, (B,Tq,H), without ``w_q``.
        keys: (B,Tk,Dk); projected, (B,Tk,H), without ``w_k``.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,); or a layer that has to be called, from (B,Tq,Tk,H) to (B,Tq,Tk,1).
        w_q: (H,Dq) or None.
        w_k: (H,Dk) or None.
        bias: (H,), inside the activation; or None.
        valid_lens: None, (B,) or (B,Tq).
        mask: None, or bool (B,1,Tk) or (B,Tq,Tk); with lengths, both hold.
        dropout_p: probability of dropping a weight.
        dropout: a layer that has to be called on the weights, in place of ``dropout_p``; or None.
        cache: remembers the projection of the keys for the next call; or None.
        shape: of the results, where that is another one.
        projected: the keys and what is derived from them, of a memory; or None.
        inside: features of the keys and the activation.
        located: what the features are made of, in place of those of ``inside``.
        need_weights: whether the weights are wanted.
        scores_only: the result are the scores.
        backend: asked for by name, or None.
        explain: raises an error that says what is wrong with the inputs, as a call of this does:
            where nothing has checked them but the operator, and it refused them; or None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    w_v: Tensor | Callable[[Tensor], Tensor]
    w_q: Tensor | None = None
    w_k: Tensor | None = None
    bias: Tensor | None = None
    valid_lens: Tensor | None = None
    mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout: nn.Module | None = None
    cache: KeyCache | None = None
    shape: Shape | None = None
    projected: ProjectedKeys | None = None
    inside: Inside = TANH
    located: Located | None = None
    need_weights: bool = True
    scores_only: bool = False
    backend: str | None = None
    explain: Callable[[Call], object] | None = None
