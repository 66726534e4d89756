"""Additive attention from layers that another module has, and what it says of their state dicts."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bahdanau_fast import checks

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from bahdanau_fast.modules.d2l_signature import Options


class FromLayers(nn.Module):
    """Constructors of :class:`AdditiveAttention` that copy weights."""

    @classmethod
    def from_concat(
        cls,
        linear: nn.Linear,
        v: nn.Linear,
        query_size: int | None = None,
        dropout: float = 0.0,
        **options: Unpack[Options],
    ) -> Self:
        """Take the concat form, ``v(tanh(linear(concat(query, key))))``: the same thing.

        Args:
            linear: ``Linear(Dq + Dk, H)``, with or without bias, the query's columns first.
            v: ``Linear(H, 1)``; its bias shifts every score alike and so changes no weight.
            query_size: Dq; default: half of the input size.
            dropout: probability of dropping an attention weight in training.
            **options: of the module, such as ``activation``; bias, device and dtype are linear's.

        Returns:
            A module with copies of those weights.

        Raises:
            ValueError: sizes that do not fit.
        """
        total = linear.weight.shape[1]
        if query_size is None:
            if total % 2:
                checks.reject(ValueError, "query_size", "be given when sizes differ", query_size)
            query_size = total // 2
        if not 0 < query_size < total:
            checks.reject(ValueError, "query_size", f"be between 1 and {total - 1}", query_size)
        w_q, w_k = linear.weight.detach().split([query_size, total - query_size], 1)
        module: Self = cls._of_weights(w_q, w_k, linear.bias, v, dropout, options)
        return module

    @classmethod
    def from_linears(
        cls,
        w_q: nn.Linear,
        w_k: nn.Linear,
        v: nn.Linear,
        dropout: float = 0.0,
        **options: Unpack[Options],
    ) -> Self:
        """Take ``v(tanh(w_q(query) + w_k(key)))``, whose layers may have biases: the same thing.

        Args:
            w_q: ``Linear(Dq, H)``.
            w_k: ``Linear(Dk, H)``; the biases of both become one, inside the tanh.
            v: ``Linear(H, 1)``; its bias shifts every score alike and so changes no weight.
            dropout: probability of dropping an attention weight in training.
            **options: of the module, such as ``activation``; bias, device and dtype are w_q's.

        Returns:
            A module with copies of those weights.

        Raises:
            ValueError: sizes that do not fit.

        >>> from bahdanau_fast import AdditiveAttention
        >>> layers = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 1)
        >>> AdditiveAttention.from_linears(*layers).bias.shape
        torch.Size([8])
        """
        (hidden, _), shape = w_q.weight.shape, tuple(w_k.weight.shape)
        if shape[0] != hidden:
            checks.reject(ValueError, "w_k", f"have {hidden} outputs, as w_q", shape[0])
        biases = [layer.bias for layer in (w_q, w_k) if layer.bias is not None]
        bias = sum(biases[1:], biases[0]) if biases else None
        module: Self = cls._of_weights(w_q.weight, w_k.weight, bias, v, dropout, options)
        return module

    @classmethod
    def _of_weights(
        cls,
        w_q: Tensor,
        w_k: Tensor,
        bias: Tensor | None,
        v: nn.Linear,
        dropout: float,
        options: Any,
    ) -> Any:
        hidden, query_size = w_q.shape
        if tuple(v.weight.shape) != (1, hidden):
            checks.reject(ValueError, "v", f"be Linear({hidden}, 1)", tuple(v.weight.shape))
        options = {**options, "bias": bias is not None, "device": w_q.device, "dtype": w_q.dtype}
        module: Any = cls(w_k.shape[1], query_size, hidden, dropout, **options)
        with torch.no_grad():
            module.W_q.weight.copy_(w_q)
            module.W_k.weight.copy_(w_k)
            module.w_v.weight.copy_(v.weight)
            if bias is not None:
                module.bias.copy_(bias)
        return module

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        biases = [x for x in ("W_q.bias", "W_k.bias", "w_v.bias") if prefix + x in state_dict]
        if biases:  # torch says nothing of them where it is not strict, and no more than the names
            warnings.warn(
                f"{', '.join(biases)} are not loaded: this module has one bias inside the tanh; "
                "AdditiveAttention.from_linears(W_q, W_k, v) takes layers with biases",
                stacklevel=2,
            )
