"""Base of the additive modules: the call, on keys or on a memory, and the reuse of projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.backends import Route
from bahdanau_fast.functional import attend_projected, attend_queries, attend_raw, attend_small
from bahdanau_fast.memory import Memory, ProjectedKeys
from bahdanau_fast.memory.key_cache import KeyCache, Source
from bahdanau_fast.memory.shapes import Shape, as_rows
from bahdanau_fast.modules.attention_weights import KeepsWeights
from bahdanau_fast.modules.layers import (
    apply_layer,
    check_features,
    plain_dropout,
    plain_weight,
    plain_weights,
)
from bahdanau_fast.modules.lazy import draw

__all__ = ["Additive", "Layered"]


class Layered(KeepsWeights):
    """Base of the modules that project keys; a subclass names its three layers.

    The layers are ordinary submodules of the subclass (hooks, LoRA and parametrizations work); the
    names of those for queries, keys and scores are class attributes.
    """

    _query_layer: str
    _key_layer: str
    _score_layer: str

    bias: Tensor | None

    def __init__(self, num_hiddens: int, dropout: float) -> None:
        super().__init__()
        checks.probability("dropout", dropout)
        self.num_hiddens = num_hiddens
        self.dropout = nn.Dropout(dropout)

    def _checked(
        self, queries: Tensor, memory: Memory, mask: Tensor | None
    ) -> tuple[Tensor, Memory, Tensor | None, Shape | None]:
        """Queries and mask in three dimensions, the memory, and the shape of the results.

        The memory, if it is this module's and fits the queries, in their dtype; the shape None if
        the results stay as they are.
        """
        if not isinstance(memory, Memory):
            checks.reject(TypeError, "memory", "come from memory()", type(memory).__name__)
        maker = memory.maker
        if maker is not None and not torch.compiler.is_compiling():
            if maker.module is not self:
                other = f"one made by another {type(maker.module).__name__}"
                checks.reject(ValueError, "memory", "come from memory() of this module", other)
            if maker.has_changed(plain_weight(self._modules[self._key_layer]), self.bias):
                need = "be made after the last change of the key layer"
                checks.reject(ValueError, "memory", need, "an older one: call memory() again")
        if self._is_from_autocast(queries, memory):
            memory = memory.to(queries.dtype)
        queries, mask, shape = memory.queries_as_rows(queries, mask)
        checks.queries_for(queries, memory.projected.keys, memory.valid_lens, mask)
        return queries, memory, mask, shape

    def _is_from_autocast(self, queries: Tensor, memory: Memory) -> bool:
        """True if the memory has the dtype of an autocast that has ended."""
        dtype = memory.projected.keys.dtype
        if not isinstance(queries, Tensor) or queries.dtype == dtype:
            return False
        w_q = plain_weight(self._modules[self._query_layer])
        return (
            (w_q is None or w_q.dtype == queries.dtype)
            and dtype in (torch.bfloat16, torch.float16)
            and checks.autocast_dtype(queries.device) is None
        )

    def _draw(self, queries: Tensor | None, keys: Tensor | None) -> None:
        layers = self._modules
        score = layers[self._score_layer]
        if type(score) is not nn.Linear:  # the scoring layer is drawn last
            of_inputs = layers[self._query_layer], layers[self._key_layer]
            draw((*of_inputs, score), queries, keys, self.num_hiddens)

    def _dropout_p(self) -> float | None:
        """The probability of dropping a weight; None where the layer has to be called."""
        return plain_dropout(self._modules["dropout"])  # past nn.Module's __getattr__

    def _kept(
        self,
        results: tuple[Tensor | None, Tensor],
        values: Tensor,
        dropout_p: float | None,
        shape: Shape | None,
    ) -> Tensor:
        """Store ``attention_weights``; return the context, of called dropout if that has to be.

        Args:
            results: context, or None, and weights, in the shape of the results.
            values: (B,Tk,Dv).
            dropout_p: from :meth:`_dropout_p`.
            shape: of the results, or None.
        """
        context, weights = results
        self._keep(weights, context)
        if context is not None and dropout_p is not None:
            return context
        dropped = self.dropout(weights)
        if shape is None:
            return torch.bmm(dropped, values)
        rows, keys_len, _ = values.shape
        dropped = dropped.reshape(rows, 1 if shape.state else weights.shape[-2], keys_len)
        return shape.restore(torch.bmm(dropped, values))

    def _project(self, keys: Tensor) -> Tensor:
        return apply_layer(self._modules[self._key_layer], keys, self.bias)


class Additive(Layered):
    """Base of the additive modules: the call, on keys or on a memory."""

    def __init__(self, num_hiddens: int, dropout: float, cache_keys: bool) -> None:
        super().__init__(num_hiddens, dropout)
        if cache_keys not in (True, False):
            checks.reject(ValueError, "cache_keys", "be True or False", repr(cache_keys))
        self.cache_keys = cache_keys
        self._cache = KeyCache()

    def attend(self, queries: Tensor, memory: Memory, *, mask: Tensor | None = None) -> Tensor:
        """Attend to a memory with some queries (one decoder step, or the beams of one step).

        Args:
            queries: (B,Tq,Dq), or a decoder state (B,Dq), which leaves Tq out of the results. B as
                the memory's keys have it.
            memory: from :meth:`memory`.
            mask: bool (B,Tk) or (B,Tq,Tk), True where these queries may look, of what the memory's
                own lengths and mask leave.

        Returns:
            Context (B,Tq,Dv); sets ``attention_weights`` (B,Tq,Tk) too.

        Raises:
            TypeError, ValueError: as for calling the module; a memory of another module, or one
                made before the key layer changed.
        """
        queries, memory, mask, shape = self._checked(queries, memory, mask)
        self._draw(queries, None)
        w_q, _, w_v = self._plain_weights()
        check_features("queries", queries, self._modules[self._query_layer], w_q)
        projected, values, seen = memory.projected, memory.values, memory.valid_lens
        dropout_p, keys = self._dropout_p(), projected.keys
        if mask is not None:
            seen = reference.visible(seen, mask, keys.shape[1])
        route = backends.decide(
            *(queries, keys, values, w_q, None, w_v, None, self.num_hiddens, dropout_p or 0.0),
            keys_projected=True,
            masked=seen is not None and seen.dim() == 3,
        )
        return self._attend(route, queries, projected, values, seen, w_q, w_v, dropout_p, shape)

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
            queries: (B,Tq,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq),
                which leaves Tq out of the results. B may be any number of dimensions.
            keys: (B,Tk,Dk), dtype of queries.
            values: (B,Tk,Dv), dtype of queries.
            valid_lens: None, (B,) or (B,Tq), any integer or float dtype, or a list.
            mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look; with lengths, both hold. A
                query with nothing to look at weighs all keys alike.

        Returns:
            Context (B,Tq,Dv), dtype of queries.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        w_q, w_k, w_v = self._plain_weights()
        shape = None
        if w_v is None or not checks.usual(queries, keys, values, valid_lens, w_q, w_k):
            given = as_rows(queries, keys, values, valid_lens, mask)
            (queries, keys, values, valid_lens), mask, shape = given
            checks.inputs(queries, keys, values, valid_lens)
            if w_v is None:  # its layer, or all three, may be lazy
                self._draw(queries, keys)
                w_q, w_k, w_v = self._plain_weights()
            check_features("keys", keys, self._modules[self._key_layer])
            check_features("queries", queries, self._modules[self._query_layer])
        if mask is not None:
            checks.look(mask, queries, keys)
            valid_lens = reference.visible(valid_lens, mask, keys.shape[1])
        dropout_p = self._dropout_p()
        bias, hidden, masked = self.bias, self.num_hiddens, mask is not None
        drops = dropout_p or 0.0
        route = backends.decide(
            queries, keys, values, w_q, w_k, w_v, bias, hidden, drops, masked=masked
        )
        if route.form in ("one operator", "raw", "raw keys"):
            assert w_q is not None
            assert w_k is not None
            assert w_v is not None
            if route.form == "one operator":
                raw = (queries, keys, values, w_q, w_k, w_v)
                results = attend_small(route, raw, bias, valid_lens, drops, shape)
            else:
                inputs = (queries, keys, values, w_q, w_k, bias, w_v)
                results = attend_raw(route, inputs, valid_lens, drops, True, shape)
            return self._kept(results, values, dropout_p, shape)
        source = self._source(route, keys, w_k)
        if source is None:
            projected = ProjectedKeys(self._project(keys), None, None)
        else:
            projected = self._cache.project(source, values, w_v, route.table, route.records)
        rest = (values, valid_lens, w_q, w_v, dropout_p, shape)
        return self._attend(route, queries, projected, *rest)

    def _plain_weights(self) -> list[Tensor | None]:
        """Weights of the query, key and scoring layers; None for a layer that must be called."""
        layers = self._modules
        return plain_weights(
            layers[self._query_layer], layers[self._key_layer], layers[self._score_layer]
        )

    def _source(self, route: Route, keys: Tensor, weight: Tensor | None) -> Source | None:
        """What the projection of the keys depends on; None if it is not to be remembered."""
        if (
            not (self.cache_keys and route.reuse)
            or weight is None
            or route.backend != "cpu"  # comparing bytes would wait for a GPU
        ):
            return None
        return self._cache.source(keys, weight, self.bias, route.backend)

    def _attend(
        self,
        route: Route,
        queries: Tensor,
        projected: ProjectedKeys,
        values: Tensor,
        valid_lens: Tensor | None,
        w_q: Tensor | None,
        w_v: Tensor | None,
        dropout_p: float | None,
        shape: Shape | None,
    ) -> Tensor:
        rest = (valid_lens, dropout_p or 0.0)
        if w_v is not None and w_q is not None:
            results = attend_queries(
                route, queries, w_q, projected, values, w_v, *rest, shape=shape
            )
            return self._kept(results, values, dropout_p, shape)
        asked = apply_layer(self._modules[self._query_layer], queries)
        if w_v is not None:
            results = attend_projected(route, asked, projected, values, w_v, *rest, shape=shape)
            return self._kept(results, values, dropout_p, shape)
        score_layer = self._modules[self._score_layer]  # called, as the course's code does
        assert score_layer is not None
        scores = reference.projected_scores(asked, projected.keys, score_layer)
        weights = reference.masked_softmax(scores, valid_lens)
        weights = weights if shape is None else shape.restore(weights)
        return self._kept((None, weights), values, dropout_p, shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": KeyCache()}
