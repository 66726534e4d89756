"""Additive attention as functions, served by the fastest backend that is there.

``attend_queries``, ``attend_small`` and ``attend_raw`` carry out a route, for these functions and
for the modules: from here a call goes to an operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bahdanau_fast import backends, checks, limits, ops, reference
from bahdanau_fast.backends.route import Route
from bahdanau_fast.general import attend_inside
from bahdanau_fast.memory import ProjectedKeys
from bahdanau_fast.memory.shapes import Shape, as_rows, finish, lengths
from bahdanau_fast.ops import sharding, whole
from bahdanau_fast.ops.by_name import attend_by
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.lifetime import Lifetime
from bahdanau_fast.ops.projection import linear
from bahdanau_fast.ops.shared_gradients import SharedNode
from bahdanau_fast.reference import TANH, Inside

__all__ = [
    "additive_attention",
    "attend_projected",
    "attend_queries",
    "attend_raw",
    "attend_small",
    "masked_softmax",
]


def masked_softmax(
    scores: Tensor, valid_lens: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Softmax over the keys, masked positions left out: d2l's ``masked_softmax``.

    A row with nothing to look at is uniform over all positions.

    Args:
        scores: (B,Tq,Tk), float32, bfloat16, float16 or float64.
        valid_lens: None, (B,) or (B,Tq), any integer or float dtype.
        mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look; with lengths, both hold.

    Returns:
        Weights (B,Tq,Tk) in the dtype of ``scores``.

    Raises:
        TypeError: ``scores`` is not floating, ``valid_lens`` is not real numbers, or ``mask`` is
            not bool.
        ValueError: ``scores`` has not 3 dimensions, or the shape of lengths or mask does not fit.

    >>> weights = masked_softmax(torch.zeros(2, 1, 4), torch.tensor([2, 4]))
    >>> weights[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    """
    checks.scores(scores)
    valid_lens = lengths(valid_lens, scores)
    checks.lens(valid_lens, scores.shape[0], scores.shape[1], scores.device)
    if mask is not None:
        checks.look(mask, scores, scores.transpose(1, 2))
    return reference.masked_softmax(scores, reference.visible(valid_lens, mask, scores.shape[2]))


