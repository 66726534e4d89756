"""Calls of the operators of attention and of projections out of any bytes, with all they may have:
masks, tables, features and other activations inside, dropout, a step's location.
"""

import torch
import torch.nn.functional as F

from bahdanau_fast import checks, reference
from bahdanau_fast.ops.attention import NEED
from bahdanau_fast.ops.location import convolved
from bahdanau_fast.ops.pool_in_chunks import scores_of_sums
from fuzzing.drawn import (
    DTYPES,
    SCALES,
    SIZES,
    agree,
    case,
    dropout,
    exact,
    gradients_of,
    lengths,
    mistaken,
    spoil,
    tensor,
)

ops = torch.ops.bahdanau_fast
INPUTS = ("queries", "keys", "values", "w_v", "features", "w_f")
TAPS = (1, 3, 5, 7, 9, 31, 33, 65)


def _drawn(read, generator, has_features):
    """Queries, keys, values, w_v, features and w_f; (activation, slope); lengths and a mask."""
    dtype, activation = read.of(DTYPES), read.of((0, 0, 0, 1, 2))
    general = has_features or activation
    B, Tq, Tk, H, Dv, C = (read.of(SIZES[:k]) for k in (7, 14, 22, 17, 17, 17))
    while B * Tq * Tk * H > (20_000 if general else 150_000):
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    # tanh bounds a score; with ReLU a rounding of large ones would decide the softmax.
    scale = read.of(SCALES if activation == 0 else SCALES[:5])
    w_v = (1, H) if general or read.number(2) else (H,)
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), w_v, (B, Tk, C), (H, C)
    of_w_v = max(H, 1) ** -0.5 if general else 1.0
    scales = scale, scale, 1.0, of_w_v, 1.0, scale * max(C, 1) ** -0.5
    shapes, scales = (x if has_features else x[:4] for x in (shapes, scales))
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    look = _looks(read, B, Tq, Tk, generator)
    return dtype, made, (activation, 0.2), look


def _looks(read, B, Tq, Tk, generator):
    """Lengths, a mask of every row or every query, or both; now and then of a wrong shape."""
    kind = read.of((0, 0, 0, 1, 2, 3))
    lens = lengths(read, B, Tq, Tk, generator) if kind in (0, 3) else None
    if kind == 0:
        return lens, None
    shape = (B, 1 if kind == 1 else Tq, Tk + read.mistake(40))
    mask = torch.rand(shape, generator=generator) < read.of((0.0, 0.1, 0.5, 0.9, 1.0))
    if read.number(3) == 0:  # a length
        mask = mask.sort(-1, descending=True).values
    return lens, mask.transpose(1, 2).contiguous().transpose(1, 2) if read.number(2) else mask


def _inside_of(leaves, numbers):
    features, w_f = leaves[4:] or (None, None)
    return reference.ScoreTerms(features, w_f, checks.ACTIVATIONS[numbers[0]], numbers[1])


def _attended(leaves, numbers, look):
    """Context and weights by the reference."""
    lens, mask = look
    return reference.attend(*leaves[:4], lens, 0.0, _inside_of(leaves, numbers), mask)


def _in_fp64(made):
    return [x.detach().double().requires_grad_() for x in made]


def _is_at_a_kink(leaves, activation):
    """Whether a sum is so near to zero that its rounding may decide a slope."""
    if activation == 0:
        return False
    q, k, _, _, *features = (x.detach() for x in leaves)
    keys = k + features[0] @ features[1].t() if features else k
    sums = (q.unsqueeze(2) + keys.unsqueeze(1)).abs()
    return sums.numel() > 0 and bool(sums.min() < 1e-6 * sums.max())


def _agree_gradients(found, true, needs, dtype):
    """Those that were asked for; ``found`` by name, in the order of ``true``."""
    for (name, got), want in zip(found.items(), true, strict=True):
        if needs & NEED[name]:
            agree(f"d {name}", got, want, dtype)


