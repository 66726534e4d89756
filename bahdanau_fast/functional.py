"""Additive attention as functions, served by the fastest available backend."""

from __future__ import annotations

from torch import Tensor

from bahdanau_fast import checks, reference, run
from bahdanau_fast.call import Call
from bahdanau_fast.memory.shapes import as_rows, lengths
from bahdanau_fast.reference import TANH, ScoreTerms

__all__ = ["additive_attention", "additive_scores", "masked_softmax"]


def masked_softmax(
    scores: Tensor, valid_lens: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Softmax over the keys, masked positions left out: d2l's ``masked_softmax``.

    A row with nothing to look at is uniform over all positions.

    Args:
        scores: (B,Tq,Tk), float32, bfloat16, float16 or float64.
        valid_lens: None, (B,) or (B,Tq), any integer or float dtype.
        mask: bool (B,Tk), or what broadcasts to (B,Tq,Tk), True where a query may look; with
            lengths, both hold.

    Returns:
        Weights (B,Tq,Tk) in the dtype of ``scores``.

    Raises:
        TypeError: ``scores`` is not floating, ``valid_lens`` is not real numbers, or ``mask`` is
            not bool.
        ValueError: ``scores`` has not 3 dimensions, or the shape of lengths or mask does not fit.

    >>> import torch
    >>> weights = masked_softmax(torch.zeros(2, 1, 4), torch.tensor([2, 4]))
    >>> weights[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    """
    checks.rows("scores", scores, "B, Tq, Tk")
    valid_lens = lengths(valid_lens, scores)
    checks.lens(valid_lens, scores.shape[0], scores.shape[1], scores.device)
    if mask is not None:
        mask = checks.as_mask(mask, scores.shape[1], scores.transpose(1, 2))
    return reference.masked_softmax(scores, valid_lens, mask)


def additive_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
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
    causal: bool = False,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``softmax_j(w_v . tanh(W_q q_i + W_k k_j + W_f f_j + bias)) @ values``, fused.

    Bahdanau, Cho and Bengio 2014, https://arxiv.org/abs/1409.0473, equation 6 and section A.1.2;
    features of the keys as in Chorowski et al. 2015, https://arxiv.org/abs/1506.07503, equation 9.

    Args:
        queries: (B,Tq,Dq), float32, bfloat16, float16 or float64; or a decoder state (B,Dq), which
            leaves Tq out of the results. B may be any number of dimensions. Queries of all rows may
            be (Dq,); or (1,Tq,Dq), but for Tq = B or one key.
        keys: (B,Tk,Dk), dtype of queries.
        values: (B,Tk,Dv), dtype of queries; None for the keys.
        w_q: (H,Dq); None for queries (B,Tq,H) that are projected.
        w_k: (H,Dk); None for keys (B,Tk,H) that are projected.
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq), any integer or float dtype, or a list: key j is visible
            when j < len.
        mask: bool (B,Tk), or what broadcasts to (B,Tq,Tk), True where a query may look; with
            lengths, both hold. A query with nothing to look at weighs all keys alike.
        bias: (H,), optional; without ``w_k`` it is added to the keys in every call.
        dropout_p: probability of dropping a weight on the way to the context.
        need_weights: return the weights too.
        features: (B,Tk,C), of the keys, dtype of queries; optional.
        w_f: (H,C); with features.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid".
        negative_slope: of leaky_relu.
        causal: query i sees the keys j <= i alone, as with ``is_causal`` of torch's
            ``scaled_dot_product_attention``; with lengths and a mask, all hold.
        query_mask: bool (B,Tq), False where context and weights are zero, with no gradient.
        scale: a factor of the scores.
        backend: "cuda", "triton", "cpu" or "reference"; None takes the fastest available one.

    Returns:
        Context (B,Tq,Dv) and weights (B,Tq,Tk) before dropout; None unless ``need_weights``.

    Raises:
        TypeError: something is not a floating tensor, or dtypes differ.
        ValueError: ranks, sizes, devices, ``dropout_p``, ``activation`` or ``backend`` do not fit.

    >>> import torch
    >>> q, k = torch.zeros(1, 1, 2), torch.ones(1, 4, 2)
    >>> w = torch.ones(3, 2)
    >>> context, weights = additive_attention(q, k, k, w, w, w[:, 0], torch.tensor([2]))
    >>> weights.tolist()
    [[[0.5, 0.5, 0.0, 0.0]]]
    """
    shape, terms = None, TANH
    values = keys if values is None else values
    usual = (  # of plain tensors: the operator refuses what is wrong with them
        features is w_f is bias is None
        and activation == "tanh"
        and isinstance(w_v, Tensor)
        and type(queries) is type(keys) is type(values) is Tensor
        and len(size := queries.shape) == len(other := keys.shape) == 3
        and size[0] == other[0]
        and (valid_lens is None or type(valid_lens) is Tensor)
    )
    if not usual:
        rows, mask, shape = as_rows(queries, keys, values, valid_lens, mask)
        queries, keys, values, valid_lens = rows
        checks.inputs(queries, keys, values, valid_lens)
        hidden = checks.weights(queries, keys, w_q, w_k, w_v, bias)
        if not (features is w_f is None and activation == "tanh"):
            features = features if shape is None else shape.flatten(features)
            terms = ScoreTerms(features, w_f, activation, negative_slope)
            checks.score_terms(*terms, keys, hidden)
    if mask is not None:
        mask = checks.as_mask(mask, queries.shape[1], keys)
    if dropout_p != 0.0:
        checks.probability("dropout_p", dropout_p)
    explain = _explain if usual else None
    call = Call(  # by position, which is quicker
        queries, keys, values, w_v, w_q, w_k, bias, valid_lens, mask, dropout_p,
        None, None, shape, None, terms, None, need_weights, False, backend, explain,
    )  # fmt: skip
    if causal or query_mask is not None or scale is not None:
        context, weights, _ = run.attend_with(call, causal, query_mask, scale)
    else:
        context, weights = run.attend(call)
    return context, weights if need_weights else None


def _explain(call: Call) -> None:
    checks.inputs(call.queries, call.keys, call.values, call.valid_lens)
    assert isinstance(call.w_v, Tensor)
    checks.weights(call.queries, call.keys, call.w_q, call.w_k, call.w_v, call.bias)


def additive_scores(
    queries: Tensor,
    keys: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
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
        w_q: (H,Dq); None for queries (B,Tq,H) that are projected.
        w_k: (H,Dk); None for keys (B,Tk,H) that are projected.
        w_v: (1,H) or (H,).
        bias: (H,), optional; without ``w_k`` it is added to the keys in every call.
        features: (B,Tk,C), of the keys; optional.
        w_f: (H,C); with features.
        activation: "tanh", "relu", "leaky_relu" or "sigmoid".
        negative_slope: of leaky_relu.
        clip: scores u become ``clip * tanh(u)``.
        backend: "cpu" or "reference"; None takes the fastest available one.

    Returns:
        Scores (B,Tq,Tk).

    Raises:
        TypeError: something is not a floating tensor or a number, or dtypes differ.
        ValueError: ranks, sizes, devices, ``activation``, ``clip`` or ``backend`` do not fit.

    >>> import torch
    >>> q, k, w = torch.zeros(1, 1, 2), torch.ones(1, 4, 2), torch.ones(3, 2)
    >>> additive_scores(q, k, w, w, w[:, 0], activation="relu").tolist()
    [[[6.0, 6.0, 6.0, 6.0]]]
    """
    (queries, keys, _, _), _, shape = as_rows(queries, keys, keys, None, None)
    checks.inputs(queries, keys, keys, None)
    features = features if shape is None else shape.flatten(features)
    hidden = checks.weights(queries, keys, w_q, w_k, w_v, bias)
    terms = ScoreTerms(features, w_f, activation, negative_slope)
    checks.score_terms(*terms, keys, hidden)
    if clip is not None:
        checks.finite("clip", clip)
    tensors = queries, keys, keys, w_v, w_q, w_k, bias
    call = Call(*tensors, terms=terms, scores_only=True, shape=shape, backend=backend)
    return run.scores(call, clip)
