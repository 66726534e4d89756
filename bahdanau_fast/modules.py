"""Additive attention modules: names, arguments and state_dict keys of the d2l course code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks, reference, transforms
from bahdanau_fast.backends import limits
from bahdanau_fast.backends.route import Route
from bahdanau_fast.functional import attend_projected, attend_queries, attend_raw, attend_small
from bahdanau_fast.kept_weights import KeepsWeights
from bahdanau_fast.key_cache import KeyCache, Source, may_share
from bahdanau_fast.layers import apply_layer, plain_parameters, plain_weight
from bahdanau_fast.lazy import draw
from bahdanau_fast.lifetime import Lifetime
from bahdanau_fast.memory import Maker, Memory, ProjectedKeys, project
from bahdanau_fast.projection import shared_linear
from bahdanau_fast.signature import additive_attention, read_signature, shows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bahdanau_fast.signature import Options

__all__ = ["AdditiveAttention", "MLPAttention"]


class _Additive(KeepsWeights):
    """What the additive modules share; a subclass names its three layers.

    Subclasses hold the layers as ordinary submodules (hooks, LoRA and parametrizations work) and
    say here which one multiplies the query, which the key, and which scores.
    """

    _query_layer: str
    _key_layer: str
    _score_layer: str

    bias: Tensor | None

    def __init__(
        self, num_hiddens: int, dropout: float, cache_keys: bool | Literal["trust"]
    ) -> None:
        super().__init__()
        checks.probability("dropout", dropout)
        if cache_keys not in (True, False, "trust"):
            need = "be True, False or 'trust'"
            checks.reject(ValueError, "cache_keys", need, repr(cache_keys))
        self.num_hiddens = num_hiddens
        self.dropout = nn.Dropout(dropout)
        self.cache_keys = cache_keys
        self._cache = KeyCache()

    def memory(
        self, keys: Tensor, values: Tensor | None = None, valid_lens: Tensor | None = None
    ) -> Memory:
        """Project the keys once, for any number of :meth:`attend` calls.

        Args:
            keys: (B,Tk,Dk).
            values: (B,Tk,Dv); the keys themselves unless given.
            valid_lens: None, (B,) or (B,Tq).

        Returns:
            A memory; gradients flow through it to ``keys``, ``values`` and the key layer.

        Of a lazy module that was never called this draws the weights of the key layer, then those
        of the scoring layer; the first :meth:`attend` draws those of the query layer. (A first
        call of the module itself draws the query layer's first, as the course's does.)

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        values = keys if values is None else values
        checks.source(keys, values, valid_lens)
        self._draw(None, keys)
        layer = self._modules[self._key_layer]
        _check_features("keys", keys, layer)
        if self.bias is not None:
            checks.same_kind("keys", keys, "the module's bias", self.bias)
        backend = backends.resolve(keys.device, dtype=keys.dtype)
        weight, w_v = plain_weight(layer), plain_weight(self._modules[self._score_layer])
        if torch.compiler.is_compiling() or not may_share(keys, weight, self.bias):
            own, lifetime, weight = self._project(keys), None, None
        else:
            assert weight is not None
            lifetime = Lifetime()
            own, _ = shared_linear(keys, weight, self.bias, lifetime)
        if w_v is None:  # steps will call the layer, and no kernel
            projected = ProjectedKeys(own, None, None, None, lifetime)
        else:
            projected = project(own, backend)._replace(lifetime=lifetime).share(values, w_v)
        maker = Maker.of(self, weight if backend == "cpu" else None, self.bias)
        return Memory(projected, values, valid_lens, maker)

    def attend(self, queries: Tensor, memory: Memory) -> Tensor:
        """Look at a memory with some queries (one decoder step, or the beams of one step).

        Args:
            queries: (B,Tq,Dq).
            memory: from :meth:`memory`.

        Returns:
            Context (B,Tq,Dv); sets ``attention_weights`` (B,Tq,Tk) too.

        Raises:
            TypeError, ValueError: as for calling the module; a memory of another module, or one
                made before the key layer changed.
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
        checks.queries_for(queries, memory.projected.keys, memory.valid_lens)
        self._draw(queries, None)
        w_q, _, w_v = self._plain_weights()
        _check_features("queries", queries, self._modules[self._query_layer], w_q)
        projected, values, lens = memory.projected, memory.values, memory.valid_lens
        dropout_p, keys = self._dropout_p(), projected.keys
        route = backends.decide(
            *(queries, keys, values, w_q, None, w_v, None, self.num_hiddens, dropout_p),
            keys_projected=True,
        )
        return self._attend(route, queries, projected, values, lens, w_q, w_v, dropout_p)

    def explain(self, queries: Tensor, keys: Tensor | Memory, values: Tensor | None = None) -> str:
        """How a call with these would be computed, and why; nothing is computed.

        Args:
            queries: (B,Tq,Dq).
            keys: (B,Tk,Dk), or a memory.
            values: (B,Tk,Dv); the keys unless given.

        Raises:
            ValueError: a backend was asked for that cannot serve the call.
        """
        w_q, w_k, w_v = self._plain_weights()
        known = isinstance(keys, Memory)
        if isinstance(keys, Memory):
            w_k, values, keys = None, keys.values, keys.projected.keys
        rest = (self.bias, self.num_hiddens, self._dropout_p())
        values = keys if values is None else values
        route = backends.decide(
            *(queries, keys, values, w_q, w_k, w_v, *rest), keys_projected=known
        )
        return route.reason

    def _additive(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        checks.inputs(queries, keys, values, valid_lens)
        self._draw(queries, keys)
        w_q, w_k, w_v = weights = self._plain_weights()
        _check_features("keys", keys, self._modules[self._key_layer], w_k)
        _check_features("queries", queries, self._modules[self._query_layer], w_q)
        dropout_p = self._dropout_p()
        route = backends.decide(
            queries, keys, values, *weights, self.bias, self.num_hiddens, dropout_p
        )
        if route.form in ("one operator", "raw keys"):
            assert w_q is not None
            assert w_k is not None
            assert w_v is not None
            if route.form == "one operator":
                raw = (queries, keys, values, w_q, w_k, w_v)
                results = attend_small(raw, self.bias, valid_lens, dropout_p)
            else:
                inputs = (queries, keys, values, w_q, w_k, self.bias, w_v)
                results = attend_raw(route, inputs, valid_lens, dropout_p, True)
            return self._kept(results)
        source = self._source(route, keys, w_k)
        if source is None:
            projected = ProjectedKeys(self._project(keys), None, None)
        else:
            projected = self._cache.project(source, values, w_v, queries.shape[1])
        return self._attend(route, queries, projected, values, valid_lens, w_q, w_v, dropout_p)

    def _plain_weights(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of queries, keys and scores; None for a layer that is more than its weight."""
        layers = self._modules
        return (
            plain_weight(layers[self._query_layer]),
            plain_weight(layers[self._key_layer]),
            plain_weight(layers[self._score_layer]),
        )

    def _kept(self, results: tuple[Tensor, Tensor]) -> Tensor:
        """The context; ``attention_weights`` are kept."""
        context, weights = results
        self._keep(weights)
        return context

    def _source(self, route: Route, keys: Tensor, weight: Tensor | None) -> Source | None:
        """What the projection of the keys depends on, where it may be reused."""
        trusted = self.cache_keys == "trust"
        if (
            not (self.cache_keys and route.reuse)
            or weight is None
            or keys.numel() < limits.LIMITS.reuse_elements
            or (route.backend != "cpu" and not trusted)  # to compare bytes is to wait for a GPU
            or not may_share(keys, weight, self.bias, trusted)
        ):
            return None
        return Source.of(keys, weight, self.bias, route.backend, trusted)

    def _is_from_autocast(self, queries: Tensor, memory: Memory) -> bool:
        """Whether the memory has the dtype of an autocast that is over."""
        dtype = memory.projected.keys.dtype
        if not isinstance(queries, Tensor) or queries.dtype == dtype:
            return False
        w_q = plain_weight(self._modules[self._query_layer])
        return (
            (w_q is None or w_q.dtype == queries.dtype)
            and dtype in (torch.bfloat16, torch.float16)
            and transforms.autocast_dtype(queries.device) is None
        )

    def _draw(self, queries: Tensor | None, keys: Tensor | None) -> None:
        layers = self._modules
        score = layers[self._score_layer]
        if type(score) is not nn.Linear:  # it is the last to be drawn
            of_inputs = layers[self._query_layer], layers[self._key_layer]
            draw((*of_inputs, score), queries, keys, self.num_hiddens)

    def _dropout_p(self) -> float:
        dropout = self._modules["dropout"]  # past nn.Module's __getattr__
        assert dropout is not None
        p: float = getattr(dropout, "p", 0.0) if dropout.training else 0.0
        return p

    def _project(self, keys: Tensor) -> Tensor:
        return apply_layer(self._modules[self._key_layer], keys, self.bias)

    def _attend(
        self,
        route: Route,
        queries: Tensor,
        projected: ProjectedKeys,
        values: Tensor,
        valid_lens: Tensor | None,
        w_q: Tensor | None,
        w_v: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        if w_v is not None and w_q is not None:
            return self._kept(
                attend_queries(route, queries, w_q, projected, values, w_v, valid_lens, dropout_p)
            )
        asked = apply_layer(self._modules[self._query_layer], queries)
        rest = (valid_lens, dropout_p)
        if w_v is not None:
            return self._kept(attend_projected(route, asked, projected, values, w_v, *rest))
        score_layer = self._modules[self._score_layer]  # called, as the course's code does
        assert score_layer is not None
        return self._kept(reference.attend(asked, projected.keys, values, score_layer, *rest))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": KeyCache()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "num_hiddens" not in self.__dict__:  # pickled by version 0.1.0
            self.num_hiddens = int(self._modules[self._key_layer].out_features)  # type: ignore[arg-type, union-attr]


def _check_features(
    name: str, tensor: Tensor, layer: nn.Module | None, weight: Tensor | None = None
) -> None:
    if (
        weight is not None
        and weight.shape[1] == tensor.shape[2]
        and weight.dtype is tensor.dtype
        and weight.is_cpu
        and tensor.is_cpu
    ):
        return  # on the CPU, and all is well
    # A lazy layer has no size yet, a changed one (LoRA, quantized, hooked) checks for itself.
    parameters = plain_parameters(layer)
    if parameters is not None:
        weight = parameters["weight"]
        checks.features(name, tensor, weight.shape[1])
        checks.same_kind(name, tensor, "the module's weights", weight)


class AdditiveAttention(_Additive):
    """Additive attention, drop-in for ``d2l.AdditiveAttention`` of either signature.

    ``context_i = sum_j softmax_j(w_v . tanh(W_q q_i + W_k k_j)) v_j`` (Bahdanau, Cho and Bengio
    2014, https://arxiv.org/abs/1409.0473). Both call forms of the course are taken, by position or
    by name::

        AdditiveAttention(num_hiddens, dropout)                         # sizes seen at first call
        AdditiveAttention(key_size, query_size, num_hiddens, dropout)   # three numbers: no dropout

    After ``torch.manual_seed`` either form draws the weights that the course's module draws; the
    lazy form draws them at its first call. Dropout masks are drawn another way than the course's,
    so with the same seed other weights are dropped, each with the same probability.

    An unchanged decoder loop that passes the same ``keys`` tensor at each step projects it once, on
    the CPU: a call compares a fingerprint of the bytes of ``keys``, ``W_k.weight`` and ``bias``
    with the one taken when they were projected, so that a change is seen whoever makes it. Where a
    gradient is due they have to be the same tensors, with the same history, too. On a GPU nothing
    is reused by itself, since comparing would wait for the device: call :meth:`memory`, or say
    ``cache_keys="trust"``.

    Args:
        num_hiddens: H.
        dropout: probability of dropping an attention weight in training.
        key_size: Dk; with ``query_size``, Dq. Both or neither.
        bias: add a learnt (H,) bias inside the tanh.
        cache_keys: reuse the projection of an unchanged ``keys`` tensor. "trust": on any device,
            and without looking at the bytes, as long as keys, weight and bias are the same tensors
            at the same address and their version counters stand still. Fused optimizers, ``.data``,
            NumPy, DLPack, collectives and other processes do not move those: after a change of that
            kind such a module is silently wrong. False: project at each call.
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
        cache_keys: bool | Literal["trust"] = True,
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

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None
    ) -> Tensor:
        """Attend to ``keys`` and ``values``.

        Args:
            queries: (B,Tq,Dq), float32, bfloat16, float16 or float64.
            keys: (B,Tk,Dk), dtype of queries.
            values: (B,Tk,Dv), dtype of queries.
            valid_lens: None, (B,) or (B,Tq), any integer or float dtype.

        Returns:
            Context (B,Tq,Dv), dtype of queries.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        return self._additive(queries, keys, values, valid_lens)

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


class MLPAttention(_Additive):
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
        cache_keys: bool | Literal["trust"] = True,
    ) -> None:
        super().__init__(units, dropout, cache_keys)
        checks.positive_int("units", units)
        checks.positive_int("ipt_dim", ipt_dim)
        self.W_k = nn.Linear(ipt_dim, units, bias=False)
        self.W_q = nn.Linear(ipt_dim, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)
        self.bias = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, valid_length: Tensor | None = None
    ) -> Tensor:
        """Attend: query (B,Tq,ipt_dim), key (B,Tk,ipt_dim), value (B,Tk,Dv) to (B,Tq,Dv).

        Args:
            query: (B,Tq,ipt_dim).
            key: (B,Tk,ipt_dim).
            value: (B,Tk,Dv).
            valid_length: None, (B,) or (B,Tq).

        Returns:
            Context (B,Tq,Dv).

        Raises:
            TypeError, ValueError: as for :class:`AdditiveAttention`.
        """
        return self._additive(query, key, value, valid_length)
