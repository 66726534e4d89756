"""Bases of the modules: scripting, the weights of the last call, memories, additive layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks
from bahdanau_fast.call import Call
from bahdanau_fast.memory import Maker, Memory, ProjectedKeys, project
from bahdanau_fast.memory.key_cache import KeyCache, may_share
from bahdanau_fast.memory.shapes import Shape, source_as_rows
from bahdanau_fast.modules.attention_weights import attention_weights, state_of
from bahdanau_fast.modules.layers import (
    Parts,
    apply_layer,
    check_features,
    draw_if_lazy,
    parts_of,
    plain_weight,
    project_if_changed,
)
from bahdanau_fast.ops.projection import linear, shared_linear
from bahdanau_fast.ops.saved_tensors import PendingBackwards
from bahdanau_fast.reference import TANH, ScoreTerms


class Unscriptable(nn.Module):
    """Base of modules that say what to do where they, or what holds them, are to be scripted."""

    _instead = "use torch.export or torch.jit.trace"

    def __prepare_scriptable__(self) -> None:
        kind = type(self).__name__
        raise RuntimeError(f"torch.jit.script cannot compile {kind}: {self._instead}")


class KeepsWeights(Unscriptable):
    """Base of modules whose calls set ``attention_weights``."""

    attention_weights = attention_weights

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)


class Attention(KeepsWeights):
    """Base of modules that attend to keys."""

    _key_layer = ""  # none
    bias: Tensor | None

    def memory(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Memory:
        """Project the keys once, for any number of :meth:`attend` calls.

        Args:
            keys: (B,Tk,Dk), of a dot product as they are. B may be any number of dimensions.
            values: (B,Tk,Dv); default: the keys.
            valid_lens: None, (B,) or (B,Tq), also as a list.
            mask: bool (B,Tk), or of three dimensions that broadcast to (B,Tq,Tk), True where a
                query may look; with lengths, both hold.

        Returns:
            A memory; gradients flow through it to ``keys``, ``values`` and the key layer.

        On a lazy module that was never called, this draws the weights of the key layer, then those
        of the scoring layer; the first :meth:`attend` draws those of the query layer. (The first
        call of the module itself draws the query layer's weights first, as the course's does.)

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        return self._memory(keys, values, valid_lens, mask)

    def _memory(
        self,
        keys: Tensor,
        values: Tensor | None,
        valid_lens: Tensor | None,
        mask: Tensor | None = None,
        shared: bool = True,
    ) -> Memory:
        """As :meth:`memory`; unless ``shared``, for one operator, or for :meth:`_shared`."""
        values = keys if values is None else values
        keys, values, valid_lens, mask, batch = source_as_rows(keys, values, valid_lens, mask)
        mask = checks.keys_and_values(keys, values, valid_lens, mask)
        projected, maker = self._projected(keys, values, shared)
        return Memory(projected, values, valid_lens, mask, maker, batch)

    def _projected(
        self, keys: Tensor, values: Tensor, shared: bool
    ) -> tuple[ProjectedKeys, Maker | None]:
        """Keys as the calls on a memory take them, with these values."""
        return ProjectedKeys(keys), Maker(self)

    def _check_memory(self, memory: Memory, w_k: Tensor | None) -> None:
        """An error unless a memory is of this module, whose key layer has not changed since."""
        if not isinstance(memory, Memory):
            checks.reject(TypeError, "memory", "come from memory()", type(memory).__name__)
        maker = memory.maker
        if maker is None or torch.compiler.is_compiling():
            return
        if maker.module is not self:
            other = f"one made by another {type(maker.module).__name__}"
            checks.reject(ValueError, "memory", "come from memory() of this module", other)
        if torch._C._is_tracing():  # which knows no operator that gives numbers
            return
        if maker.sample is not None and maker.has_changed(w_k, self.bias):
            need = "be made after the last change of the key layer"
            checks.reject(ValueError, "memory", need, "an older one: call memory() again")

    def _keys(self, keys: Tensor, backwards: PendingBackwards | None) -> Tensor:
        """Projected keys, by a node that several calls share where ``backwards`` counts them."""
        return keys

    def _shared(self, memory: Memory) -> Memory:
        """A memory, for calls that share one node of the graph."""
        return memory