def additive_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = True,
    features: Tensor | None = None,
    w_f: Tensor | None = None,
    activation: str = "tanh",
    negative_slope: float = 0.01,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``softmax_j(w_v . tanh(W_q q_i + W_k k_j + W_f f_j + bias)) @ values``, fused.

    Bahdanau, Cho and Bengio 2014, https://arxiv.org/abs/1409.0473, equation 6 and section A.1.2;
    features of the keys as in Chorowski et al. 2015, https://arxiv.org/abs/1506.07503, equation 9.

    Args:
        queries: (B,Tq,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq), which
            leaves Tq out of the results. B may be any number of dimensions.
        keys: (B,Tk,Dk), dtype of queries.
        values: (B,Tk,Dv), dtype of queries.
        w_q: (H,Dq).
        w_k: (H,Dk).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq), any integer or float dtype, or a list: key j is kept when
            j < len.
        mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look; with lengths, both hold. A
            query with nothing to look at weighs all keys alike.
        bias: (H,), optional.
        dropout_p: probability of dropping a weight on the way to the context.
        need_weights: return the weights too.
        features: (B,Tk,C), of the keys, dtype of queries; optional.
        w_f: (H,C); with features.
        activation: "tanh", "relu" or "leaky_relu".
        negative_slope: of leaky_relu.
        backend: "cuda", "triton", "cpu" or "reference"; None takes the fastest that is there.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk) before dropout; None for weights not asked for.

    Raises:
        TypeError: something is not a floating tensor, or dtypes differ.
        ValueError: ranks, sizes, devices, ``dropout_p``, ``activation`` or ``backend`` do not fit.

    >>> q, k = torch.zeros(1, 1, 2), torch.ones(1, 4, 2)
    >>> w = torch.ones(3, 2)
    >>> context, weights = additive_attention(q, k, k, w, w, w[:, 0], torch.tensor([2]))
    >>> weights.tolist()
    [[[0.5, 0.5, 0.0, 0.0]]]
    """
    shape = None
    usual = checks.usual(queries, keys, values, valid_lens, w_q, w_k)
    if not usual:
        given = as_rows(queries, keys, values, valid_lens, mask)
        (queries, keys, values, valid_lens), mask, shape = given
        checks.inputs(queries, keys, values, valid_lens)
    if mask is not None:
        checks.look(mask, queries, keys)
        valid_lens = reference.visible(valid_lens, mask, keys.shape[1])
    hidden = checks.weights(queries, keys, w_q, w_k, w_v, bias, usual)
    checks.probability("dropout_p", dropout_p)
    inside = TANH
    if shape is not None:
        features = shape.flatten(features)
    if not (features is w_f is None and activation == "tanh"):
        inside = Inside(features, w_f, activation, negative_slope)
        checks.inside(*inside, keys, hidden)
    weights_given = (w_q, w_k, w_v)
    route = backends.decide(
        *(queries, keys, values, *weights_given, bias, hidden, dropout_p),
        general=inside is not TANH,
        masked=mask is not None,
        name=backend,
    )
    if inside is not TANH:
        plain = route.backend == "reference"
        asked, known = linear(queries, w_q, None, plain), linear(keys, w_k, bias, plain)
        context, weights = attend_inside(
            route, asked, known, w_v, values, valid_lens, dropout_p, inside, shape
        )
    elif route.form == "one operator":
        inputs = (queries, keys, values, *weights_given)
        context, weights = attend_small(route, inputs, bias, valid_lens, dropout_p, shape)
    elif route.form in ("raw", "raw keys"):
        raw = (queries, keys, values, w_q, w_k, bias, w_v)
        context, weights = attend_raw(route, raw, valid_lens, dropout_p, need_weights, shape)
    else:
        # No table: nobody asks these keys again, the kernels make it a few rows at a time.
        known = linear(keys, w_k, bias, route.backend == "reference")
        projected = ProjectedKeys(known, None, None)
        rest = (valid_lens, dropout_p, need_weights, shape)
        context, weights = attend_queries(route, queries, w_q, projected, values, w_v, *rest)
    return context, weights if need_weights else None


def attend_queries(
    route: Route,
    queries: Tensor,
    w_q: Tensor,
    projected: ProjectedKeys,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    dropout_p: float,
    need_weights: bool = True,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with raw queries to projected keys, as the route says; the caller has checked them.

    Args:
        route: of the call.
        queries: (B,Tq,Dq).
        w_q: (H,Dq).
        projected: the keys after ``W_k``, made for the same backend.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq), or a mask from :func:`reference.visible`.
        dropout_p: probability of dropping a weight.
        need_weights: whether the second result is wanted; without, it may be empty.
        shape: of the results, where that is another one.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk).
    """
    if route.form == "step" and route.backend == "cpu":
        if type(queries) is not Tensor:
            sharding.register_for(queries)
        keys, table, keys_max, *_ = projected
        with torch._C._AutoDispatchBelowAutograd():
            if table is None:
                table, keys_max = _table_for(queries.shape[1], keys)
            inputs = (queries, w_q, keys, table, keys_max, values, w_v, valid_lens)
            context, weights = whole.step_now(*inputs)
        return finish(context, _like(context, weights), shape)
    if route.form == "step":
        raw = (queries, projected.keys, values, w_q, None, None, w_v)
        return attend_raw(route, raw, valid_lens, dropout_p, need_weights, shape)
    asked = linear(queries, w_q, None, route.backend == "reference")
    rest = (valid_lens, dropout_p, need_weights, shape)
    return attend_projected(route, asked, projected, values, w_v, *rest)


