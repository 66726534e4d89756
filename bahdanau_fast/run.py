"""From a call to its operator: the one place where a route is carried out.

Traced code calls operators by the dispatcher. Eager code that autograd records calls their node,
other eager code the kernel itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.backends import Route
from bahdanau_fast.call import Call, Located
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.ops import sharding
from bahdanau_fast.ops.attend import attend as attend_operator
from bahdanau_fast.ops.attend import attend_scores
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.location import attend_location, convolved
from bahdanau_fast.ops.operator import kernel, name_for
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.ops.whole import additive_attention, attend_step
from bahdanau_fast.reference import TANH

__all__ = ["attend", "project", "scores"]


class _Results(NamedTuple):
    """Context (B,Tq,Dv), None where it is in the link, and weights (B,Tq,Tk), empty if unwanted."""

    context: Tensor | None
    weights: Tensor
    link: Link | None = None


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Context and weights.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk), in the shape that the call asks for; the second may be
        empty where weights are not wanted.

    Raises:
        ValueError: a backend was asked for that cannot serve the call.
    """
    route = backends.decide(call)
    if type(call.queries) is not Tensor:
        sharding.register_for(call.queries)
    if route.form == "one operator" and (route.records or call.dropout_p > 0.0):
        results = _whole(route, call)
    elif route.form in ("one operator", "step", "raw", "raw keys"):
        results = _step(route, call)
    else:
        results = _attend(route, call)
    return _finish(call, *results)


def scores(call: Call, clip: float | None = None) -> Tensor:
    """The scores (B,Tq,Tk) before mask and softmax, in the shape that the call asks for.

    Args:
        call: with ``scores_only``.
        clip: scores u become ``clip * tanh(u)``.

    Raises:
        ValueError: as for :func:`attend`.
    """
    route = backends.decide(call)
    call = _projected(route, call)
    queries, keys, w_v = call.queries, call.keys, call.w_v
    if _is_plain(route, call):
        found = reference.projected_scores(queries, keys, w_v, call.inside)
    else:
        features, w_f, *numbers = _inside(call)
        found = attend_scores.overload(queries, keys, w_v, features, w_f, *numbers)
    found = reference.clipped(found, clip).to(queries.dtype)
    return found if call.shape is None else call.shape.restore(found)


def project(call: Call) -> Call:
    """The same call with projected queries and keys.

    Raises:
        ValueError: as for :func:`attend`.
    """
    return _projected(backends.decide(call), call)


def _whole(route: Route, call: Call) -> _Results:
    """Projections and all in one operator that can be differentiated."""
    inputs = (call.queries, call.keys, call.values, call.w_q, call.w_k, call.w_v, call.bias)
    if route.records and _are_of_inference(inputs):
        return _plain(_projected(route, call))
    others = (call.valid_lens, call.mask, sharding.dropout_seed(call.dropout_p, call.queries))
    if route.records:
        weights, link = additive_attention.record(inputs, others, (call.dropout_p,))  # type: ignore[arg-type]
        return _Results(None, weights, link)
    with torch._C._AutoDispatchBelowAutograd():
        context, weights, *_ = additive_attention.now(*inputs, *others, call.dropout_p)
    return _Results(context, weights)


def _step(route: Route, call: Call) -> _Results:
    """Without gradients and dropout: projections in the operator, as far as the route says."""
    queries, w_q, keys, w_k, bias = call.queries, call.w_q, call.keys, call.w_k, call.bias
    table = keys_max = None
    if route.form == "step":
        keys, table, keys_max, *_ = _keys(route, call)
        w_k = bias = None
    elif route.form == "raw keys":
        assert w_q is not None
        queries, w_q = linear(queries, w_q), None
    with torch._C._AutoDispatchBelowAutograd():
        context, weights = kernel(attend_step, route.backend)(
            *(queries, keys, call.values, w_q, w_k, bias, call.w_v),
            *(call.valid_lens, call.mask, table, keys_max, call.need_weights),
        )
    return _Results(context, weights)


def _attend(route: Route, call: Call) -> _Results:
    """Projections in front of the operator."""
    call = _projected(route, call)
    if _is_plain(route, call):
        return _plain(call)
    features, w_f, *inside = _inside(call)
    inputs: tuple[Any, ...] = (call.queries, call.keys, call.values, call.w_v)
    others: tuple[Any, ...] = (call.valid_lens, call.mask)
    numbers: tuple[Any, ...] = (call.dropout_p, *inside)
    assert call.projected is not None
    _, table, keys_max, shared, backwards, _ = call.projected
    if call.located is not None:
        operator = attend_location
        inputs += (*call.located, w_f)
    else:
        operator = attend_operator
        inputs, others = (*inputs, features, w_f), (*others, table, keys_max)
    others += (sharding.dropout_seed(call.dropout_p, call.queries),)
    recorded = route.records and checks.needs_gradient(*inputs)
    if operator is attend_operator:
        precise = recorded or route.traced
        name = name_for(route.backend, route.traced)
        numbers += (call.need_weights or recorded, precise, name)
    if route.traced:  # what traces the call has to meet the operator itself
        context, weights, *_ = operator.overload(*inputs, *others, *numbers)
        return _Results(context, weights)
    if recorded:
        if _are_of_inference(inputs):
            return _plain(call)
        options = (shared, backwards, route.backend)
        weights, link = operator.record(inputs, others, numbers, *options)
        return _Results(None, weights, link)
    with torch._C._AutoDispatchBelowAutograd():
        context, weights, *_ = kernel(operator, route.backend)(*inputs, *others, *numbers)
    return _Results(context, weights)


