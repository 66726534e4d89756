"""From a call to its operator: the one place where a route is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.backends import Route
from bahdanau_fast.call import Call, Located
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.ops.attend import attend as attend_operator
from bahdanau_fast.ops.attend import attend_counted, attend_scores
from bahdanau_fast.ops.location import attend_location, convolved
from bahdanau_fast.ops.operator import Results, Way, number_of
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.ops.sharding import register_for
from bahdanau_fast.ops.whole import additive_attention, attend_step

__all__ = ["attend", "project", "scores"]


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Context and weights.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk), in the shape that the call asks for; the second may be
        empty where weights are not wanted.

    Raises:
        ValueError: a backend was asked for that cannot serve the call.
    """
    route = backends.decide(call)
    call = _in_front(route, call)
    return _finish(call, _BY[route.operator](route, call))


def scores(call: Call, clip: float | None = None) -> Tensor:
    """The scores (B,Tq,Tk) before mask and softmax, in the shape that the call asks for.

    Args:
        call: with ``scores_only``.
        clip: scores u become ``clip * tanh(u)``.

    Raises:
        ValueError: as for :func:`attend`.
    """
    route = backends.decide(call)
    call = _in_front(route, call)
    queries, keys, w_v = call.queries, call.keys, call.w_v
    if route.operator:
        number = number_of(route.backend, route.traced)
        found = attend_scores.overload(queries, keys, w_v, *_inside(call), number)
    else:
        found = reference.projected_scores(queries, keys, w_v, call.inside)
    found = reference.clipped(found, clip).to(queries.dtype)
    return found if call.shape is None else call.shape.restore(found)


def project(call: Call) -> Call:
    """The same call with projected queries and keys.

    Raises:
        ValueError: as for :func:`attend`.
    """
    return _in_front(backends.decide(call), call)


def _in_front(route: Route, call: Call) -> Call:
    """What is computed in front of the operator: the projections that the route does not leave it.

    With both of them, all of it comes out in one dtype.
    """
    queries, form = call.queries, route.form
    if type(queries) is not Tensor:
        register_for(queries)
    if form == "one operator" or (form == "step" and call.projected is not None):
        return call
    plain = route.backend == "reference"
    if call.w_q is not None and form != "step":
        queries = linear(queries, call.w_q, None, plain)
    projected = _keys(route, call)
    if form == "step":
        return call._replace(keys=projected.keys, w_k=None, bias=None, projected=projected)
    keys, values, w_v, shared = projected.keys, call.values, call.w_v, projected.shared
    if shared is not None:
        if route.share and isinstance(w_v, Tensor) and shared.fits(values, w_v):
            keys, values, w_v = shared.results
        else:
            projected = projected._replace(shared=None)
    # Autocast gives projections its dtype, and a memory may be made outside of it.
    dtype, inside, located = keys.dtype, call.inside, call.located
    if inside.w_f is not None:  # a location has one, too
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


def _keys(route: Route, call: Call) -> ProjectedKeys:
    """Projected keys: of a memory, of the last call if nothing has changed, or new."""
    if call.projected is not None:
        return call.projected
    keys, w_k, bias = call.keys, call.w_k, call.bias
    if w_k is None and bias is not None:
        keys, bias = keys + bias, None
    source = None
    if call.cache is not None and route.backend == "cpu":
        # General scores read no table; their gradients meet in one node all the same.
        reads_table = not route.general
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


def _to(x: Any, dtype: torch.dtype) -> Any:
    """A tensor in a dtype; to ask first is quicker than a needless ``to``."""
    return x if not isinstance(x, Tensor) or x.dtype is dtype else x.to(dtype)


def _by_reference(_: Route, call: Call) -> Results:
    inside = call.inside
    if call.located is not None:
        inside = inside._replace(features=convolved(*call.located))
    queries, keys = call.queries, call.keys
    if call.w_q is not None:
        queries = linear(queries, call.w_q)
    if call.w_k is not None:
        keys = linear(keys, call.w_k, call.bias)
    rest = (call.valid_lens, call.dropout_p, inside, call.mask)
    return (*reference.attend(queries, keys, call.values, call.w_v, *rest), None)


def _by_attend_step(route: Route, call: Call) -> Results:
    queries, keys, values, w_v, w_q, w_k, bias, lens, mask = call[:9]
    table = keys_max = None
    if call.projected is not None:
        _, table, keys_max, *_ = call.projected
    kernel, wanted = attend_step.kernel(route.backend), call.need_weights
    narrow = route.backend == "cpu" or not checks.softmax_in_fp32(queries.device)
    # Not starred, as for Call in modules/additive.py.
    context, weights = kernel(
        queries, keys, values, w_q, w_k, bias, w_v, lens, mask, table, keys_max, wanted, narrow
    )
    return context, weights, None


def _by_additive_attention(route: Route, call: Call) -> Results:
    queries, keys, values, w_v, w_q, w_k, bias = call[:7]
    way = Way(route.backend, route.traced, route.records)
    inputs: Any = (queries, keys, values, w_q, w_k, w_v, bias)
    return additive_attention.call(inputs, (call.valid_lens, call.mask), (call.dropout_p,), way)


def _by_attend(route: Route, call: Call) -> Results:
    """Also with a location."""
    table = keys_max = shared = backwards = None
    if call.projected is not None:
        _, table, keys_max, shared, backwards, _ = call.projected
    inputs: tuple[Any, ...] = call[:4]
    queries = call.queries
    lens, mask, located = call.valid_lens, call.mask, call.located
    features, w_f, *inside = _inside(call)
    on_gpu = route.backend != "cpu"
    if located is not None and on_gpu:  # no kernel convolves there
        features, located = convolved(*located), None
    numbers = [call.dropout_p, *inside]
    inputs += (features, w_f) if located is None else (*located, w_f)
    recorded = route.records and checks.needs_gradient(*inputs)
    counted = attend_counted if on_gpu else None
    way = Way(route.backend, route.traced, recorded, shared, backwards, counted)
    if located is not None:
        return attend_location.call(inputs, (lens, mask), tuple(numbers), way)
    numbers += (call.need_weights or recorded, recorded or route.traced)
    numbers.append(number_of(route.backend, route.traced))
    # On the CPU backward is given weights of fp32, which are more exact.
    numbers.append(on_gpu and not checks.softmax_in_fp32(queries.device))
    return attend_operator.call(inputs, (lens, mask, table, keys_max), tuple(numbers), way)


_BY: dict[str, Callable[[Route, Call], Results]] = {
    "": _by_reference,
    "attend_step": _by_attend_step,
    "additive_attention": _by_additive_attention,
    "attend": _by_attend,
}


def _inside(call: Call) -> tuple[Tensor | None, Tensor | None, int, float]:
    """What is inside the activation, as operators take it."""
    features, w_f, activation, negative_slope = call.inside
    return features, w_f, checks.ACTIVATIONS.index(activation), float(negative_slope)


def _finish(call: Call, results: Results) -> tuple[Tensor, Tensor]:
    """Context and weights as the caller sees them, the gradient of the one through the other."""
    context, weights, link = results
    shape = call.shape
    made = context if link is None else link.context
    assert made is not None
    if weights.dtype is not made.dtype and not checks.softmax_in_fp32(weights.device):
        weights = weights.to(made.dtype)
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