class Additive(Attention):
    """Base of the additive modules; a subclass has three layers.

    The layers are ordinary submodules of the subclass (hooks, LoRA and parametrizations work); the
    names of those for queries, keys and scores are class attributes.
    """

    _query_layer, _key_layer, _score_layer = "W_q", "W_k", "w_v"
    _terms = TANH  # of modules that were pickled before one could choose

    def __init__(
        self,
        num_hiddens: int,
        dropout: float,
        activation: str = "tanh",
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        checks.probability("dropout", dropout)
        checks.known_activation(activation, negative_slope)
        terms = ScoreTerms(None, None, activation, negative_slope)
        self._terms = TANH if terms == TANH else terms
        self.num_hiddens = num_hiddens
        self.dropout = nn.Dropout(dropout)
        self._weights: Any = None

    @property
    def activation(self) -> str:
        """Of the scores: "tanh", "relu", "leaky_relu" or "sigmoid"."""
        return self._terms.activation

    @property
    def negative_slope(self) -> float:
        """Of leaky_relu."""
        return self._terms.negative_slope

    @property
    def _reads_table(self) -> bool:
        """Whether its operators read a table of exponentials."""
        return self._terms.activation == "tanh"

    def extra_repr(self) -> str:
        """What ``print`` shows beside the layers."""
        slope = f", negative_slope={self.negative_slope}" * (self.activation == "leaky_relu")
        return f"bias={self.bias is not None}, activation={self.activation!r}{slope}"

    def _projected(
        self, keys: Tensor, values: Tensor, shared: bool
    ) -> tuple[ProjectedKeys, Maker | None]:
        self._draw(None, keys)
        _, w_k, w_v, _ = parts_of(self)
        tanh, backwards, token = self._reads_table, None, None
        shared = shared or not tanh
        if shared and not torch.compiler.is_compiling() and may_share(keys, w_k, self.bias):
            backwards = PendingBackwards()
            token = backwards.begin()
        projected_keys = self._keys(keys, backwards)
        backend = backends.resolve(keys.device, dtype=keys.dtype)
        # Without the scoring layer's weight, attend will call that layer instead of a kernel.
        reads_table = tanh and w_v is not None
        projected = project(
            projected_keys, reads_table and backends.keeps_table(backend, projected_keys)
        )
        if not shared:
            return projected, None
        projected = projected._replace(backwards=backwards, token=token)
        remembers_keys = backends.BACKENDS[backend].remembers_keys
        if w_v is not None and (reads_table or (backwards is not None and remembers_keys)):
            projected = projected.share(values, w_v, reads_table)
        sampled = w_k if backwards is not None and remembers_keys else None
        return projected, Maker.of(self, sampled, self.bias)

    def _keys(self, keys: Tensor, backwards: PendingBackwards | None) -> Tensor:
        layer, bias = self._modules[self._key_layer], self.bias
        check_features("keys", keys, layer)
        if bias is not None:
            checks.same_kind("keys", keys, "the module's bias", bias)
        weight = plain_weight(layer)
        if weight is None:
            return apply_layer(layer, keys, bias)
        if backwards is None or not may_share(keys, weight, bias):
            return linear(keys, weight, bias)
        return shared_linear(keys, weight, bias, backwards)[0]

    def _shared(self, memory: Memory) -> Memory:
        w_v = plain_weight(self._modules[self._score_layer])
        if w_v is None or not self._reads_table or memory.projected.shared is not None:
            return memory
        return replace(memory, projected=memory.projected.share(memory.values, w_v))

    def _on_memory(self, queries: Tensor, memory: Memory, mask: Tensor | None) -> Call:
        """The call of some queries on a memory, which has to be this module's and fit them."""
        w_q, w_k, w_v, _ = parts = parts_of(self)
        self._check_memory(memory, w_k)
        projected, shape = memory.projected, None
        usual = (
            memory.batch is None
            and mask is None
            and w_q is not None
            and w_v is not None
            and type(queries) is Tensor
            and len(rows := queries.shape) == 3
            and rows[0] == projected.keys.shape[0]
            and queries.dtype is projected.keys.dtype
        )
        if usual:
            mask = memory.mask
        else:
            memory = self._out_of_autocast(memory, queries)
            projected = memory.projected
            queries, mask, shape = memory.for_queries(queries, mask)
            self._draw(queries, None)
            w_q, *_ = parts = parts_of(self)
            layer = self._modules[self._query_layer]
            queries = project_if_changed("queries", queries, layer, w_q)
        return self._call(
            parts, queries, projected.keys, memory.values, memory.valid_lens, mask,
            None, shape, projected, self._explain if usual else None,
        )  # fmt: skip

    def _call(
        self,
        parts: Parts,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None,
        mask: Tensor | None,
        cache: KeyCache | None = None,
        shape: Shape | None = None,
        projected: ProjectedKeys | None = None,
        explain: Callable[[Call], object] | None = None,
    ) -> Call:
        """The call of these parts; the keys of a memory are projected."""
        w_q, w_k, w_v, dropout_p = parts
        if projected is not None:
            w_k = None
        bias = None if w_k is None else self.bias
        scorer: Any = self._modules[self._score_layer] if w_v is None else w_v
        dropout = self._modules["dropout"] if dropout_p is None else None
        # By position, which takes half of the time of keywords: in the order of the class.
        return Call(
            queries, keys, values, scorer, w_q, w_k, bias, valid_lens, mask, dropout_p or 0.0,
            dropout, cache, shape, projected, self._terms, None, True, False, None, explain,
        )  # fmt: skip

    def _explain(self, call: Call) -> None:
        """An error in words about the inputs of a call, if they are wrong; see :class:`Call`."""
        if call.w_k is not None:
            checks.inputs(call.queries, call.keys, call.values, call.valid_lens)
            check_features("keys", call.keys, self._modules[self._key_layer])
        else:  # on a memory, whose keys and values memory() checked
            checks.queries_for(call.queries, call.keys, call.valid_lens, call.mask)
        check_features("queries", call.queries, self._modules[self._query_layer])

    def _out_of_autocast(self, memory: Memory, queries: Tensor) -> Memory:
        """The memory in the dtype of queries, if its dtype is from an autocast that has ended."""
        dtype = memory.projected.keys.dtype
        if not isinstance(queries, Tensor) or dtype not in (torch.bfloat16, torch.float16):
            return memory
        w_q = plain_weight(self._modules[self._query_layer])
        fits = w_q is None or w_q.dtype == queries.dtype
        ended = fits and checks.autocast_dtype(queries.device) is None
        return memory.to(queries.dtype) if ended else memory

    def _draw(self, queries: Tensor | None, keys: Tensor | None) -> None:
        """Draw lazy layers in the order of d2l's calls: queries, keys, scores; None leaves its."""
        layers, score = self._modules, self._modules[self._score_layer]
        if type(score) is nn.Linear:  # which is drawn last
            return
        if queries is not None:
            draw_if_lazy(layers[self._query_layer], "queries", queries)
        if keys is not None:
            draw_if_lazy(layers[self._key_layer], "keys", keys)
        if isinstance(score, nn.LazyLinear):
            like: Any = keys if queries is None else queries
            draw_if_lazy(score, "num_hiddens", like.new_empty(1, self.num_hiddens))