@case
def attend(read, generator):
    """``exp_keys``, ``attention`` and its backward: whole, added to a sum, or in two parts."""
    has_features = read.number(2)
    dtype, made, numbers, look = _drawn(read, generator, has_features)
    odd = spoil(read, made)
    dropout_p, seed = dropout(read)
    need_weights, tabled, needs, adds = (read.number(n) for n in (2, 3, 512, 3))
    keys, features = made[1], made[4:] or (None, None)
    table = ops.exp_keys(keys, bool(read.number(2))) if tabled else (None, None)
    if tabled == 2 and read.mistake(10):
        table = table[0][..., :-1], table[1]
    inside = (*features, *look, *table, seed, dropout_p, *numbers)
    inputs = (*made[:4], None, None, None, *inside)
    given = [*inputs, bool(need_weights), bool(read.number(2))]
    context, weights = ops.attention(*mistaken(read, given, 32))
    looked = weights if need_weights else ops.attention(*inputs)[1]
    grads = gradients_of(read, context, looked, generator)
    if adds == 0:
        onto = torch.randn(keys.shape, generator=generator).to(keys.dtype)
        before = onto.to(torch.float64, copy=True)
        needs = needs if read.mistake(20) else needs & ~NEED["keys"]
        given = [looked, *grads, needs, onto, *made[:4], *inside]
        found = ops.attention_backward.onto(*mistaken(read, given, 16))
    else:
        given = [looked, None, None, *grads, needs, *inputs]
        found = ops.attention_backward(*mistaken(read, given, 16))
    found = dict(zip(INPUTS, (*found[:4], *found[7:]), strict=True))
    if adds == 0:
        found["keys"], needs = onto.double() - before, needs | NEED["keys"]
    elif not has_features and numbers[0] == 0:
        rest = (*look, *table, seed, dropout_p)
        parts = _in_two_parts(read, made, rest, looked, grads, needs)
        if not (read.broken or odd):
            whole = [x.double() for x in found.values()][:4]
            _agree_gradients(dict(zip(INPUTS, parts, strict=False)), whole, needs, dtype)

    def compare():
        leaves = _in_fp64(made)
        want = _attended(leaves, numbers, look)
        agree("context", context, want[0].detach(), dtype)
        agree("weights", looked, want[1].detach(), dtype)
        if not _is_at_a_kink(leaves, numbers[0]):
            of_made = {name: found[name] for name in INPUTS[: len(made)]}
            _agree_gradients(of_made, exact(want, leaves, grads), needs, dtype)

    return None if odd or dropout_p else compare


def _in_two_parts(read, tensors, rest, looked, grads, needs):
    """The four gradients, those of keys, values and w_v from what that of queries leaves."""
    *looks, _, dropout_p = rest
    first = mistaken(read, [looked, *grads, bool(needs & 1), *tensors, *rest], 16)
    of_queries, of_scores, dropped = ops.attend_backward_queries(*first)
    seen = dropped if dropout_p else looked
    second = mistaken(read, [seen, grads[0], of_scores, needs & 14, *tensors, *looks], 16)
    return of_queries, *ops.attend_backward_keys(*second)


@case
def scores(read, generator):
    """``attend_scores`` and its backward."""
    has_features = read.number(2)
    dtype, made, numbers, _ = _drawn(read, generator, has_features)
    odd = spoil(read, made)
    q, k, _, w = made[:4]
    inputs = (q, k, w, *(made[4:] or (None, None)), *numbers)
    found = ops.attend_scores(*mistaken(read, inputs, 24))
    grad, needs = torch.randn(found.shape, generator=generator).to(found.dtype), read.number(512)
    grads = ops.attend_scores_backward(*mistaken(read, (grad, needs, *inputs), 16))
    grads = dict(zip((*INPUTS[:2], *INPUTS[3:]), grads, strict=True))

    def compare():
        leaves = _in_fp64(made)
        q, k, _, w = leaves[:4]
        want = (reference.projected_scores(q, k, w, _inside_of(leaves, numbers)),)
        agree("scores", found, want[0].detach(), dtype)
        if not _is_at_a_kink(leaves, numbers[0]):
            used = [x for at, x in enumerate(leaves) if at != 2]
            of_used = dict(list(grads.items())[: len(used)])
            _agree_gradients(of_used, exact(want, used, (grad,)), needs, dtype)

    return None if odd else compare


