"""From a call to its operator: the one place where a route is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.backends import PoolingRoute, Route
from bahdanau_fast.call import Call, Located
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.memory.shapes import Shape
from bahdanau_fast.ops.attention import attend_scores, attention
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.dropout import dropout_seed
from bahdanau_fast.ops.location import attend_location, convolved
from bahdanau_fast.ops.operator import NUMBERS, AttentionOperator, Recorded, number_of
from bahdanau_fast.ops.pool import pool as pooling
from bahdanau_fast.ops.projection import linear, waiting
from bahdanau_fast.ops.saved_tensors import with_rows_together
from bahdanau_fast.ops.sharding import register_for
from bahdanau_fast.reference import TANH

#: Context (B,Tq,Dv), or None where it is in the link; weights (B,Tq,Tk), empty if unwanted; and the
#: link of a recorded call.
Results = tuple[Tensor | None, Tensor, Link | None]


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Context (B,Tq,Dv), weights (B,Tq,Tk), in the call's shape; weights empty if unwanted."""
    given = call
    try:
        route = backends.decide(call)
        if type(call.queries) is not Tensor:
            register_for(call.queries)
        # A fake computes something of most mistakes, and so do plain operations.
        if route.traced or not route.fused:
            _explain(call)
        if route.form != "one operator":
            call = _in_front(route, call)
        context: Tensor | None
        link: Link | None = None
        if not route.fused:
            inputs = call.queries, call.keys, call.values, call.w_v
            rest = call.valid_lens, call.dropout_p, call.terms, call.mask
            context, weights = reference.attend(*inputs, *rest)
        elif call.located is not None:
            context, weights, link = _by_location(route, call)
        else:
            context, weights, link = _by_attention(route, call)
        shape = call.shape
        made = context if link is None else link.context
        assert made is not None
        if weights.dtype is not made.dtype and not route.fp32_weights:
            weights = weights.to(made.dtype)
        if shape is not None and weights.dim() == 3:
            weights = shape.restore_weights(weights)
        if call.dropout is not None:
            dropped = call.dropout(weights)
            size = *call.queries.shape[:2], call.values.shape[1]
            context = torch.bmm(dropped.reshape(size), call.values)
        elif link is not None:
            context = link.connect(weights, None if shape is None else shape.turned)
        assert context is not None
        return context if shape is None else shape.restore(context), weights
    except Exception:
        _explain(given)
        raise


