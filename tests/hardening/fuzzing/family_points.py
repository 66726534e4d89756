"""Calls of C++ entry points with masks, features and other activations inside, as entry_points.py
makes those of the course's formula; and of the products of few rows.
"""

import torch
import torch.nn.functional as F

from bahdanau_fast import checks, reference
from bahdanau_fast.ops.location import convolved
from fuzzing.drawn import (
    DTYPES,
    SCALES,
    SIZES,
    Bytes,
    agree,
    dropout,
    exact,
    gradients_of,
    in_words,
    lengths,
    mistaken,
    spoil,
    tensor,
)

ops = torch.ops.bahdanau_fast
OF_ATTEND = ("d queries", "d keys", "d values", "d w_v", "d features", "d w_f")
OF_SCORES = ("d queries", "d keys", "d w_v", "d features", "d w_f")
KEYS = 2  # their bit in `needs`
TAPS = (1, 3, 5, 7, 9, 31, 33, 65)


def inside(data):
    """``attend`` and its backward, which may add to a sum; ``attend_scores`` likewise."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype, activation = read.of(DTYPES), read.number(3)
    made, look = _drawn(read, dtype, activation, generator)
    has_features = read.number(3) > 0
    odd = spoil(read, made if has_features else made[:4])
    if not has_features:
        made[4:] = None, None
    numbers = (activation, 0.2)
    run = _scores if read.number(3) == 0 else _attend
    try:
        results, grads, found, names = run(read, made, look, numbers, generator)
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd or results is None:
        return "ran"
    leaves = [x.detach().double().requires_grad_() for x in made if x is not None]
    want = _wanted(run, leaves, look, numbers)
    for name, got, true in zip(("result", "weights"), results, want, strict=False):
        agree(name, got, true.detach(), dtype)
    if _is_at_a_kink(leaves, activation):
        return "checked"
    used = [x for at, x in enumerate(leaves) if run is _attend or at != 2]
    for name, got, true in zip(names, found, exact(want, used, grads), strict=False):
        if got is not None:
            agree(name, got, true, dtype)
    return "checked"


def _drawn(read, dtype, activation, generator):
    """Queries, keys, values, w_v, features and w_f; lengths and a mask."""
    B, Tq, Tk, H, Dv, C = (read.of(SIZES[:k]) for k in (5, 12, 17, 17, 14, 17))
    while B * Tq * Tk * H > 20_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    # tanh bounds a score; with ReLU a rounding of large ones would decide the softmax.
    scale = read.of(SCALES if activation == 0 else SCALES[:5])
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), (1, H), (B, Tk, C), (H, C)
    scales = scale, scale, 1.0, max(H, 1) ** -0.5, 1.0, scale * max(C, 1) ** -0.5
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    return made, _looks(read, B, Tq, Tk, generator)


def _looks(read, B, Tq, Tk, generator):
    """Lengths, a mask of every row or every query, or both; now and then of a wrong shape."""
    kind = read.number(4)
    lens = lengths(read, B, Tq, Tk, generator) if kind in (0, 3) else None
    if kind == 0:
        return lens, None
    shape = (B, 1 if kind == 1 else Tq, Tk + read.mistake(40))
    mask = torch.rand(shape, generator=generator) < read.of((0.0, 0.1, 0.5, 0.9, 1.0))
    if read.number(3) == 0:  # a length
        mask = mask.sort(-1, descending=True).values
    return lens, mask.transpose(1, 2).contiguous().transpose(1, 2) if read.number(2) else mask


def _attend(read, made, look, numbers, generator):
    keys = made[1]
    dropout_p, seed = dropout(read)
    inputs = (*made, *look, None, None, seed, dropout_p, *numbers)
    results = ops.attend(*mistaken(read, inputs, 24))
    grads = gradients_of(read, *results, generator)
    needs, adds = read.number(64), read.number(2)
    if adds and not read.mistake(20):
        needs &= ~KEYS
    onto = torch.randn(keys.shape, generator=generator).to(keys.dtype) if adds else None
    before = onto.clone() if adds else None
    given = (results[1], *grads, needs, *([onto] if adds else []), *inputs)
    backward = ops.attend_backward.onto if adds else ops.attend_backward
    found = _wished(backward(*mistaken(read, given, 16)), needs, (1, 2, 4, 8, 16, 32))
    if adds:
        found[1] = onto.double() - before.double()
    return None if dropout_p else results, grads, found, OF_ATTEND


def _scores(read, made, look, numbers, generator):
    q, k, _, w, *features = made
    inputs = (q, k, w, *features, *numbers)
    scores = ops.attend_scores(*mistaken(read, inputs, 24))
    grad, needs = torch.randn(scores.shape, generator=generator).to(scores.dtype), read.number(64)
    found = ops.attend_scores_backward(*mistaken(read, (grad, needs, *inputs), 16))
    return (scores,), (grad,), _wished(found, needs, (1, 2, 8, 16, 32)), OF_SCORES


def _wished(found, needs, bits):
    return [got if needs & bit else None for got, bit in zip(found, bits, strict=True)]


def _inside_of(leaves, numbers):
    features, w_f = leaves[4:] or (None, None)
    return reference.Inside(features, w_f, checks.ACTIVATIONS[numbers[0]], numbers[1])


def _wanted(run, leaves, look, numbers):
    q, k, v, w = leaves[:4]
    if run is _attend:
        lens, mask = look
        return reference.attend(q, k, v, w, lens, 0.0, _inside_of(leaves, numbers), mask)
    return (reference.projected_scores(q, k, w, _inside_of(leaves, numbers)),)


def _is_at_a_kink(leaves, activation):
    """Whether a sum is so near to zero that its rounding may decide a slope."""
    if activation == 0:
        return False
    q, k, _, _, *features = (x.detach() for x in leaves)
    keys = k + features[0] @ features[1].t() if features else k
    sums = (q.unsqueeze(2) + keys.unsqueeze(1)).abs()
    return sums.numel() > 0 and bool(sums.min() < 1e-6 * sums.max())


def location(data):
    """``attend_location`` and the backward of its convolution."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype, activation = read.of(DTYPES), read.number(3)
    made, look = _drawn(read, dtype, activation, generator)
    q, k, v, w, features, w_f = made
    B, Tk, C = features.shape[:3] if features.dim() == 3 else (1, 2, 3)
    inputs, taps = read.of((0, 1, 2, 3)), read.of(TAPS) + read.mistake(30)
    shapes = (B, inputs, Tk), (C, inputs, taps), (C,), (B, Tk, C)
    x, w_conv, b_conv, grad = (tensor(read, s, dtype, generator, 1.0 / taps**0.5) for s in shapes)
    odd = spoil(read, [q, k, v, w, x, w_conv, b_conv, w_f])
    dropout_p, seed = dropout(read)
    bias = b_conv if read.number(2) else None
    given = (q, k, v, w, x, w_conv, bias, w_f, *look, seed, dropout_p, activation, 0.2)
    needs = read.number(4)
    try:
        context, weights, features = ops.attend_location(*mistaken(read, given, 16))
        found = ops.convolution_backward(*mistaken(read, [grad, x, w_conv, needs], 16))
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd or dropout_p:
        return "ran"
    leaves = [t.double().requires_grad_() for t in (x, w_conv)]
    wide = torch.zeros(B, Tk, C, dtype=torch.float64)
    if x.numel() and w_conv.numel():
        wide = convolved(*leaves, None)
    true = wide if bias is None else wide + bias.double()
    agree("features", features, true.detach(), dtype)
    tensors = [t.double() for t in (q, k, v, w, features, w_f)]
    want = _wanted(_attend, tensors, look, (activation, 0.2))
    agree("context", context, want[0], dtype)
    agree("weights", weights, want[1], dtype)
    if wide.requires_grad:
        of_both = torch.autograd.grad(wide, leaves, grad.double())
        for at, (got, real) in enumerate(zip(found, of_both, strict=True)):
            if needs >> at & 1:
                agree(("d location", "d w_conv")[at], got, real, dtype)
    return "checked"


def project(data):
    """``project`` and its backward."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype = read.of(DTYPES)
    leading = [read.of(SIZES[:10]) for _ in range(read.number(3))]
    D, H = read.of(SIZES), read.of(SIZES)
    shapes = (*leading, D), (H, D), (H,), (*leading, H)
    x, weight, bias, grad = (tensor(read, s, dtype, generator, 1.0) for s in shapes)
    odd = spoil(read, [x, weight, bias, grad])
    wanted = read.number(8)
    saved = x if wanted & 2 else None, weight if wanted & 1 else None
    try:
        out = ops.project(*mistaken(read, [x, weight, bias], 12))
        found = ops.project_backward(*mistaken(read, [grad, *saved, bool(wanted & 4)], 12))
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd:
        return "ran"
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    true = F.linear(*leaves)
    agree("product", out, true.detach(), dtype)
    of_all = torch.autograd.grad(true, leaves, grad.double())
    for at, (got, real) in enumerate(zip(found, of_all, strict=True)):
        if wanted >> at & 1:
            agree(f"gradient {at}", got, real, dtype)
    return "checked"
