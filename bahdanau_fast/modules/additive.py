"""Additive attention modules: names, arguments and state_dict keys of the d2l course code."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, checks, run
from bahdanau_fast.call import Call
from bahdanau_fast.memory import Memory
from bahdanau_fast.memory.key_cache import KeyCache
from bahdanau_fast.memory.shapes import as_rows
from bahdanau_fast.modules.attention_weights import keep
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.d2l_signature import read_signature, shown
from bahdanau_fast.modules.from_layers import FromLayers
from bahdanau_fast.modules.layers import parts_of, project_if_changed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bahdanau_fast.modules.d2l_signature import Options


class AdditiveAttention(FromLayers, Additive):
    """Additive attention, drop-in for ``d2l.AdditiveAttention`` of either signature.

    ``context_i = sum_j softmax_j(w_v . tanh(W_q q_i + W_k k_j)) v_j`` (Bahdanau, Cho and Bengio
    2014, https://arxiv.org/abs/1409.0473). Both signatures of the course are accepted, by position
    or by name::

        AdditiveAttention(num_hiddens, dropout)                         # sizes from the first call
        AdditiveAttention(key_size, query_size, num_hiddens, dropout)   # three numbers: no dropout

    After ``torch.manual_seed`` either form draws the weights that the course's module draws; the
    lazy form draws them at its first call. Dropout masks differ from the course's for the
    same seed; weights are dropped with the same probability.

    An unchanged decoder loop that passes the same ``keys`` tensor at each step projects it once, on
    the CPU: a call compares a fingerprint of the bytes of ``keys``, ``W_k.weight`` and ``bias``
    with the one taken when they were projected, so every change is noticed. When gradients are
    needed, they also have to be the same tensors, with the same history. On a GPU nothing is reused
    automatically, since comparing would wait for the device: call :meth:`memory`.

    Args:
        num_hiddens: number of hidden units, H.
        dropout: probability of dropping an attention weight in training.
        key_size: Dk; with ``query_size``, Dq. Both or neither.
        bias: add a learnt (H,) bias inside the tanh.
        cache_keys: reuse the projection of an unchanged ``keys`` tensor; False: project at each
            call.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid", in the place of the tanh.
        negative_slope: of leaky_relu.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,Tq,Tk) of the last call, after softmax, before dropout, in the
            autograd graph.

    Raises:
        TypeError: arguments that fit neither signature.
        ValueError: a size below 1, a dropout outside [0, 1], another activation.

    >>> attention = AdditiveAttention(8, dropout=0.1).eval()
    >>> queries, keys = torch.zeros(2, 1, 20), torch.ones(2, 10, 2)
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> attention(queries, keys, values, torch.tensor([2, 6])).round(decimals=4).tolist()
    [[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
    """

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

    def __init__(
        self,
        *sizes: Any,
        bias: bool = False,
        cache_keys: bool = True,
        activation: str = "tanh",
        negative_slope: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> None:
        key_size, query_size, num_hiddens, dropout = read_signature(sizes, named)
        super().__init__(num_hiddens, dropout, activation, negative_slope)
        self._remember(cache_keys)
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        if key_size is None or query_size is None:
            self.W_k: nn.Linear = nn.LazyLinear(num_hiddens, **factory)
            self.W_q: nn.Linear = nn.LazyLinear(num_hiddens, **factory)
            self.w_v: nn.Linear = nn.LazyLinear(1, **factory)
        else:
            self.W_k = nn.Linear(key_size, num_hiddens, **factory)
            self.W_q = nn.Linear(query_size, num_hiddens, **factory)
            self.w_v = nn.Linear(num_hiddens, 1, **factory)
        zeros = torch.zeros(num_hiddens, device=device, dtype=dtype)
        self.bias = nn.Parameter(zeros) if bias else None

    def _remember(self, cache_keys: bool) -> None:
        if cache_keys not in (True, False):
            checks.reject(ValueError, "cache_keys", "be True or False", repr(cache_keys))
        self.cache_keys = cache_keys
        self._cache = KeyCache()

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        query_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend to ``keys`` and ``values``.

        Args:
            queries: (B,Tq,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq),
                which leaves Tq out of the results. B may be any number of dimensions. Queries of
                all rows may be (Dq,); or (1,Tq,Dq), but for Tq = B or one key.
            keys: (B,Tk,Dk), dtype of queries.
            values: (B,Tk,Dv), dtype of queries; default: the keys.
            valid_lens: None, (B,) or (B,Tq), any integer or float dtype, or a list.
            mask: bool (B,Tk), or what broadcasts to (B,Tq,Tk), True where a query may look; with
                lengths, both hold. A query with nothing to look at weighs all keys alike.
            causal: query i sees the keys j <= i alone, as with ``is_causal`` of torch's
                ``scaled_dot_product_attention``; with lengths and a mask, all hold.
            query_mask: bool (B,Tq), False where context and weights are zero, with no gradient.
            scale: a factor of the scores.

        Returns:
            Context (B,Tq,Dv), dtype of queries.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        w_q, w_k, w_v, _ = parts = parts_of(self)
        values = keys if values is None else values
        usual = (  # of plain tensors and layers: the operator refuses what is wrong with them
            not (w_q is None or w_k is None or w_v is None)
            and type(queries) is type(keys) is type(values) is Tensor
            and len(rows := queries.shape) == len(others := keys.shape) == 3
            and rows[0] == others[0]
            and (valid_lens is None or type(valid_lens) is Tensor)
        )
        if usual:
            if mask is not None:
                mask = checks.as_mask(mask, queries.shape[1], keys)
            cache, hint, lens = self._cache if self.cache_keys else None, self._explain, valid_lens
            call = self._call(parts, queries, keys, values, lens, mask, cache, None, None, hint)
        elif isinstance(keys, Memory):  # a step of AttentionGRU, for the hooks of this module
            call = self._on_memory(queries, keys, mask)
        else:
            call = self._unusual(queries, keys, values, valid_lens, mask)
        if causal or query_mask is not None or scale is not None:
            context, weights, _ = run.attend_with(call, causal, query_mask, scale)
        else:
            context, weights = run.attend(call)
        keep(self, weights, context)
        return context

    if TYPE_CHECKING:
        __call__ = forward

    def _unusual(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None,
        mask: Tensor | None,
    ) -> Call:
        """A call of other shapes, types or layers than usual, whose inputs are checked here."""
        rows, mask, shape = as_rows(queries, keys, values, valid_lens, mask)
        queries, keys, values, valid_lens = rows
        checks.inputs(queries, keys, values, valid_lens)
        if mask is not None:
            mask = checks.as_mask(mask, queries.shape[1], keys)
        w_q, w_k, w_v, _ = parts = parts_of(self)
        if w_v is None:  # its layer, or all three, may be lazy
            self._draw(queries, keys)
            w_q, w_k, _, _ = parts = parts_of(self)
        keys = project_if_changed("keys", keys, self._modules[self._key_layer], w_k, self.bias)
        queries = project_if_changed("queries", queries, self._modules[self._query_layer], w_q)
        cache = self._cache if self.cache_keys and w_k is not None else None
        return self._call(parts, queries, keys, values, valid_lens, mask, cache=cache, shape=shape)

    @overload
    def attend(
        self,
        queries: Tensor,
        memory: Memory,
        *,
        mask: Tensor | None = ...,
        query_mask: Tensor | None = ...,
        scale: float | None = ...,
        return_scores: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def attend(
        self,
        queries: Tensor,
        memory: Memory,
        *,
        mask: Tensor | None = ...,
        query_mask: Tensor | None = ...,
        scale: float | None = ...,
        return_scores: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self,
        queries: Tensor,
        memory: Memory,
        *,
        mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        scale: float | None = None,
        return_scores: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to a memory with some queries (one decoder step, or the beams of one step).

        Args:
            queries: (B,Tq,Dq), or a decoder state (B,Dq), which leaves Tq out of the results. B as
                the memory's keys have it. Queries of all rows as in a call.
            memory: from :meth:`memory`.
            mask: bool (B,Tk), or what broadcasts to (B,Tq,Tk), True where these queries may look,
                of what lengths and mask of the memory leave.
            query_mask: bool (B,Tq), False where context and weights are zero, with no gradient.
            scale: a factor of the scores.
            return_scores: return the scores too, as :meth:`scores` has them; softmax and context
                are then plain operations on them.

        Returns:
            Context (B,Tq,Dv), with the scores (B,Tq,Tk) if wanted; sets ``attention_weights``
            (B,Tq,Tk) too.

        Raises:
            TypeError, ValueError: as for calling the module; a memory of another module, or one
                made before the key layer changed.
        """
        call, found = self._on_memory(queries, memory, mask), None
        if return_scores or query_mask is not None or scale is not None:
            results = run.attend_with(call, False, query_mask, scale, return_scores)
            context, weights, found = results
        else:
            context, weights = run.attend(call)
        keep(self, weights, context)
        return context if found is None else (context, found)

    def scores(
        self, queries: Tensor, memory: Memory, clip: float | None = None, *, masked: bool = False
    ) -> Tensor:
        """The scores of a memory's keys, before the softmax.

        What is to be had instead of the softmax goes on top of them: log-probabilities, sparsemax,
        sampling. Lengths and mask of the memory are left to it, unless ``masked``.

        Args:
            queries: (B,Tq,Dq), or a decoder state (B,Dq); B as the memory's keys have it.
            memory: from :meth:`memory`.
            clip: give ``clip * tanh(score)``, as pointer networks do (Bello et al. 2016,
                https://arxiv.org/abs/1611.09940); None gives the scores themselves.
            masked: give -inf where lengths or mask of the memory forbid to look, which may be
                everywhere.

        Returns:
            (B,Tq,Tk), for a state (B,Tk), in the autograd graph; ``attention_weights`` stay as
            they are.

        Raises:
            TypeError, ValueError: as for :meth:`attend`; a clip that is no finite number.
        """
        call = self._on_memory(queries, memory, None)
        if clip is not None:
            checks.finite("clip", clip)
        return run.scores(call._replace(scores_only=True), clip, masked)

    def explain(
        self,
        queries: Tensor,
        keys: Tensor | Memory,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> str:
        """How a call with these inputs would be computed, and why, without computing it.

        Args:
            queries: (B,Tq,Dq).
            keys: (B,Tk,Dk), or a memory.
            values: (B,Tk,Dv); default: the keys.
            mask: of the call, or None.

        Raises:
            TypeError, ValueError: the requested backend cannot serve the call, or queries or mask
                do not fit the memory.
        """
        projected = None
        if isinstance(keys, Memory):
            keys = self._out_of_autocast(keys, queries)
            queries, mask, _ = keys.for_queries(queries, mask)
            values, projected = keys.values, keys.projected
            keys = projected.keys
        values = keys if values is None else values
        queries, keys, values, _ = as_rows(queries, keys, values, None, None)[0]
        call = self._call(parts_of(self), queries, keys, values, None, mask, projected=projected)
        return backends.decide(call).reason

    def extra_repr(self) -> str:
        """What ``print`` shows beside the layers."""
        return f"{super().extra_repr()}, cache_keys={self.cache_keys}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": KeyCache()}


AdditiveAttention.__init__.__signature__ = inspect.signature(shown)  # type: ignore[attr-defined]
