"""Additive attention under the names of the course's oldest code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.modules.additive import AdditiveAttention
from bahdanau_fast.modules.base import Additive


class MLPAttention(AdditiveAttention):
    """Additive attention under the oldest name the course gave it.

    The same formula; in this naming ``W_k`` multiplies the query, ``W_q`` the key, and ``v``
    scores. The published code left out the tanh of its own formula, which makes the weights
    independent of the query; here it is applied.

    Args:
        units: number of hidden units, H.
        ipt_dim: feature size of query and key.
        dropout: probability of dropping an attention weight in training.
        cache_keys: as for :class:`AdditiveAttention`.

    Raises:
        TypeError, ValueError: a size below 1, a dropout outside [0, 1].

    >>> import torch
    >>> attention = MLPAttention(8, 2, 0.1).eval()
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> context = attention(torch.ones(2, 1, 2), torch.ones(2, 10, 2), values, torch.tensor([2, 6]))
    >>> context.round(decimals=4).tolist()
    [[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
    """

    _query_layer, _key_layer, _score_layer = "W_k", "W_q", "v"

    def __init__(
        self, units: int, ipt_dim: int, dropout: float = 0.0, *, cache_keys: bool = True
    ) -> None:
        Additive.__init__(self, units, dropout)
        self._remember(cache_keys)
        checks.positive_int("units", units)
        checks.positive_int("ipt_dim", ipt_dim)
        self.W_k = nn.Linear(ipt_dim, units, bias=False)
        self.W_q = nn.Linear(ipt_dim, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)
        self.bias = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        valid_length: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        query_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend: query (B,Tq,ipt_dim), key (B,Tk,ipt_dim), value (B,Tk,Dv) to (B,Tq,Dv).

        Without a value it is the key. Lengths, options and errors are those of
        :class:`AdditiveAttention`.
        """
        return super().forward(
            *(query, key, value, valid_length),
            mask=mask,
            causal=causal,
            query_mask=query_mask,
            scale=scale,
        )

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]
