"""The course's scaled dot-product attention, beside the additive modules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast import checks, reference
from bahdanau_fast.memory import Memory
from bahdanau_fast.memory.shapes import as_rows
from bahdanau_fast.modules.attention_weights import keep, restored
from bahdanau_fast.modules.base import Attention
from bahdanau_fast.modules.layers import plain_dropout

_Forward = TypeVar("_Forward", bound=Callable[..., Tensor])
_FIRST = dict(query="queries", key="keys", value="values", valid_length="valid_lens")


def _first_names_too(forward: _Forward) -> _Forward:
    """Take arguments by the names that the course gave them first, too."""

    @functools.wraps(forward)
    def either(self: Any, *args: Any, **named: Any) -> Tensor:
        return forward(self, *args, **{_FIRST.get(n, n): x for n, x in named.items()})

    return either  # type: ignore[return-value]


class DotProductAttention(Attention):
    """Scaled dot-product attention of the course: ``softmax(q.k / sqrt(d)) v``.

    PyTorch's own ``scaled_dot_product_attention`` cannot give the weights, so it serves only
    where nobody needs them (``need_weights=False``).

    Args:
        dropout: probability of dropping an attention weight in training.
        need_weights: keep ``attention_weights`` after a call.

    Raises:
        TypeError, ValueError: a dropout outside [0, 1].

    >>> attention = DotProductAttention(0.5).eval()
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> context = attention(torch.ones(2, 1, 2), torch.ones(2, 10, 2), values, torch.tensor([2, 6]))
    >>> context.round(decimals=4).tolist()
    [[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
    """

    def __init__(self, dropout: float = 0.0, *, need_weights: bool = True) -> None:
        super().__init__()
        checks.probability("dropout", dropout)
        self.dropout = nn.Dropout(dropout)
        self.need_weights = need_weights

    @_first_names_too
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to ``keys`` and ``values``.

        Args:
            queries: (B,Tq,D), or a state (B,D). B may be any number of dimensions.
            keys: (B,Tk,D).
            values: (B,Tk,Dv).
            valid_lens: None, (B,) or (B,Tq), also as a list.
            mask: bool (B,Tk), or what broadcasts to (B,Tq,Tk), True where a query may look; with
                lengths, both hold.

        Returns:
            Context (B,Tq,Dv).

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        rows, mask, shape = as_rows(queries, keys, values, valid_lens, mask)
        if shape is not None:
            return restored(self, DotProductAttention.forward(self, *rows, mask=mask), shape)
        queries, keys, values, valid_lens = rows
        checks.inputs(queries, keys, values, valid_lens)
        checks.features("keys", keys, queries.shape[-1])
        if mask is not None:
            mask = checks.as_mask(mask, queries.shape[1], keys)
        dropout_p = plain_dropout(self.dropout)
        if not self.need_weights and dropout_p is not None:
            keep(self, None)
            visible = reference.visible(valid_lens, mask, keys.shape[1])
            return _without_weights(queries, keys, values, visible, dropout_p)
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        weights = reference.masked_softmax(scores, valid_lens, mask)
        keep(self, weights if self.need_weights else None)
        return torch.bmm(self.dropout(weights), values)

    if TYPE_CHECKING:
        __call__ = forward

    def attend(self, queries: Tensor, memory: Memory, *, mask: Tensor | None = None) -> Tensor:
        """Look at a memory with some queries.

        Args:
            queries: (B,Tq,D), or a state (B,D); B as the memory's keys have it.
            memory: from :meth:`memory`.
            mask: as in a call, of what lengths and mask of the memory leave.

        Returns:
            Context (B,Tq,Dv); sets ``attention_weights`` too.

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        self._check_memory(memory, None)
        queries, mask, shape = memory.for_queries(queries, mask)
        keys, values, lens = memory.projected.keys, memory.values, memory.valid_lens
        result = self(queries, keys, values, lens, mask=mask)
        return result if shape is None else restored(self, result, shape)


def _without_weights(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout_p: float
) -> Tensor:
    if visible is not None:
        # Nothing to look at means uniform weights: let such a row see zero scores everywhere.
        empty = ~visible.any(-1, keepdim=True)
        visible = visible | empty
        query = query.masked_fill(empty.expand(-1, query.shape[1], -1), 0.0)
    return F.scaled_dot_product_attention(query, key, value, visible, dropout_p)