def attend_with(
    call: Call,
    causal: bool = False,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    return_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`attend`, and the scores if wanted, with options made of masks and products.

    ``causal``: query i sees keys up to i; ``query_mask``: False where context and weights are zero;
    ``scale``: a factor of the scores.
    """
    if causal:
        seen = reference.causal_mask(call.queries, call.keys)
        call = call._replace(mask=seen if call.mask is None else call.mask & seen)
    if scale is not None:
        call = call._replace(w_v=_scaled(call.w_v, scale))
    found = None
    if return_scores:
        context, weights, found = attend_by_scores(call)
    else:
        context, weights = attend(call)
    if query_mask is not None:
        none = ~_checked(query_mask, context).unsqueeze(-1)
        context = context.masked_fill(none, 0.0)
        if call.need_weights:
            weights = weights.masked_fill(none, 0.0)
    return context, weights, found


def _checked(query_mask: Tensor, context: Tensor) -> Tensor:
    """Bool, of the shape of the context without its features."""
    if not isinstance(query_mask, Tensor):
        checks.reject(TypeError, "query_mask", "be a tensor", type(query_mask).__name__)
    if query_mask.dtype != torch.bool:
        need = "be bool, False for a query that is none"
        checks.reject(TypeError, "query_mask", need, query_mask.dtype)
    shape, needed = tuple(query_mask.shape), tuple(context.shape[:-1])
    if shape != needed:
        checks.reject(ValueError, "query_mask", f"have shape {needed}", shape)
    if query_mask.device != context.device:
        need = f"be on the device of the data, {context.device}"
        checks.reject(ValueError, "query_mask", need, query_mask.device)
    return query_mask


def _scaled(
    w_v: Tensor | Callable[[Tensor], Tensor], scale: float
) -> Tensor | Callable[[Tensor], Tensor]:
    checks.finite("scale", scale)
    if isinstance(w_v, Tensor):
        return w_v * scale
    return lambda hidden: w_v(hidden) * scale


def attend_by_scores(
    call: Call, weigh: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Context and weights, made of the scores by plain operations, and those.

    ``weigh``: weights (B,Tq,Tk) of scores; None for the masked softmax.
    """
    shape = call.shape
    found = scores(call._replace(scores_only=True, shape=None))
    if weigh is None:
        weights = reference.masked_softmax(found, call.valid_lens, call.mask)
    else:
        weights = weigh(found)
    dropped = F.dropout(weights, call.dropout_p) if call.dropout is None else call.dropout(weights)
    context = torch.bmm(dropped.to(call.values.dtype), call.values)
    if shape is None:
        return context, weights, found
    return shape.restore(context), shape.restore_weights(weights), shape.restore(found)


def _explain(call: Call) -> None:
    """An error in words about inputs that no one has checked, if they are wrong."""
    if call.explain is not None:
        call.explain(call)


def scores(call: Call, clip: float | None = None, masked: bool = False) -> Tensor:
    """Scores u (B,Tq,Tk) before mask and softmax, or ``clip * tanh(u)``, in the call's shape.

    With ``masked`` they are -inf where lengths and mask leave nothing to look at.
    """
    _explain(call)
    route = backends.decide(call)
    call = _in_front(route, call)
    if call.located is not None:  # by its own operator where the context is the result
        terms = call.terms._replace(features=convolved(*call.located))
        call = call._replace(terms=terms, located=None)
    queries, keys, w_v = call.queries, call.keys, call.w_v
    token = None if call.projected is None else call.projected.token
    if token is not None and keys.requires_grad and not (route.traced or checks.in_transform()):
        keys = waiting(keys, token)
    if route.fused:
        number = number_of(route.backend, route.traced)
        found = attend_scores.overload(queries, keys, w_v, *_as_numbers(call), number)
    else:
        found = reference.projected_scores(queries, keys, w_v, call.terms)
    found = reference.clipped(found, clip).to(queries.dtype)
    if masked:
        seen = reference.visible(call.valid_lens, call.mask, keys.shape[1])
        found = found if seen is None else found.masked_fill(~seen, float("-inf"))
    return found if call.shape is None else call.shape.restore(found)


def _in_front(route: Route, call: Call) -> Call:
    """What the route does not leave to the operator; all of one dtype if both are projected."""
    queries, form = call.queries, route.form
    if form == "one operator" or (form == "step" and call.projected is not None):
        return call
    if call.w_q is not None and form != "step":
        queries = linear(queries, call.w_q, None, route.backend == "reference")
    projected = _keys(route, call)
    if form == "step":
        return call._replace(keys=projected.keys, w_k=None, bias=None, projected=projected)
    keys, values, w_v, shared = projected.keys, call.values, call.w_v, projected.shared
    if shared is not None:
        if route.share and isinstance(w_v, Tensor) and shared.fits(values, w_v):
            keys, values, w_v = shared.results
        else:
            projected = projected._replace(shared=None)
    if call.projected is None and values.dtype is not call.keys.dtype:
        _explain(call)  # under autocast alone it may be
    # Autocast gives projections its dtype, and a memory may be made outside of it.
    dtype, terms, located = keys.dtype, call.terms, call.located
    if terms.w_f is not None:  # a location has one, too
        features, w_f = (_to(x, dtype) for x in terms[:2])
        terms = terms._replace(features=features, w_f=w_f)
    if located is not None:
        located = Located(*(_to(x, dtype) for x in located))
        if not route.convolves:
            terms, located = terms._replace(features=convolved(*located)), None
    return call._replace(
        queries=_to(queries, dtype),
        keys=keys,
        values=_to(values, dtype),
        w_v=_to(w_v, dtype),
        w_q=None,
        w_k=None,
        bias=None,
        terms=terms,
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
    if call.cache is not None and (route.reuse or (w_k is None and (route.table or route.meet))):
        return call.cache.lookup_or_project(
            *(keys, w_k, bias, call.values),
            call.w_v if isinstance(call.w_v, Tensor) else None,
            backend=route.backend,
            table=route.table,
            records=route.records,
            reads_table=not route.general,
        )
    if w_k is not None:
        keys = linear(keys, w_k, bias, route.backend == "reference")
    return ProjectedKeys(keys)


def _to(x: Any, dtype: torch.dtype) -> Any:
    """A tensor in a dtype; to ask first is quicker than a needless ``to``."""
    return x if not isinstance(x, Tensor) or x.dtype is dtype else x.to(dtype)


def _by_attention(route: Route, call: Call) -> Results:
    queries, keys, values, w_v, w_q, w_k, bias, lens, mask, dropout_p, *_ = call
    table = keys_max = features = w_f = None
    if call.projected is not None:
        _, table, keys_max, *_ = call.projected
    activation, slope, records, number = 0, 0.01, route.records, NUMBERS.get(route.backend, 0)
    if call.terms is not TANH:
        features, w_f, activation, slope = _as_numbers(call)
    if route.traced:
        number = number_of(route.backend, True)
    elif records and route.backend == "cpu":  # as the products of plain code save them
        if w_q is not None and not queries.is_contiguous():
            queries = with_rows_together(queries)
        if w_k is not None and not keys.is_contiguous():
            keys = with_rows_together(keys)
    inputs: Any = (queries, keys, values, w_v, w_q, w_k, bias, features, w_f)
    others = (lens, mask, table, keys_max)
    seen, precise = call.need_weights or records, records or route.traced
    numbers = (activation, slope, seen, precise, number, route.narrow)
    return _called(attention, inputs, others, dropout_p, numbers, route, call.projected)


def _by_location(route: Route, call: Call) -> Results:
    _, w_f, *numbers = _as_numbers(call)
    assert call.located is not None
    inputs: Any = (call.queries, call.keys, call.values, call.w_v, *call.located, w_f)
    others = call.valid_lens, call.mask
    return _called(
        attend_location, inputs, others, call.dropout_p, tuple(numbers), route, call.projected
    )


def pool(
    route: PoolingRoute,
    inputs: tuple[Tensor | None, ...],
    valid_lens: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    shape: Shape | None,
) -> tuple[Tensor, Tensor]:
    """By :data:`ops.pool.pool`: values (B,heads,Dv), and weights in the call's shape."""
    rest = dropout_p, (True,), route, None
    pooled, weights, link = _called(pooling, inputs, (valid_lens, mask), *rest)
    weights = weights if shape is None else shape.restore(weights)
    pooled = pooled if link is None else link.connect(weights)
    assert pooled is not None
    return pooled, weights


def _called(
    operator: AttentionOperator,
    inputs: tuple[Any, ...],
    others: tuple[Tensor | None, ...],
    dropout_p: float,
    numbers: tuple[Any, ...],
    route: Route | PoolingRoute,
    projected: ProjectedKeys | None,
) -> Results:
    """By the dispatcher in traced code, with a node in recorded code; else the kernel itself."""
    queries, _, values, *_ = inputs
    seed = dropout_seed(queries) if dropout_p > 0.0 else None
    if route.traced:  # what traces the call has to meet the operator itself
        context, weights, *_ = operator.overload(*inputs, *others, seed, dropout_p, *numbers)
        return context, weights, None
    backend = route.backend if type(queries) is Tensor else None
    if route.records:  # in a fraction of the time of the registered formula
        link = Link(values, seed, dropout_p)
        shared = backwards = None
        if projected is not None:
            shared, backwards = projected.shared, projected.backwards
        numbers = dropout_p, *numbers
        call = (operator, backend, (*others, seed), numbers, link, shared, backwards)
        return None, Recorded.apply(call, *inputs), link  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        kernel = operator.in_python.get(backend, operator.now)
        context, weights, *_ = kernel(*inputs, *others, seed, dropout_p, *numbers)
    return context, weights, None


def _as_numbers(call: Call) -> tuple[Tensor | None, Tensor | None, int, float]:
    """The terms of a score, as operators take them."""
    features, w_f, activation, negative_slope = call.terms
    return features, w_f, checks.ACTIVATIONS.index(activation), float(negative_slope)