def attend_projected(
    route: Route,
    queries: Tensor,
    projected: ProjectedKeys,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    dropout_p: float,
    need_weights: bool = True,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """Everything after the projections: :func:`attend_queries`, its queries already ``W_q q``."""
    keys, table, keys_max, shared, lifetime, _ = projected
    if shared is not None:
        if route.share and shared.fits(values, w_v):
            keys, values, w_v = shared.results
        else:
            shared = None
    if queries.dtype != keys.dtype:  # autocast, and a memory made outside of it
        queries = queries.to(keys.dtype)
    if values.dtype != queries.dtype:  # autocast: the projections came out in its dtype
        values = values.to(queries.dtype)
    if w_v.dtype != queries.dtype:
        w_v = w_v.to(queries.dtype)
    if route.backend == "reference":
        results = reference.attend(queries, keys, values, w_v, valid_lens, dropout_p)
        return finish(*results, shape)
    seed = _seed(dropout_p, queries)
    inputs = ops.AttendInputs(
        queries, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p
    )
    context, weights, link = _call(route, inputs, need_weights, shared, lifetime)
    wanted = queries.dtype
    if checks.softmax_in_fp32(queries.device):
        wanted = weights.dtype
    weights = weights if weights.dtype == wanted else weights.to(wanted)
    return finish(context, weights, shape, link)


def _call(
    route: Route,
    inputs: ops.AttendInputs,
    need_weights: bool,
    shared: SharedNode | None,
    lifetime: Lifetime | None,
) -> tuple[Tensor | None, Tensor, Link | None]:
    """Call the operator ``attend`` by the shortest way that is right where the call comes from.

    Args:
        route: of the call.
        inputs: of the operator.
        need_weights: whether the weights are wanted; where a gradient is due they are made.
        shared: the node that keys, values and w_v are behind, which their gradients are left to.
        lifetime: of the nodes that this call shares with others.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk), fp64 for fp64 and else fp32, (0,) if not wanted, and
        None. Of a recorded call the context is in the link, which is the third result.
    """
    queries, keys, table, keys_max, values, w_v, *others = inputs
    if type(queries) is not Tensor:
        sharding.register_for(queries)
    recorded = route.records and checks.needs_gradient(queries, keys, values, w_v)
    if route.traced:  # what traces the call has to meet the operator itself
        wanted = need_weights or recorded
        if route.backend in ops.without_key:
            return (*attend_by(route.backend, *inputs, wanted), None)
        return (*ops.attend_op(*inputs, wanted), None)
    if recorded:
        valid_lens, seed, dropout_p = inputs[6:]
        # Only plain operations may record tensors of inference mode.
        if True in map(Tensor.is_inference, (queries, keys, values, w_v)):
            return (*reference.attend(queries, keys, values, w_v, valid_lens, dropout_p), None)
        rest, link = [table, keys_max, *others], Link(values, seed, dropout_p)
        weights = ops.attend_recorded(
            queries, keys, values, w_v, rest, route.backend, shared, lifetime, link
        )
        return None, weights, link
    with torch._C._AutoDispatchBelowAutograd():
        if table is None and route.backend == "cpu":
            table, keys_max = _table_for(queries.shape[1], keys)
        forward, _ = ops.implementations[route.backend]
        return (*forward(queries, keys, table, keys_max, values, w_v, *others, need_weights), None)


def _table_for(queries_len: int, keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The table of exponentials that a call without gradients does best to start with, or None.

    A call without a table takes the precision of one that may be differentiated, fp64 for small
    problems; a table in fp32 says that fp32 will do. To be called below autograd.

    Args:
        queries_len: Tq.
        keys: (B,Tk,H), projected.
    """
    if (
        keys.dtype is torch.float32
        and keys.numel() > limits.PRECISION.fp64_forward_table_elements
        and queries_len * keys.numel() <= limits.PRECISION.fp64_cpu_elements
    ):
        return ops.exp_keys_now(keys, False)
    return None, None


def attend_small(
    route: Route,
    inputs: tuple[Tensor, ...],
    bias: Tensor | None,
    valid_lens: Tensor | None,
    dropout_p: float,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """All of it in one operator.

    Args:
        route: of the call.
        inputs: queries, keys, values, w_q, w_k, w_v; checked by the caller.
        bias: (H,) or None.
        valid_lens: None, (B,) or (B,Tq).
        dropout_p: probability of dropping a weight.
        shape: of the results, where that is another one.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk).
    """
    seed = _seed(dropout_p, inputs[0])
    context, weights, link = whole.attend(inputs, bias, valid_lens, seed, dropout_p, route.records)
    return finish(context, _like(inputs[0], weights), shape, link)


def attend_raw(
    route: Route,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor],
    valid_lens: Tensor | None,
    dropout_p: float,
    need_weights: bool,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """A step on a GPU with projections in its kernel; without gradients.

    Args:
        route: of the call, in the form "step", "raw" or "raw keys".
        inputs: queries, keys, values, w_q, w_k or None for projected keys, bias or None, w_v.
        valid_lens: None, (B,) or (B,Tq).
        dropout_p: probability of dropping a weight.
        need_weights: whether the weights are wanted.
        shape: of the results, where that is another one.

    Returns:
        Context (B,Tq,Dv), weights (B,Tq,Tk).
    """
    if route.backend == "cuda":
        from bahdanau_fast.backends.cuda import attend_step

        context, weights = attend_step(*inputs, valid_lens, need_weights)  # type: ignore[arg-type]
    else:
        from bahdanau_fast.backends.triton.forward import step_from_raw

        if route.form == "raw keys":
            queries, keys, values, w_q, *others = inputs
            assert w_q is not None
            inputs = (linear(queries, w_q), keys, values, None, *others)  # type: ignore[assignment]
        seed = _seed(dropout_p, inputs[0])
        context, weights = step_from_raw(*inputs, valid_lens, seed, dropout_p, need_weights)
    return finish(context, _like(context, weights), shape)


def _like(other: Tensor, weights: Tensor) -> Tensor:
    """The weights in the dtype of another; to ask first is quicker than a needless ``to``."""
    return weights if weights.dtype is other.dtype else weights.to(other.dtype)


def _seed(dropout_p: float, queries: Tensor) -> Tensor | None:
    """A seed for the dropout mask; None without dropout."""
    return sharding.dropout_seed(dropout_p, queries) if dropout_p > 0.0 else None