@case
def location(read, generator):
    """``attend_location`` and the backward of its convolution."""
    dtype, made, numbers, look = _drawn(read, generator, True)
    q, k, v, w, features, w_f = made
    B, Tk, C = features.shape[:3] if features.dim() == 3 else (1, 2, 3)
    inputs, taps = read.of((0, 1, 2, 3)), read.of(TAPS) + read.mistake(30)
    shapes = (B, inputs, Tk), (C, inputs, taps), (C,), (B, Tk, C)
    x, w_conv, b_conv, grad = (tensor(read, s, dtype, generator, 1.0 / taps**0.5) for s in shapes)
    odd = spoil(read, [q, k, v, w, x, w_conv, b_conv, w_f])
    dropout_p, seed = dropout(read)
    bias = b_conv if read.number(2) else None
    given = (q, k, v, w, x, w_conv, bias, w_f, *look, seed, dropout_p, *numbers)
    needs = read.number(4)
    context, weights, features = ops.attend_location(*mistaken(read, given, 16))
    found = ops.convolution_backward(*mistaken(read, [grad, x, w_conv, needs], 16))

    def compare():
        leaves = [t.double().requires_grad_() for t in (x, w_conv)]
        wide = torch.zeros(B, Tk, C, dtype=torch.float64)
        if x.numel() and w_conv.numel():
            wide = convolved(*leaves, None)
        true = wide if bias is None else wide + bias.double()
        agree("features", features, true.detach(), dtype)
        want = _attended([t.double() for t in (q, k, v, w, features, w_f)], numbers, look)
        agree("context", context, want[0], dtype)
        agree("weights", weights, want[1], dtype)
        if wide.requires_grad:
            of_both = torch.autograd.grad(wide, leaves, grad.double())
            for at, (got, real) in enumerate(zip(found, of_both, strict=True)):
                if needs >> at & 1:
                    agree(("d location", "d w_conv")[at], got, real, dtype)

    return None if odd or dropout_p else compare


# ---- operators that project, with their own matrix products ----


@case
def raw(read, generator):
    """``attention`` from raw queries, raw keys or both, and its backward."""
    dtype, of_queries, of_keys = read.of(DTYPES), *read.of(((1, 0), (1, 1), (1, 1), (0, 1)))
    B, Tq, Tk = (read.of(SIZES[:k]) for k in (5, 8, 14))
    H, Dv, Dq, Dk = (read.of(SIZES[:k]) for k in (17, 14, 17, 14))
    while B * Tq * Tk * H > 40_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    # Where tanh is steep, two roundings of large projections to 16 bits differ too much.
    scale = read.of(SCALES[:6] if dtype.itemsize > 2 else SCALES[:4])
    rows = (B, Tq, Dq if of_queries else H), (B, Tk, Dk if of_keys else H)
    shapes = (*rows, (B, Tk, Dv), (1, H), (H, Dq), (H, Dk), (H,))
    scales = scale, scale, 1.0, 1.0, max(Dq, 1) ** -0.5, max(Dk, 1) ** -0.5, 1.0
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    look, has_bias = _looks(read, B, Tq, Tk, generator), of_keys and read.number(2)
    odd = spoil(read, made)
    for place, has in enumerate((of_queries, of_keys, has_bias), 4):
        made[place] = made[place] if has else None
    tabled = not of_keys and read.number(2)
    table = ops.exp_keys(made[1], bool(read.number(2))) if tabled else (None, None)
    dropout_p, seed = dropout(read)
    inputs = [*made, None, None, *look, *table, seed, dropout_p, 0, 0.2]
    unrecorded = mistaken(read, [*inputs, True, False], 16)
    context, weights = ops.attention(*unrecorded)
    recorded = ops.attention.recorded(*mistaken(read, inputs, 16))
    _, looked, _, *projected = recorded
    if read.number(2):
        projected = None, None
    grads, needs = gradients_of(read, context, looked, generator), read.number(512)
    found = ops.attention_backward(
        *mistaken(read, [looked, *projected, *grads, needs, *inputs], 16)
    )

    def compare():
        leaves = [x if x is None else x.detach().double().requires_grad_() for x in made]
        q, k, v, w_v, w_q, w_k, bias = leaves
        q = q if w_q is None else (q @ w_q.t()).to(dtype).double()
        k = k if w_k is None else F.linear(k, w_k, bias).to(dtype).double()
        want = reference.attend(q, k, v, w_v, look[0], mask=look[1])
        _agree_with_all(want, ((context, weights), recorded), leaves, grads, found, needs, dtype)

    return None if odd or dropout_p else compare


