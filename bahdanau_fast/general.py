"""Scores before the softmax, and attention with features or another activation inside a score.

:func:`attend_inside` and :func:`scores_inside` carry out a route, as those of ``functional`` do.
"""

from __future__ import annotations

from torch import Tensor

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.backends.route import Route
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.memory.shapes import Shape, as_rows, finish
from bahdanau_fast.ops.inside import general
from bahdanau_fast.ops.inside.location import attend_location as location_op
from bahdanau_fast.ops.inside.location import convolved
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.ops.sharding import dropout_seed, is_sharded
from bahdanau_fast.reference import Inside

__all__ = ["additive_scores", "attend_inside", "attend_location", "scores_inside"]


def additive_scores(
    queries: Tensor,
    keys: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    bias: Tensor | None = None,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: str = "tanh",
    negative_slope: float = 0.01,
    clip: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """``w_v . act(W_q q_i + W_k k_j + W_f f_j + bias)``: the scores before mask and softmax.

    Bahdanau, Cho and Bengio 2014, https://arxiv.org/abs/1409.0473, section A.1.2; features of the
    keys as in Chorowski et al. 2015, https://arxiv.org/abs/1506.07503, equation 9; ``clip`` as in
    Bello et al. 2016, https://arxiv.org/abs/1611.09940, section A.1.

    Args:
        queries: (B,Tq,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq), which
            leaves Tq out of the result. B may be any number of dimensions.
        keys: (B,Tk,Dk), dtype of queries.
        w_q: (H,Dq).
        w_k: (H,Dk).
        w_v: (1,H) or (H,).
        bias: (H,), optional.
        features: (B,Tk,C), of the keys; optional.
        w_f: (H,C); with features.
        activation: "tanh", "relu" or "leaky_relu".
        negative_slope: of leaky_relu.
        clip: scores u become ``clip * tanh(u)``.
        backend: "cpu" or "reference"; None takes the fastest that is there.

    Returns:
        Scores (B,Tq,Tk).

    Raises:
        TypeError: something is not a floating tensor or a number, or dtypes differ.
        ValueError: ranks, sizes, devices, ``activation``, ``clip`` or ``backend`` do not fit.

    >>> import torch
    >>> scores = additive_scores(
    ...     torch.zeros(1, 1, 2), torch.ones(1, 4, 2), *torch.ones(2, 3, 2), torch.ones(3),
    ...     activation="relu",
    ... )
    >>> scores.tolist()
    [[[6.0, 6.0, 6.0, 6.0]]]
    """
    (queries, keys, _, _), _, shape = as_rows(queries, keys, keys, None, None)
    checks.inputs(queries, keys, keys, None)
    if shape is not None:
        features = shape.flatten(features)
    hidden = checks.weights(queries, keys, w_q, w_k, w_v, bias)
    inside = Inside(features, w_f, activation, negative_slope)
    checks.inside(*inside, keys, hidden)
    if clip is not None:
        checks.finite("clip", clip)
    route = backends.decide(
        queries, keys, keys, w_q, w_k, w_v, bias, hidden, 0.0, general=True, name=backend
    )
    plain = route.backend == "reference"
    asked, projected = linear(queries, w_q, None, plain), linear(keys, w_k, bias, plain)
    scores = scores_inside(route, asked, projected, w_v, inside, clip)
    return scores if shape is None else shape.restore(scores)


def scores_inside(
    route: Route,
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor,
    inside: Inside,
    clip: float | None = None,
) -> Tensor:
    """The scores of projected queries and keys, as the route says.

    Args:
        route: of the call.
        queries: (B,Tq,H), projected.
        keys: (B,Tk,H), projected.
        w_v: (1,H) or (H,).
        inside: features and activation.
        clip: scores u become ``clip * tanh(u)``.

    Returns:
        (B,Tq,Tk), in the dtype of the queries.
    """
    keys, w_v, inside = _like(queries, keys, w_v, inside)
    if _is_plain(route, queries):
        scores = reference.projected_scores(queries, keys, w_v, inside)
    else:
        scores = general.scores_inside(queries, keys, w_v, inside)
    return reference.clipped(scores, clip).to(queries.dtype)


def attend_inside(
    route: Route,
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor,
    values: Tensor,
    valid_lens: Tensor | None,
    dropout_p: float,
    inside: Inside,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with projected queries to projected keys, as the route says.

    Args:
        route: of the call.
        queries: (B,Tq,H), projected.
        keys: (B,Tk,H), projected.
        w_v: (1,H) or (H,).
        values: (B,Tk,Dv).
        valid_lens: None, (B,) or (B,Tq).
        dropout_p: probability of dropping a weight.
        inside: features and activation.
        shape: of the results, where that is another one.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk).
    """
    keys, w_v, inside = _like(queries, keys, w_v, inside)
    values = values.to(queries.dtype)
    if _is_plain(route, queries):
        results = reference.attend(queries, keys, values, w_v, valid_lens, dropout_p, inside)
        return finish(*results, shape)
    seed = dropout_seed(dropout_p, queries)
    context, weights, link = general.attend_inside(
        queries, keys, values, w_v, valid_lens, inside, seed, dropout_p, route.traced
    )
    return finish(context, weights.to(queries.dtype), shape, link)


def attend_location(
    route: Route,
    queries: Tensor,
    projected: ProjectedKeys,
    w_v: Tensor,
    values: Tensor,
    valid_lens: Tensor | None,
    dropout_p: float,
    location: Tensor,
    w_conv: Tensor,
    b_conv: Tensor | None,
    inside: Inside,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend_inside` with features that are a convolution of the location.

    Args:
        route: of the call.
        queries: (B,Tq,H), projected.
        projected: the keys after ``W_k``, and what the calls on them share.
        w_v: (1,H) or (H,).
        values: (B,Tk,Dv).
        valid_lens: None, (B,) or (B,Tq).
        dropout_p: probability of dropping a weight.
        location: (B,inputs,Tk), the weights of earlier steps.
        w_conv: (C,inputs,taps), an odd number of taps.
        b_conv: (C,) or None.
        inside: ``w_f`` (H,C) and the activation; its features are None.
        shape: of the results, where that is another one.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk).
    """
    keys, _, _, shared, lifetime, _ = projected
    alike = keys.dtype == values.dtype == queries.dtype
    if shared is not None and alike and route.share and shared.fits(values, w_v):
        keys, values, w_v = shared.results
    else:
        shared = None
    if _is_plain(route, queries):
        inside = inside._replace(features=convolved(location, w_conv, b_conv))
        rest = (w_v, values, valid_lens, dropout_p, inside, shape)
        return attend_inside(route, queries, keys, *rest)
    dtype = queries.dtype
    keys, w_v, inside = _like(queries, keys, w_v, inside)
    context, weights, link = location_op(
        *(queries, keys, values.to(dtype), w_v, valid_lens),
        *(location.to(dtype), w_conv.to(dtype), None if b_conv is None else b_conv.to(dtype)),
        *(inside, dropout_seed(dropout_p, queries), dropout_p),
        traced=route.traced,
        shared=shared,
        lifetime=lifetime,
    )
    return finish(context, weights if weights.dtype == dtype else weights.to(dtype), shape, link)


def _is_plain(route: Route, queries: Tensor) -> bool:
    """Whether plain PyTorch computes it: the operators have no rules for DTensors."""
    return route.backend == "reference" or is_sharded(queries)


def _like(
    queries: Tensor, keys: Tensor, w_v: Tensor, inside: Inside
) -> tuple[Tensor, Tensor, Inside]:
    """Everything in the dtype of the projected queries, which under autocast is its own."""
    dtype, features, w_f = queries.dtype, inside.features, inside.w_f
    inside = inside._replace(
        features=None if features is None else features.to(dtype),
        w_f=None if w_f is None else w_f.to(dtype),
    )
    return keys.to(dtype), w_v.to(dtype), inside
