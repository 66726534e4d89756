"""What a call of additive attention is: one value, decided once and run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from bahdanau_fast.memory.key_cache import KeyCache
from bahdanau_fast.memory.projected_keys import ProjectedKeys
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.reference import TANH, ScoreTerms


class Located(NamedTuple):
    """Features of the keys that are a convolution of where earlier steps looked."""

    location: Tensor  # (B,inputs,Tk), the weights of earlier steps
    w_conv: Tensor  # (C,inputs,taps), an odd number of taps
    b_conv: Tensor | None  # (C,)


class Call(NamedTuple):
    """The arguments of a call, in three dimensions."""

    queries: Tensor  # (B,Tq,Dq); projected, (B,Tq,H), without w_q
    keys: Tensor  # (B,Tk,Dk); projected, (B,Tk,H), without w_k
    values: Tensor  # (B,Tk,Dv)
    # (1,H) or (H,); or a layer that has to be called, from (B,Tq,Tk,H) to (B,Tq,Tk,1).
    w_v: Tensor | Callable[[Tensor], Tensor]
    w_q: Tensor | None = None  # (H,Dq)
    w_k: Tensor | None = None  # (H,Dk)
    bias: Tensor | None = None  # (H,), inside the activation
    valid_lens: Tensor | None = None  # (B,) or (B,Tq)
    mask: Tensor | None = None  # bool (B,1,Tk) or (B,Tq,Tk); with lengths, both hold
    dropout_p: float = 0.0  # probability of dropping a weight
    dropout: nn.Module | None = None  # to be called on the weights, in place of dropout_p
    cache: KeyCache | None = None  # remembers the projection of the keys for the next call
    shape: Shape | None = None  # of the results, where that is another one
    projected: ProjectedKeys | None = None  # the keys and what is derived from them, of a memory
    terms: ScoreTerms = TANH  # features of the keys and the activation
    located: Located | None = None  # what features are made of, in place of those of terms
    need_weights: bool = True
    scores_only: bool = False  # the result are the scores
    backend: str | None = None  # requested by name
    # Raises an error that says what is wrong with the inputs, as a call of this does: where nothing
    # has checked them but the operator, and it refused them.
    explain: Callable[[Call], object] | None = None
