"""Additive attention that sees where it looked before: location-sensitive attention, coverage."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from bahdanau_fast import checks, run
from bahdanau_fast.call import Call, Located
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules.alignment import NORMALIZATIONS, last_weights, normalized, within
from bahdanau_fast.modules.attention_weights import keep
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.layers import plain_convolution, plain_weight

Init = TypeVar("Init", bound=Callable[..., None])


def _told(init: Init) -> Init:
    """An ``__init__`` that says what it takes to a call that does not fit."""

    @functools.wraps(init)
    def told(self: Any, *sizes: Any, **options: Any) -> None:
        try:
            inspect.signature(init).bind(self, *sizes, **options)
        except TypeError as error:
            taken = "LocationAttention takes (key_size, query_size, num_hiddens, ...)"
            raise TypeError(f"{taken}, {error}") from None
        init(self, *sizes, **options)

    return told  # type: ignore[return-value]


class LocationAttention(Additive):
    """``score_j = w_v . tanh(W_q q + W_k k_j + W_f f_j + bias)`` with features f of earlier steps.

    Chorowski et al. 2015, https://arxiv.org/abs/1506.07503, equations 8 and 9: f is a convolution,
    along the keys, of the ``location``, which is what the caller says of earlier steps: the
    previous weights; with ``inputs=2`` the previous weights and their sum over all steps, as
    Tacotron 2 has it. With ``channels=None`` there is no convolution and f is the location itself:
    coverage (See, Liu and Manning 2017, https://arxiv.org/abs/1704.04368, equation 11).

    Convolution, W_f, scores, softmax and context are one operator a step on the CPU. A gradient
    goes through the location where it has one: detach it to stop that.

    ``normalize`` makes weights of scores e and of the weights a' of the last step, ``previous``:
    "softmax"; "sigmoid", sigmoid(e) over its sum (Chorowski et al. 2015, section 2.3); "forward",
    (a'[j] + a'[j-1]) softmax(e)[j] over its sum (Zhang, Ling and Dai 2018,
    https://arxiv.org/abs/1807.06736, algorithm 1); "stepwise", a'[j] p[j] + a'[j-1] (1 - p[j-1]),
    p = sigmoid(e) (He, Deng and He 2019, https://arxiv.org/abs/1906.00672, equation 9), where what
    moves past the last key is lost. All but the softmax are computed on top of fused scores.

    Args:
        key_size: Dk.
        query_size: Dq.
        num_hiddens: number of hidden units, H.
        channels: C, of the convolution; None for no convolution.
        kernel_size: taps of the convolution, an odd number.
        inputs: channels of the location.
        dropout: probability of dropping an attention weight in training.
        bias: add a learnt (H,) bias inside the tanh.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid", in the place of the tanh.
        negative_slope: of leaky_relu.
        normalize: "softmax", "sigmoid", "forward" or "stepwise".
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        attention_weights: (B,1,Tk) of the last call, after softmax, before dropout, in the autograd
            graph.

    Raises:
        TypeError, ValueError: a size below 1, an even ``kernel_size``, a dropout outside [0, 1],
            another activation or way to normalize.

    >>> attention = LocationAttention(4, 6, 8, channels=3, kernel_size=5).eval()
    >>> keys = torch.randn(2, 10, 4)
    >>> memory, location = attention.memory(keys), torch.zeros(2, 1, 10)
    >>> for query in torch.randn(3, 2, 1, 6):
    ...     context = attention.attend(query, memory, location)
    ...     location = attention.attention_weights
    >>> tuple(context.shape)
    (2, 1, 4)
    """

    _reads_table = False
    normalize = "softmax"  # of modules that were pickled before one could choose

    @_told
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
        activation: str = "tanh",
        negative_slope: float = 0.01,
        normalize: str = "softmax",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_hiddens, dropout, activation, negative_slope)
        if normalize not in NORMALIZATIONS:
            names = ", ".join(map(repr, NORMALIZATIONS))
            checks.reject(ValueError, "normalize", f"be one of {names}", repr(normalize))
        self.normalize = normalize
        sizes = {"key_size": key_size, "query_size": query_size, "num_hiddens": num_hiddens}
        sizes |= {"kernel_size": kernel_size, "inputs": inputs}
        for name, size in sizes.items():
            checks.positive_int(name, size)
        if channels is not None:
            checks.positive_int("channels", channels)
        if not kernel_size % 2:
            checks.reject(ValueError, "kernel_size", "be odd", kernel_size)
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.W_q = nn.Linear(query_size, num_hiddens, **factory)
        self.W_k = nn.Linear(key_size, num_hiddens, **factory)
        self.w_v = nn.Linear(num_hiddens, 1, **factory)
        self.conv = None
        if channels is not None:
            padding = kernel_size // 2
            self.conv = nn.Conv1d(inputs, channels, kernel_size, padding=padding, **factory)
        self.W_f = nn.Linear(channels or inputs, num_hiddens, **factory)
        zeros = torch.zeros(num_hiddens, device=device, dtype=dtype)
        self.bias = nn.Parameter(zeros) if bias else None

    def attend(
        self,
        queries: Tensor,
        memory: Memory,
        location: Tensor,
        *,
        previous: Tensor | None = None,
        window: tuple[int, int] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One decoder step.

        Args:
            queries: (B,1,Dq), or a decoder state (B,Dq), which leaves the one out of the results. B
                as the memory's keys have it.
            memory: from :meth:`memory`.
            location: (B,inputs,Tk), the weights of earlier steps; the same for all queries.
            previous: ``attention_weights`` of the last step; None at the first one, which begins at
                the first key. For ``window``, and "forward" and "stepwise" weights.
            window: how many keys before and after the largest of ``previous`` may be looked at.
            mask: bool (B,Tk) or (B,1,Tk), True where this query may look, of what lengths
                and mask of the memory leave.

        Returns:
            Context (B,1,Dv); sets ``attention_weights`` (B,1,Tk) too.

        Raises:
            TypeError, ValueError: as for calling the module; a memory of another module, or one
                made before the key layer changed.
        """
        call = self._located(queries, memory, location, mask)
        if window is not None or self.normalize in ("forward", "stepwise"):
            previous = last_weights(previous, call)
        if window is not None:
            assert previous is not None
            call = call._replace(mask=within(window, previous, call.mask))
        if self.normalize == "softmax":
            context, weights = run.attend(call)
        else:
            weigh = functools.partial(normalized, self.normalize, previous=previous, call=call)
            context, weights, _ = run.attend_by_scores(call, weigh)
        keep(self, weights, context)
        return context

    def scores(
        self, queries: Tensor, memory: Memory, location: Tensor, clip: float | None = None
    ) -> Tensor:
        """The scores (B,Tq,Tk) of a memory's keys, before any mask and the softmax.

        Arguments and errors are as for :meth:`attend` and :meth:`AdditiveAttention.scores`.
        """
        if clip is not None:
            checks.finite("clip", clip)
        call = self._located(queries, memory, location, None)
        return run.scores(call._replace(scores_only=True), clip)

    def _located(
        self, queries: Tensor, memory: Memory, location: Tensor, mask: Tensor | None
    ) -> Call:
        """The call of some queries on a memory, with features of a location."""
        call = self._on_memory(queries, memory, mask)
        keys, shape, terms = call.keys, call.shape, self._terms
        conv, w_f = plain_convolution(self.conv), plain_weight(self.W_f)
        if self.conv is None or conv is not None:  # another convolution checks its inputs
            inputs = self.W_f.in_features if conv is None else conv[0].shape[1]
            if shape is not None:
                location = shape.rows("location", location, (inputs, keys.shape[1]))
            _check(location, inputs, keys)
        elif shape is not None:
            location = shape.flatten(location)
        is_called = not isinstance(call.w_v, Tensor) or w_f is None
        if is_called or (conv is None and self.conv is not None):
            # A layer that is more than its parameters is called.
            features = location if self.conv is None else self.conv(location)
            keys = keys + self.W_f(features.transpose(1, 2))
            return call._replace(keys=keys, projected=None)
        if conv is None:
            features = location.transpose(1, 2)
            return call._replace(terms=terms._replace(features=features, w_f=w_f))
        terms = terms._replace(w_f=w_f)
        return call._replace(terms=terms, located=Located(location, *conv))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        location: Tensor,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """:meth:`attend` to keys that are projected for this call alone.

        Args:
            queries: (B,1,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq),
                which leaves the one out of the results. B may be any number of dimensions.
            keys: (B,Tk,Dk), dtype of queries.
            values: (B,Tk,Dv), dtype of queries.
            location: (B,inputs,Tk), dtype of queries.
            valid_lens: None, (B,) or (B,1), any integer or float dtype, or a list.
            mask: bool (B,Tk) or (B,1,Tk), True where the query may look; with lengths, both hold.

        Returns:
            Context (B,1,Dv), dtype of queries.

        Raises:
            TypeError: something is not a floating tensor, or dtypes differ.
            ValueError: ranks, sizes or devices do not fit together.
        """
        return self.attend(queries, self.memory(keys, values, valid_lens, mask=mask), location)

    if TYPE_CHECKING:
        __call__ = forward


def _check(location: Tensor, inputs: int, keys: Tensor) -> None:
    """Weights of earlier steps, (B,inputs,Tk), of the keys (B,Tk,H)."""
    checks.rows("location", location)
    shape = (keys.shape[0], inputs, keys.shape[1])
    if tuple(location.shape) != shape:
        checks.reject(ValueError, "location", f"have shape {shape}", tuple(location.shape))
    checks.same_kind("location", location, "keys", keys)


class LocationSteps:
    """Takes the place of an attention in the loop of a decoder, for one sequence of steps.

    The location is the last step's weights; with two inputs, and their sum over all steps. Without
    a convolution it is that sum: coverage.
    """

    def __init__(self, attention: LocationAttention) -> None:
        self._attention, self.dropout = attention, attention.dropout
        features: Any = attention.W_f if attention.conv is None else attention.conv
        self._sees_both = features.weight.shape[1] == 2
        self._weights: Tensor | None = None
        self._total: Tensor | None = None

    @property
    def attention_weights(self) -> Tensor:
        """(B,1,Tk) of the last step."""
        assert self._weights is not None
        return self._weights

    def attend(self, queries: Tensor, memory: Memory) -> Tensor:
        """The context (B,1,Dv) of the next step."""
        attention, last, total = self._attention, self._weights, self._total
        if total is None:
            batch, keys_len, _ = memory.values.shape
            total = queries.new_zeros((batch, 1, keys_len))
        weights = total if last is None else last
        location = total if attention.conv is None else weights
        if self._sees_both:
            location = torch.cat((weights, total), 1)
        context = attention.attend(queries, memory, location, previous=last)
        now = attention.attention_weights
        assert now is not None
        self._weights, self._total = now, total + now
        return context

    def _shared(self, memory: Memory) -> Memory:
        return self._attention._shared(memory)
