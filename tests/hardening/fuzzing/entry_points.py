"""Calls of the operators that project, with their own matrix products, out of any bytes."""

import torch
import torch.nn.functional as F

from bahdanau_fast import reference
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


def _scale(read, dtype):
    """Where tanh is steep, two roundings of large projections to 16 bits differ too much."""
    return read.of(SCALES[:6] if dtype.itemsize > 2 else SCALES[:4])


@case
def whole(read, generator):
    """``additive_attention``, from raw inputs, and its backward."""
    dtype = read.of(DTYPES)
    B, Tq, Tk = (read.of(SIZES[:k]) for k in (5, 8, 14))
    H, Dv, Dq, Dk = (read.of(SIZES[:14]) for _ in range(4))
    while B * Tq * Tk * H > 40_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    scale = _scale(read, dtype)
    shapes = (B, Tq, Dq), (B, Tk, Dk), (B, Tk, Dv), (H, Dq), (H, Dk), (1, H), (H,)
    scales = scale, scale, 1.0, max(Dq, 1) ** -0.5, max(Dk, 1) ** -0.5, 1.0, 1.0
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    lens = lengths(read, B, Tq, Tk, generator)
    odd = spoil(read, made)
    if read.number(2):
        made[6] = None
    dropout_p, seed = dropout(read)
    inputs = [*made, lens, None, seed, dropout_p]
    context, *saved = ops.additive_attention(*mistaken(read, inputs, 16))
    grads = gradients_of(read, context, saved[0], generator)
    found = ops.additive_attention_backward(*mistaken(read, [*saved, *grads, *inputs], 16))

    def compare():
        leaves = [x.detach().double().requires_grad_() for x in made if x is not None]
        q, k, v, w_q, w_k, w_v, *bias = leaves
        projected = q @ w_q.t(), k @ w_k.t() + (bias[0] if bias else 0.0)
        want = reference.attend(*(x.to(dtype).double() for x in projected), v, w_v, lens)
        agree("context", context, want[0].detach(), dtype)
        agree("weights", saved[0], want[1].detach(), dtype)
        for number, true in enumerate(exact(want, leaves, grads)):
            agree(f"gradient {number}", found[number], true, dtype)

    return None if odd or dropout_p else compare


@case
def step(read, generator):
    """``attend_step``: queries that are projected on the way."""
    dtype = read.of(DTYPES)
    B, Tq, Tk = (read.of(SIZES[:k]) for k in (5, 4, 14))
    H, Dv, Dq = (read.of(SIZES[:n]) for n in (22, 14, 17))
    scale = _scale(read, dtype)
    shapes = (B, Tq, Dq), (H, Dq), (B, Tk, H), (B, Tk, Dv), (1, H)
    scales = scale, max(Dq, 1) ** -0.5, scale, 1.0, 1.0
    made = [tensor(read, s, dtype, generator, x) for s, x in zip(shapes, scales, strict=True)]
    lens = lengths(read, B, Tq, Tk, generator)
    odd = spoil(read, made)
    q, w_q, k, v, w = made
    table = ops.exp_keys(k, bool(read.number(2))) if read.number(2) else (None, None)
    inputs = [q, k, v, w_q, None, None, w, lens, None, *table]
    context, weights = ops.attend_step(*mistaken(read, inputs, 8))

    def compare():
        projected = (q.double() @ w_q.double().t()).to(dtype)
        want = reference.attend(*(x.double() for x in (projected, k, v, w)), lens)
        agree("context", context, want[0], dtype)
        agree("weights", weights, want[1], dtype)

    return None if odd else compare


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
