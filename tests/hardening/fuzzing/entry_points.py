"""Calls of the attention's C++ entry points out of any bytes: right results, or an error in words.

A function reads sizes, dtypes, strides, lengths, magnitudes and mistakes out of the bytes, calls
operators forward and backward, and holds what comes back against the reference in fp64. It gives
"refused", "checked" or "ran" (nothing to compare with); a wrong result is an AssertionError.
"""

import torch

from bahdanau_fast import reference
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
INPUTS = ("d queries", "d keys", "d values", "d w_v")


def attend(data):
    """``exp_keys``, ``attend`` and its backward, whole and in two parts."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype = read.of(DTYPES)
    B, Tq, Tk, H, Dv = (read.of(SIZES[:k]) for k in (7, 14, 22, 17, 17))
    while B * Tq * Tk * H > 150_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    scale = read.of(SCALES)
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), (1, H) if read.number(2) else (H,)
    q, k, v, w = (
        tensor(read, s, dtype, generator, scale if i < 2 else 1.0) for i, s in enumerate(shapes)
    )
    lens = lengths(read, B, Tq, Tk, generator)
    odd = spoil(read, [q, k, v, w])
    dropout_p, seed = dropout(read)
    need_weights, tabled, needs = bool(read.number(2)), read.number(3), read.number(16)
    try:
        table = ops.exp_keys(k, bool(read.number(2))) if tabled else (None, None)
        if tabled == 2 and read.mistake(10):
            table = table[0][..., :-1], table[1]
        tensors, rest = (q, k, v, w), (lens, None, *table, seed, dropout_p)
        inputs = (*tensors, None, None, *rest)
        context, weights = ops.attend(*mistaken(read, [*inputs, 0, 0.01, need_weights], 32))
        looked = weights if need_weights else ops.attend(*inputs)[1]
        grads = gradients_of(read, context, looked, generator)
        found = ops.attend_backward(looked, *grads, needs, *inputs)[:4]
        parts = _in_two_parts(read, tensors, rest, looked, grads, needs)
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd:
        return "ran"
    needed = [bool(needs >> bit & 1) for bit in range(4)]
    for name, part, whole, need in zip(INPUTS, parts, found, needed, strict=True):
        if need:
            agree(f"{name} in parts", part, whole.double(), dtype)
    if dropout_p:
        return "ran"
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, w)]
    want = reference.attend(*leaves, lens)
    agree("context", context, want[0].detach(), dtype)
    agree("weights", looked, want[1].detach(), dtype)
    for name, got, true, need in zip(
        INPUTS, found, exact(want, leaves, grads), needed, strict=True
    ):
        if need:
            agree(name, got, true, dtype)
    return "checked"


def _in_two_parts(read, tensors, rest, looked, grads, needs):
    """The four gradients, those of keys, values and w_v from what that of queries leaves."""
    *looks, _, dropout_p = rest
    first = mistaken(read, [looked, *grads, bool(needs & 1), *tensors, *rest], 16)
    of_queries, of_scores, dropped = ops.attend_backward_queries(*first)
    seen = dropped if dropout_p else looked
    second = mistaken(read, [seen, grads[0], of_scores, needs & 14, *tensors, *looks], 16)
    return of_queries, *ops.attend_backward_keys(*second)


def whole(data):
    """``additive_attention``, from raw inputs, and its backward."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype = read.of(DTYPES)
    B, Tq, Tk = (read.of(SIZES[:k]) for k in (5, 8, 14))
    H, Dv, Dq, Dk = (read.of(SIZES[:14]) for _ in range(4))
    while B * Tq * Tk * H > 40_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    # Where tanh is steep, two roundings of large projections to 16 bits differ too much.
    scale = read.of(SCALES[:6] if dtype.itemsize > 2 else SCALES[:4])
    shapes = (B, Tq, Dq), (B, Tk, Dk), (B, Tk, Dv), (H, Dq), (H, Dk), (1, H), (H,)
    scales = scale, scale, 1.0, max(Dq, 1) ** -0.5, max(Dk, 1) ** -0.5, 1.0, 1.0
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    lens = lengths(read, B, Tq, Tk, generator)
    odd = spoil(read, made)
    if read.number(2):
        made[6] = None
    dropout_p, seed = dropout(read)
    inputs = [*made, lens, None, seed, dropout_p]
    try:
        context, *saved = ops.additive_attention(*mistaken(read, inputs, 16))
        grads = gradients_of(read, context, saved[0], generator)
        found = ops.additive_attention_backward(*mistaken(read, [*saved, *grads, *inputs], 16))
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd or dropout_p:
        return "ran"
    leaves = [x.detach().double().requires_grad_() for x in made if x is not None]
    q, k, v, w_q, w_k, w_v, *bias = leaves
    projected = q @ w_q.t(), k @ w_k.t() + (bias[0] if bias else 0.0)
    want = reference.attend(*(x.to(dtype).double() for x in projected), v, w_v, lens)
    agree("context", context, want[0].detach(), dtype)
    agree("weights", saved[0], want[1].detach(), dtype)
    for number, true in enumerate(exact(want, leaves, grads)):
        agree(f"gradient {number}", found[number], true, dtype)
    return "checked"


def step(data):
    """``attend_step``: queries that are projected on the way."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype = read.of(DTYPES)
    B, Tq, Tk = (read.of(SIZES[:k]) for k in (5, 4, 14))
    H, Dv, Dq = (read.of(SIZES[:n]) for n in (22, 14, 17))
    scale = read.of(SCALES[:6] if dtype.itemsize > 2 else SCALES[:4])
    shapes = (B, Tq, Dq), (H, Dq), (B, Tk, H), (B, Tk, Dv), (1, H)
    scales = scale, max(Dq, 1) ** -0.5, scale, 1.0, 1.0
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    lens = lengths(read, B, Tq, Tk, generator)
    odd = spoil(read, made)
    q, w_q, k, v, w = made
    try:
        table = ops.exp_keys(k, bool(read.number(2))) if read.number(2) else (None, None)
        inputs = [q, k, v, w_q, None, None, w, lens, None, *table]
        context, weights = ops.attend_step(*mistaken(read, inputs, 8))
    except RuntimeError as error:
        in_words(read, error)
        return "refused"
    if read.broken or odd:
        return "ran"
    projected = (q.double() @ w_q.double().t()).to(dtype)
    want = reference.attend(*(x.double() for x in (projected, k, v, w)), lens)
    agree("context", context, want[0], dtype)
    agree("weights", weights, want[1], dtype)
    return "checked"