def _plain(call: Call) -> _Results:
    """By the reference; the call is projected."""
    inside = call.inside
    if call.located is not None:
        inside = inside._replace(features=convolved(*call.located))
    inputs = (call.queries, call.keys, call.values, call.w_v)
    rest = (call.valid_lens, call.dropout_p, inside, call.mask)
    return _Results(*reference.attend(*inputs, *rest))


def _is_plain(route: Route, call: Call) -> bool:
    """Whether plain PyTorch computes it: other operators have no rules for DTensors."""
    if route.backend == "reference" or route.form == "called":
        return True
    others = call.scores_only or call.located is not None
    return others and sharding.is_sharded(call.queries)


def _are_of_inference(inputs: tuple[Any, ...]) -> bool:
    """Whether there are tensors of inference mode: only plain operations may record them."""
    return any(x is not None and x.is_inference() for x in inputs)


def _inside(call: Call) -> tuple[Tensor | None, Tensor | None, int, float]:
    """What is inside the activation, as operators take it."""
    features, w_f, activation, negative_slope = call.inside
    return features, w_f, checks.ACTIVATIONS.index(activation), float(negative_slope)


def _projected(route: Route, call: Call) -> Call:
    """The same with projected queries and keys, and all of it in one dtype."""
    plain, queries = route.backend == "reference", call.queries
    if call.w_q is not None:
        queries = linear(queries, call.w_q, None, plain)
    projected = _keys(route, call)
    keys, values, w_v, shared = projected.keys, call.values, call.w_v, projected.shared
    if shared is not None:
        if route.share and isinstance(w_v, Tensor) and shared.fits(values, w_v):
            keys, values, w_v = shared.results
        else:
            projected = projected._replace(shared=None)
    # Autocast gives projections its dtype, and a memory may be made outside of it.
    dtype, inside, located = keys.dtype, call.inside, call.located
    if inside is not TANH:
        features, w_f = (_to(x, dtype) for x in inside[:2])
        inside = inside._replace(features=features, w_f=w_f)
    if located is not None:
        located = Located(*(_to(x, dtype) for x in located))
    return call._replace(
        queries=_to(queries, dtype),
        keys=keys,
        values=_to(values, dtype),
        w_v=_to(w_v, dtype),
        w_q=None,
        w_k=None,
        bias=None,
        inside=inside,
        located=located,
        projected=projected,
    )


def _to(x: Any, dtype: torch.dtype) -> Any:
    """A tensor in a dtype; to ask first is quicker than a needless ``to``."""
    return x if not isinstance(x, Tensor) or x.dtype is dtype else x.to(dtype)


def _keys(route: Route, call: Call) -> ProjectedKeys:
    """Projected keys: of a memory, of the last call if nothing has changed, or new."""
    if call.projected is not None:
        return call.projected
    keys, w_k, bias = call.keys, call.w_k, call.bias
    source = None
    if call.cache is not None and route.backend == "cpu":
        # Calls with a location read no table; their gradients meet in one node all the same.
        reads_table = call.located is None
        meet = not reads_table and route.records and not route.traced
        # Where nothing is derived from the bytes of the keys, none are compared.
        by_version = w_k is None and not route.table
        if route.table or meet if w_k is None else route.reuse:
            source = call.cache.source(keys, w_k, bias, route.backend, by_version)
    if source is None:
        own = keys if w_k is None else linear(keys, w_k, bias, route.backend == "reference")
        return ProjectedKeys(own, None, None)
    assert call.cache is not None
    w_v = call.w_v if isinstance(call.w_v, Tensor) else None
    return call.cache.project(source, call.values, w_v, route.table, route.records, reads_table)


def _finish(
    call: Call, context: Tensor | None, weights: Tensor, link: Link | None
) -> tuple[Tensor, Tensor]:
    """Context and weights as the caller sees them, the gradient of the one through the other."""
    shape, made = call.shape, context if link is None else link.context
    assert made is not None
    dtype = made.dtype
    if weights.dtype is not dtype and not checks.softmax_in_fp32(weights.device):
        weights = weights.to(dtype)
    if shape is not None and weights.dim() == 3:
        weights = shape.restore(weights)
    if call.dropout is not None:
        dropped = call.dropout(weights)
        batch, keys_len, _ = call.values.shape
        context = torch.bmm(dropped.reshape(batch, -1, keys_len), call.values)
    elif link is not None:
        context = link.connect(weights)
    assert context is not None
    return context if shape is None else shape.restore(context), weights
