"""Additive attention that sees where it looked before: location-sensitive attention, coverage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.general import attend_inside, attend_location
from bahdanau_fast.memory import Memory, ProjectedKeys
from bahdanau_fast.modules.attention_weights import KeepsWeights
from bahdanau_fast.modules.base import apply_layer, is_unchanged, plain_weight
from bahdanau_fast.reference import TANH, Inside

__all__ = ["LocationAttention"]


class LocationAttention(KeepsWeights):
    """``score_j = w_v . tanh(W_q q + W_k k_j + W_f f_j + bias)`` with features f of earlier steps.

    Chorowski et al. 2015, https://arxiv.org/abs/1506.07503, equations 8 and 9: f is a convolution,
    along the keys, of the ``location``, which is what the caller says of earlier steps: the
    previous weights; with ``inputs=2`` the previous weights and their sum over all steps, as
    Tacotron 2 has it. With ``channels=None`` there is no convolution and f is the location itself:
    coverage (See, Liu and Manning 2017, https://arxiv.org/abs/1704.04368, equation 11).

    Convolution, W_f, scores, softmax and context are one operator a step on the CPU. A gradient
    goes through the location where it has one: detach it to stop that.

    Args:
        key_size: Dk.
        query_size: Dq.
        num_hiddens: H.
        channels: C, of the convolution; None for no convolution.
        kernel_size: taps of the convolution, an odd number.
        inputs: channels of the location.
        dropout: probability of dropping an attention weight in training.
        bias: add a learnt (H,) bias inside the tanh.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,1,Tk) of the last call, after softmax, before dropout, in the autograd
            graph.

    Raises:
        TypeError, ValueError: a size below 1, an even ``kernel_size``, a dropout outside [0, 1].

    >>> attention = LocationAttention(4, 6, 8, channels=3, kernel_size=5).eval()
    >>> keys = torch.randn(2, 10, 4)
    >>> memory, location = attention.memory(keys), torch.zeros(2, 1, 10)
    >>> for query in torch.randn(3, 2, 1, 6):
    ...     context = attention.attend(query, memory, location)
    ...     location = attention.attention_weights
    >>> tuple(context.shape)
    (2, 1, 4)
    """

    def __init__(
        self,
        key_size: int,
        query_size: int,
        num_hiddens: int,
        channels: int | None = 10,
        kernel_size: int = 201,
        *,
        inputs: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"key_size": key_size, "query_size": query_size, "num_hiddens": num_hiddens}
        sizes |= {"kernel_size": kernel_size, "inputs": inputs}
        for name, size in sizes.items():
            checks.positive_int(name, size)
        if channels is not None:
            checks.positive_int("channels", channels)
        if not kernel_size % 2:
            checks.reject(ValueError, "kernel_size", "be odd", kernel_size)
        checks.probability("dropout", dropout)
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.num_hiddens = num_hiddens
        self.W_q = nn.Linear(query_size, num_hiddens, **factory)
        self.W_k = nn.Linear(key_size, num_hiddens, **factory)
        self.w_v = nn.Linear(num_hiddens, 1, **factory)
        self.conv = None
        if channels is not None:
            padding = kernel_size // 2
            self.conv = nn.Conv1d(inputs, channels, kernel_size, padding=padding, **factory)
        self.W_f = nn.Linear(channels or inputs, num_hiddens, **factory)
        self.bias = (
            nn.Parameter(torch.zeros(num_hiddens, device=device, dtype=dtype)) if bias else None
        )
        self.dropout = nn.Dropout(dropout)

    def memory(
        self, keys: Tensor, values: Tensor | None = None, valid_lens: Tensor | None = None
    ) -> Memory:
        """Project the keys once, for any number of :meth:`attend` calls.

        Args:
            keys: (B,Tk,Dk).
            values: (B,Tk,Dv); the keys themselves unless given.
            valid_lens: None, (B,) or (B,1).

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        values = keys if values is None else values
        checks.source(keys, values, valid_lens)
        checks.features("keys", keys, self.W_k.in_features)
        return Memory(
            ProjectedKeys(apply_layer(self.W_k, keys, self.bias), None, None), values, valid_lens
        )

    def attend(self, queries: Tensor, memory: Memory, location: Tensor) -> Tensor:
        """One decoder step.

        Args:
            queries: (B,1,Dq).
            memory: from :meth:`memory`.
            location: (B,inputs,Tk), the weights of earlier steps.

        Returns:
            Context (B,1,Dv); sets ``attention_weights`` (B,1,Tk) too.

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        if not isinstance(memory, Memory):
            checks.reject(TypeError, "memory", "come from memory()", type(memory).__name__)
        keys, values, valid_lens = memory.projected.keys, memory.values, memory.valid_lens
        checks.queries_for(queries, keys, valid_lens, None)
        checks.features("queries", queries, self.W_q.in_features)
        inputs = self.W_f.in_features if self.conv is None else self.conv.in_channels
        checks.location(location, inputs, keys)
        dropout_p = self.dropout.p if self.training else 0.0
        w_q, w_f, w_v = (plain_weight(layer) for layer in (self.W_q, self.W_f, self.w_v))
        route = backends.decide(
            *(queries, keys, values, w_q, None, w_v, None, self.num_hiddens, dropout_p),
            keys_projected=True,
            general=True,
        )
        asked, inside = apply_layer(self.W_q, queries), Inside(None, w_f)
        conv = self.conv
        if w_v is None or w_f is None or not (conv is None or is_unchanged(conv)):
            # A layer that is more than its weight is called.
            features = (location if conv is None else conv(location)).transpose(1, 2)
            keys, inside, conv = keys + self.W_f(features), TANH, None
        elif conv is None:
            inside = inside._replace(features=location.transpose(1, 2))
        rest = (values, valid_lens, dropout_p)
        if w_v is None:
            context, weights = reference.attend(asked, keys, values, self.w_v, *rest[1:])
        elif conv is None:
            context, weights = attend_inside(route, asked, keys, w_v, *rest, inside)
        else:
            convolution = (location, conv.weight, conv.bias)
            context, weights = attend_location(route, asked, keys, w_v, *rest, *convolution, inside)
        self._keep(weights)
        return context

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        location: Tensor,
        valid_lens: Tensor | None = None,
    ) -> Tensor:
        """:meth:`attend` to keys that are projected for this call alone.

        Args:
            queries: (B,1,Dq), float32, bfloat16, float16 or float64.
            keys: (B,Tk,Dk), dtype of queries.
            values: (B,Tk,Dv), dtype of queries.
            location: (B,inputs,Tk), dtype of queries.
            valid_lens: None, (B,) or (B,1), any integer or float dtype.

        Returns:
            Context (B,1,Dv), dtype of queries.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        checks.inputs(queries, keys, values, valid_lens)
        return self.attend(queries, self.memory(keys, values, valid_lens), location)