def _agree_with_all(want, results, leaves, grads, found, needs, dtype):
    """Each of the results with context and weights, and the gradients of leaves that are there."""
    for got in results:
        agree("context", got[0], want[0].detach(), dtype)
        agree("weights", got[1], want[1].detach(), dtype)
    true = iter(exact(want, [x for x in leaves if x is not None], grads))
    for place, leaf in enumerate(leaves):
        of_leaf = None if leaf is None else next(true)
        if of_leaf is not None and needs >> place & 1:
            agree(f"gradient {place}", found[place], of_leaf, dtype)


@case
def pool(read, generator):
    """``pool`` of keys before its layers or behind them, with a gate or not, and its backward."""
    dtype, layered, gated, biased = read.of(DTYPES), read.number(2), read.number(2), read.number(8)
    B, heads, Tk, H, Dv, D = (read.of(SIZES[:k]) for k in (5, 6, 22, 17, 14, 14))
    while B * heads * Tk * H > 40_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    D, scale = D if layered else H, read.of(SCALES[:6] if dtype.itemsize > 2 else SCALES[:4])
    of_keys = ((H, D), (H,)) * 2
    shapes = (B, Tk, D), (heads, H), (B, Tk, Dv), (heads,), (B, Tk, H), *of_keys
    scales = scale, 1.0, 1.0, 1.0, scale, *(max(D, 1) ** -0.5, 1.0) * 2
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    look, odd = _looks(read, B, heads, Tk, generator), spoil(read, made)
    layers = layered, layered and biased & 2, layered and gated, layered and gated and biased & 4
    has = 1, 1, 1, biased & 1, gated and not layered, *layers
    made = [x if there else None for x, there in zip(made, has, strict=True)]
    dropout_p, seed = dropout(read)
    inputs = [*made, *look, seed, dropout_p]
    results = ops.pool(*mistaken(read, [*inputs, False], 16))
    recorded = ops.pool.recorded(*mistaken(read, [*inputs, False], 16))
    sums = (None, None) if read.number(2) else recorded[3:]
    grads, needs = gradients_of(read, *recorded[:2], generator), read.number(512)
    found = ops.pool_backward(*mistaken(read, [recorded[1], *sums, *grads, needs, *inputs], 16))

    def compare():
        leaves = [x if x is None else x.detach().double().requires_grad_() for x in made]
        keys, w_v, values, b_v, gate, w, b, w_gate, b_gate = leaves
        inner = keys if w is None else F.linear(keys, w, b).to(dtype).double()
        gate = gate if w_gate is None else F.linear(keys, w_gate, b_gate).to(dtype).double()
        scores = scores_of_sums(inner, gate, w_v, b_v).transpose(1, 2)
        weights = reference.masked_softmax(scores, *look)
        want = weights @ values, weights
        _agree_with_all(want, (results, recorded), leaves, grads, found, needs, dtype)

    return None if odd or dropout_p else compare


@case
def project(read, generator):
    """``project`` and its backward."""
    dtype = read.of(DTYPES)
    leading = [read.of(SIZES[:10]) for _ in range(read.number(3))]
    D, H = read.of(SIZES), read.of(SIZES)
    shapes = (*leading, D), (H, D), (H,), (*leading, H)
    x, weight, bias, grad = (tensor(read, s, dtype, generator, 1.0) for s in shapes)
    odd = spoil(read, [x, weight, bias, grad])
    wanted = read.number(8)
    saved = x if wanted & 2 else None, weight if wanted & 1 else None
    out = ops.project(*mistaken(read, [x, weight, bias], 12))
    found = ops.project_backward(*mistaken(read, [grad, *saved, bool(wanted & 4)], 12))

    def compare():
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        true = F.linear(*leaves)
        agree("product", out, true.detach(), dtype)
        of_all = torch.autograd.grad(true, leaves, grad.double())
        for at, (got, real) in enumerate(zip(found, of_all, strict=True)):
            if wanted >> at & 1:
                agree(f"gradient {at}", got, real, dtype)

    return None if odd else compare
