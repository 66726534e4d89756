"""Attention without a query: pooling of a sequence or of a bag, also with a gate."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.memory.shapes import Shape, source_as_rows
from bahdanau_fast.modules.attention_weights import keep
from bahdanau_fast.modules.base import KeepsWeights
from bahdanau_fast.modules.layers import (
    apply_layer,
    check_features,
    plain_dropout,
    plain_parameters,
)
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.pool_in_chunks import plain_scores, products_dtype, scores_and_keys
from bahdanau_fast.run import pool

# What variances are at least: by rounding they may be negative.
LEAST_VARIANCE = 1e-7


class AttentionPooling(KeepsWeights):
    """``score_j = w . tanh(V x_j + b) + c``, softmax, and the weighted mean of all x_j.

    Ilse, Tomczak and Welling 2018, https://arxiv.org/abs/1802.04712, equation 8; ``gated``, it is
    equation 9: ``w . (tanh(V x_j + b) * sigmoid(U x_j + d)) + c``. Large calls
    go over the keys x in chunks; backward computes half of the activations again.

    Args:
        size: D, of a key.
        hidden: number of hidden units.
        heads: vectors w; each has weights and a result of its own.
        gated: multiply by the sigmoid.
        dropout: probability of dropping an attention weight in training.
        statistics: the result is the weighted mean, then the weighted standard deviation (Okabe,
            Koshinaka and Shinoda 2018, https://arxiv.org/abs/1803.10963, equations 5 and 6).
            Variances below 1e-7 count as that.
        bias: b, c and d.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,heads,Tk) of the last call, after softmax, before dropout, in the
            autograd graph.

    Raises:
        TypeError, ValueError: a size below 1, a dropout outside [0, 1].

    >>> pooling = AttentionPooling(4, 8, gated=True)
    >>> tuple(pooling(torch.randn(2, 10, 4)).shape), tuple(pooling(torch.randn(10, 4)).shape)
    ((2, 4), (4,))
    """

    U: nn.Linear | None

    def __init__(
        self,
        size: int,
        hidden: int,
        heads: int = 1,
        gated: bool = False,
        dropout: float = 0.0,
        statistics: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number in {"size": size, "hidden": hidden, "heads": heads}.items():
            checks.positive_int(name, number)
        checks.probability("dropout", dropout)
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.V = nn.Linear(size, hidden, **factory)
        self.U = nn.Linear(size, hidden, **factory) if gated else None
        self.w = nn.Linear(hidden, heads, **factory)
        self.dropout = nn.Dropout(dropout)
        self.heads, self.statistics = heads, statistics
        self._weights: Any = None

    @classmethod
    def from_layers(
        cls,
        V: nn.Linear,
        w: nn.Linear,
        U: nn.Linear | None = None,
        *,
        dropout: float = 0.0,
        statistics: bool = False,
    ) -> AttentionPooling:
        """A module with copies of layers, as CLAM's or AttentionDeepMIL's.

        Args:
            V: (hidden, size), in front of the tanh; with or without bias, as the others.
            w: (heads, hidden), of the scores.
            U: (hidden, size), in front of the sigmoid; None for no gate.
            dropout: as of the module.
            statistics: as of the module.

        Raises:
            TypeError: a layer is no ``nn.Linear``.
            ValueError: their sizes do not fit together.
        """
        layers = {"V": V, "w": w} if U is None else {"V": V, "U": U, "w": w}
        for name, layer in layers.items():
            if not isinstance(layer, nn.Linear):
                checks.reject(TypeError, name, "be an nn.Linear", type(layer).__name__)
        hidden, size = V.weight.shape
        if U is not None and U.weight.shape != V.weight.shape:
            need = f"have the shape of V, {(hidden, size)}"
            checks.reject(ValueError, "U", need, tuple(U.weight.shape))
        if w.in_features != hidden:
            need = f"take the {hidden} features that V gives"
            checks.reject(ValueError, "w", need, w.in_features)
        options: dict[str, Any] = {"dropout": dropout, "statistics": statistics, "device": "meta"}
        module = cls(size, hidden, w.out_features, U is not None, **options)
        for name, layer in layers.items():
            setattr(module, name, copy.deepcopy(layer))
        return module.train(V.training)

    def extra_repr(self) -> str:
        """What ``print`` shows beside the layers."""
        return f"heads={self.heads}, gated={self.U is not None}, statistics={self.statistics}"

    def scores(self, keys: Tensor) -> Tensor:
        """What comes before the softmax.

        Args:
            keys: as in a call.

        Returns:
            (B,heads,Tk), dtype of keys; without lengths and mask, hence without any -inf.

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        rows, *_, batch = source_as_rows(keys, keys, None, None)
        try:
            scores, _ = self._scores(rows, self._parameters_for(rows))
        except Exception:
            self._explain(rows)
            raise
        scores = scores.to(products_dtype(rows))
        return scores if batch is None else Shape(batch, False).restore(scores)

    @overload
    def forward(
        self,
        keys: Tensor,
        valid_lens: Any = None,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        return_scores: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        keys: Tensor,
        valid_lens: Any = None,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        return_scores: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(
        self,
        keys: Tensor,
        valid_lens: Any = None,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        return_scores: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Pool the keys.

        Args:
            keys: (B,Tk,D), float32, bfloat16, float16 or float64; or a bag (Tk,D). B may be any
                number of dimensions, here and below, also none.
            valid_lens: None, (B,) or (B,heads), any integer or float dtype, or a list.
            values: (B,Tk,Dv), dtype of keys, which are pooled in their place.
            mask: bool (B,Tk) or (B,heads,Tk), True where it may look; with lengths, both hold.
                With nothing to look at, all keys weigh alike.
            return_scores: also return the weights (B,heads,Tk) and the raw :meth:`scores`.

        Returns:
            (B,D), with several heads (B,heads,D), dtype of keys; 2D features with ``statistics``.
            With ``return_scores`` that, the weights and the scores.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        sources = keys if values is None else values
        rows, sources, lens, mask, batch = source_as_rows(keys, sources, valid_lens, mask)
        shape = None if batch is None else Shape(batch, False)
        try:
            pooled, weights, scores = self._results(rows, sources, lens, mask, return_scores, shape)
        except Exception:
            self._explain(rows)
            raise
        pooled = pooled.squeeze(1) if self.heads == 1 else pooled
        pooled = pooled if shape is None else shape.restore(pooled)
        if not return_scores:
            return pooled
        assert scores is not None
        return pooled, weights, scores if shape is None else shape.restore(scores)

    if TYPE_CHECKING:
        __call__ = forward

    def _explain(self, keys: Tensor) -> None:
        """An error in words about the keys of a call that failed, if they are wrong."""
        checks.rows("keys", keys)
        check_features("keys", keys, self._modules["V"])

    def _results(
        self,
        keys: Tensor,
        values: Tensor,
        lens: Tensor | None,
        mask: Tensor | None,
        return_scores: bool,
        shape: Shape | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pooled values (B,heads,Dv), weights in the call's shape, scores (B,heads,Tk) or None."""
        if values is not keys:  # which operations would convert or stretch
            checks.keys_and_values(keys, values, None)
        if lens is not None:
            checks.lens(lens, keys.shape[0], self.heads, keys.device)
        if mask is not None:
            mask = checks.as_mask(mask, self.heads, keys)
        dropout, parameters = self._modules["dropout"], self._parameters_for(keys)
        dropout_p = plain_dropout(dropout)
        if parameters and dropout_p is not None and not (return_scores or self.statistics):
            masked = lens is not None or mask is not None
            route = backends.decide_pooling(keys, values, parameters, masked)
            if route is not None:
                if route.form == "operations":
                    pooled, weights = _by_operations(keys, values, parameters, dropout_p, shape)
                    keep(self, weights)
                else:
                    inputs = _as_inputs(route, keys, values, parameters)
                    pooled, weights = pool(route, inputs, lens, mask, dropout_p, shape)
                    keep(self, weights, pooled)
                return pooled, weights, None
        (scores, alias), dtype = self._scores(keys, parameters), products_dtype(keys)
        weights = reference.masked_softmax(scores, lens, mask)
        in_fp32 = checks.softmax_in_fp32(keys.device) and dtype != torch.float64
        weights = weights.to(torch.float32 if in_fp32 else dtype)
        weights = weights if shape is None else shape.restore(weights)
        keep(self, weights)
        dropped = weights
        if dropout_p != 0.0:  # a changed layer may drop in place
            dropped = cast(Any, dropout)(weights.clone() if dropout_p is None else weights)
        by_head = dropped if shape is None else dropped.reshape(scores.shape)
        sources = alias if values is keys else values
        pooled = self._pooled(by_head, sources, dtype, dropout_p == 0.0)
        return pooled, weights, scores.to(dtype) if return_scores else None

    def _parameters_for(self, keys: Tensor) -> list[Any] | None:
        """V, its bias, U, its bias, w and its bias; None where a layer has to be called."""
        parts: list[Any] = []
        layers = self._modules  # past nn.Module's __getattr__
        for name in ("V", "U", "w"):
            if (layer := layers.get(name)) is None:
                parts += [None, None]
            elif (parameters := plain_parameters(layer)) is None:
                return None
            else:
                parts += [parameters["weight"], parameters.get("bias")]
        if parts[0].shape[1] != keys.shape[-1]:  # of which a fake takes any
            self._explain(keys)
        if not all([x is None or x.dtype is keys.dtype for x in parts]):
            self._explain(keys)
            # Autocast has one dtype for all but fp64. Others the layers refuse, and so do these.
            if checks.autocast_dtype(keys.device) is None or torch.float64 in [
                *(x.dtype for x in (keys, *parts) if x is not None)
            ]:
                return None
        return parts

    def _scores(self, keys: Tensor, parameters: list[Any] | None) -> tuple[Tensor, Tensor]:
        """The scores (B,heads,Tk), and the keys for the weighted sum."""
        if parameters is not None:
            return scores_and_keys(keys, *parameters)
        layers = self._modules
        hidden = torch.tanh(apply_layer(layers["V"], keys))
        if layers.get("U") is not None:
            hidden = hidden * torch.sigmoid(apply_layer(layers["U"], keys))
        return apply_layer(layers["w"], hidden).transpose(1, 2), keys

    def _pooled(
        self, weights: Tensor, values: Tensor, dtype: torch.dtype, sum_to_one: bool
    ) -> Tensor:
        """Weighted means (B,heads,D), with statistics (B,heads,2D)."""
        with without_autocast(values.device):
            if not self.statistics:
                return torch.bmm(weights.to(dtype), values.to(dtype))
            wide = torch.promote_types(dtype, torch.float32)
            weights, values = weights.to(wide), values.to(wide)
            mean = torch.bmm(weights, values)
            # Where weights sum to one, a shift changes nothing, and near the means less cancels.
            center = mean.detach().mean(1, keepdim=True) if sum_to_one else mean.new_zeros(())
            variance = torch.bmm(weights, (values - center).square()) - (mean - center).square()
            deviation = variance.clamp(min=LEAST_VARIANCE).sqrt()
            return torch.cat((mean, deviation), -1).to(dtype)


def _by_operations(
    keys: Tensor, values: Tensor, parameters: list[Any], dropout_p: float, shape: Shape | None
) -> tuple[Tensor, Tensor]:
    """Pooled values (B,heads,Dv) and weights in the call's shape, without autocast."""
    by_head = plain_scores(keys, *parameters).softmax(-1)
    weights = by_head if shape is None else shape.restore(by_head)
    dropped = F.dropout(weights, dropout_p) if dropout_p else weights
    return torch.bmm(dropped.reshape(by_head.shape), values), weights


def _as_inputs(
    route: backends.PoolingRoute, keys: Tensor, values: Tensor, parameters: list[Any]
) -> tuple[Tensor | None, ...]:
    """Inputs of :data:`ops.pool.pool`, of one dtype."""
    w, b, w_gate, b_gate, w_v, b_v = parameters  # of V, U and the module's w
    if route.form == "one operator":
        return keys, w_v, values, b_v, None, w, b, w_gate, b_gate
    inner = F.linear(keys, w, b)
    gate = None if w_gate is None else F.linear(keys, w_gate, b_gate)
    if (dtype := inner.dtype) is not keys.dtype:  # that of autocast
        w_v, b_v, values = w_v.to(dtype), None if b_v is None else b_v.to(dtype), values.to(dtype)
    return inner, w_v, values, b_v, gate, None, None, None, None
