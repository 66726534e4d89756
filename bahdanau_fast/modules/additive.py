"""Additive attention modules: names, arguments and state_dict keys of the d2l course code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.modules.d2l_signature import additive_attention, read_signature, shows
from bahdanau_fast.modules.remembering import Remembering

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bahdanau_fast.modules.d2l_signature import Options

__all__ = ["AdditiveAttention", "MLPAttention"]


class AdditiveAttention(Remembering):
    """Additive attention, drop-in for ``d2l.AdditiveAttention`` of either signature.

    ``context_i = sum_j softmax_j(w_v . tanh(W_q q_i + W_k k_j)) v_j`` (Bahdanau, Cho and Bengio
    2014, https://arxiv.org/abs/1409.0473). Both signatures of the course are accepted, by position
    or by name::

        AdditiveAttention(num_hiddens, dropout)                         # sizes from the first call
        AdditiveAttention(key_size, query_size, num_hiddens, dropout)   # three numbers: no dropout

    After ``torch.manual_seed`` either form draws the weights that the course's module draws; the
    lazy form draws them at its first call. Dropout masks differ from the course's for the
    same seed; each weight is dropped with the same probability.

    An unchanged decoder loop that passes the same ``keys`` tensor at each step projects it once, on
    the CPU: a call compares a fingerprint of the bytes of ``keys``, ``W_k.weight`` and ``bias``
    with the one taken when they were projected, so a change is noticed however it was made. When
    gradients are needed, they also have to be the same tensors, with the same history. On a GPU
    nothing is reused automatically, since comparing would wait for the device: call
    :meth:`memory`.

    Args:
        num_hiddens: H.
        dropout: probability of dropping an attention weight in training.
        key_size: Dk; with ``query_size``, Dq. Both or neither.
        bias: add a learnt (H,) bias inside the tanh.
        cache_keys: reuse the projection of an unchanged ``keys`` tensor; False: project at each
            call.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,Tq,Tk) of the last call, after softmax, before dropout, in the
            autograd graph.

    Raises:
        TypeError: arguments that fit neither signature.
        ValueError: a size below 1, a dropout outside [0, 1].

    >>> attention = AdditiveAttention(8, dropout=0.1).eval()
    >>> queries, keys = torch.zeros(2, 1, 20), torch.ones(2, 10, 2)
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> attention(queries, keys, values, torch.tensor([2, 6])).round(decimals=4).tolist()
    [[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
    """

    _query_layer, _key_layer, _score_layer = "W_q", "W_k", "w_v"

    @overload
    def __init__(
        self,
        num_hiddens: int,
        dropout: float = 0.0,
        *,
        key_size: int | None = ...,
        query_size: int | None = ...,
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self,
        key_size: int,
        query_size: int,
        num_hiddens: int,
        dropout: float = 0.0,
        **options: Unpack[Options],
    ) -> None: ...

    @shows(additive_attention)
    def __init__(
        self,
        *sizes: Any,
        bias: bool = False,
        cache_keys: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> None:
        key_size, query_size, num_hiddens, dropout = read_signature(sizes, named)
        super().__init__(num_hiddens, dropout, cache_keys)
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        if key_size is None or query_size is None:
            self.W_k: nn.Linear = nn.LazyLinear(num_hiddens, **factory)
            self.W_q: nn.Linear = nn.LazyLinear(num_hiddens, **factory)
            self.w_v: nn.Linear = nn.LazyLinear(1, **factory)
        else:
            self.W_k = nn.Linear(key_size, num_hiddens, **factory)
            self.W_q = nn.Linear(query_size, num_hiddens, **factory)
            self.w_v = nn.Linear(num_hiddens, 1, **factory)
        self.bias = (
            nn.Parameter(torch.zeros(num_hiddens, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def from_concat(
        cls, linear: nn.Linear, v: nn.Linear, query_size: int | None = None, dropout: float = 0.0
    ) -> AdditiveAttention:
        """Take the concat form, ``v(tanh(linear(concat(query, key))))``: the same thing.

        Args:
            linear: ``Linear(Dq + Dk, H)``, with or without bias, the query's columns first.
            v: ``Linear(H, 1)``; its bias shifts every score alike and so changes no weight.
            query_size: Dq; half of the input size unless given.
            dropout: probability of dropping an attention weight in training.

        Returns:
            A module with copies of those weights.

        Raises:
            ValueError: sizes that do not fit.
        """
        hidden, total = linear.weight.shape
        if query_size is None:
            if total % 2:
                checks.reject(ValueError, "query_size", "be given when sizes differ", query_size)
            query_size = total // 2
        if not 0 < query_size < total:
            checks.reject(ValueError, "query_size", f"be between 1 and {total - 1}", query_size)
        if tuple(v.weight.shape) != (1, hidden):
            checks.reject(ValueError, "v", f"be Linear({hidden}, 1)", tuple(v.weight.shape))
        weight = linear.weight.detach()
        module = cls(
            total - query_size,
            query_size,
            hidden,
            dropout,
            bias=linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            module.W_q.weight.copy_(weight[:, :query_size])
            module.W_k.weight.copy_(weight[:, query_size:])
            module.w_v.weight.copy_(v.weight)
            if module.bias is not None:
                module.bias.copy_(linear.bias)
        return module


class MLPAttention(Remembering):
    """Additive attention under the oldest name the course gave it.

    The same formula; in this naming ``W_k`` multiplies the query, ``W_q`` the key, and ``v``
    scores. The published code left out the tanh of its own formula, which makes the weights
    independent of the query; here it is applied.

    Args:
        units: H.
        ipt_dim: feature size of query and key.
        dropout: probability of dropping an attention weight in training.
        cache_keys: as for :class:`AdditiveAttention`.

    Raises:
        TypeError, ValueError: a size below 1, a dropout outside [0, 1].

    >>> attention = MLPAttention(8, 2, 0.1).eval()
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> context = attention(torch.ones(2, 1, 2), torch.ones(2, 10, 2), values, torch.tensor([2, 6]))
    >>> context.round(decimals=4).tolist()
    [[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
    """

    _query_layer, _key_layer, _score_layer = "W_k", "W_q", "v"

    def __init__(
        self,
        units: int,
        ipt_dim: int,
        dropout: float = 0.0,
        *,
        cache_keys: bool = True,
    ) -> None:
        super().__init__(units, dropout, cache_keys)
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
        value: Tensor,
        valid_length: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend: query (B,Tq,ipt_dim), key (B,Tk,ipt_dim), value (B,Tk,Dv) to (B,Tq,Dv).

        Args:
            query: (B,Tq,ipt_dim).
            key: (B,Tk,ipt_dim).
            value: (B,Tk,Dv).
            valid_length: None, (B,) or (B,Tq).
            mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look.

        Returns:
            Context (B,Tq,Dv).

        Raises:
            TypeError, ValueError: as for :class:`AdditiveAttention`.
        """
        return super().forward(query, key, value, valid_length, mask=mask)
