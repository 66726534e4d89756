"""Calls of the decoder's C++ entry points out of any bytes.

What comes back is held against the same decoder in plain PyTorch, step by step in fp64.
"""

import torch
from decoding import in_order

from bahdanau_fast.ops import decode as operator
from fuzzing.drawn import (
    NUMBERS,
    SIZES,
    agree,
    case,
    dropout,
    exact,
    lengths,
    mistaken,
    spoil,
    tensor,
)

ops = torch.ops.bahdanau_fast
DTYPES = (torch.float32, torch.float64)
SCALES = (1.0, 1e-3, 0.1, 3.0, 10.0)


def _drawn(read, generator, T):
    """The inputs of a decoder with ``T`` steps."""
    dtype, lstm = read.of(DTYPES), read.number(2)
    if read.mistake(60):
        dtype = torch.bfloat16
    B, Tk, L = read.of(SIZES[:7]), read.of(SIZES[:17]), 1 + read.number(3)
    H, E, F, Dv = (read.of(SIZES[:15]) for _ in range(4))
    scale, G = read.of(SCALES), (4 if lstm else 3) * H

    def normal(*shape, scale=1.0):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (x * scale).to(dtype)

    def weight(*shape):
        return normal(*shape, scale=max(shape[-1], 1) ** -0.5)

    of = operator.DecoderInputs(
        inputs=normal(T, B, E, scale=scale),
        hidden=normal(L, B, H),
        cell=normal(L, B, H) if lstm else None,
        keys=tensor(read, (B, Tk, F), dtype, generator, scale),
        values=tensor(read, (B, Tk, Dv), dtype, generator, 1.0),
        w_query=weight(F, H),
        w_v=tensor(read, (1, F) if read.number(2) else (F,), dtype, generator, 1.0),
        layers=tuple(
            (weight(G, H if i else Dv + E), weight(G, H), normal(G), normal(G)) for i in range(L)
        ),
    )
    lens = lengths(read, B, 1, Tk, generator)
    return of, operator.NonDifferentiable(valid_lens=lens)


def _tabled(read, made, rest):
    """The same with a table of the keys, now and then."""
    if not read.number(2):
        return rest
    table, keys_max = ops.exp_keys(made.keys, bool(read.number(2)))
    return rest._replace(table=table, keys_max=keys_max)


def _leaves(of):
    """The same numbers in fp64, to differentiate by."""
    wide = (x if x is None else x.detach().double().requires_grad_() for x in of.flat())
    return operator.DecoderInputs.from_flat(wide, len(of.layers))


@case
def decode(read, generator):
    """``decode``, keeping what backward needs or not, ``decode_backward`` and what completes it."""
    T = read.of((1, 2, 3, 5, 0))
    of, rest = _drawn(read, generator, T)
    odd = spoil(read, [of.inputs, of.keys, of.values, of.hidden])
    made = operator.operator_arguments(of, of.hidden.dtype)
    L, B, H = made.hidden.shape
    if read.number(2):
        masks = 2.0 * torch.randint(2, (L - 1, T, B, H), generator=generator)
        rest = rest._replace(masks=masks.to(made.hidden.dtype))
    dropout_p, seed = dropout(read)
    rest = _tabled(read, made, rest._replace(seed=seed, dropout_p=dropout_p))
    inputs = in_order(made, rest)
    gates = operator._input_gates(made)
    results = ops.decode(*mistaken(read, [gates, *inputs, True], 10))
    again = ops.decode(gates, *inputs, False)
    states, cells, _, queries, weights, kept = results
    grads = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        if read.number(4)
        else None
        for x in (states[-1, 1:], states[:, -1], states[:, -1], weights)
    ]
    grads[2] = None if made.cell is None else grads[2]
    saved = operator.StepResults(*results)
    kept = (states, cells, queries, weights, kept)
    ops.decode_backward(*mistaken(read, [*inputs, *kept, *grads], 10))
    by_row = None if rest.valid_lens is None else rest.valid_lens.reshape(B)  # as modules give them
    whole = rest._replace(valid_lens=by_row)
    needed = of._replace(inputs=True, keys=True, values=True, w_v=True)
    found = operator._gradients(made, whole, saved, weights, grads, needed, None)
    for place in () if read.broken or odd else (0, 1, 4):
        assert torch.equal(results[place], again[place]), f"result {place} is not the same again"

    def compare():
        leaves, dtype = _leaves(of), made.hidden.dtype
        masks = None if rest.masks is None else rest.masks.double()
        plain = operator.NonDifferentiable(valid_lens=rest.valid_lens, masks=masks)
        want = operator.by_steps(operator.operator_arguments(leaves, torch.float64), plain)
        got = operator.Decoded(states[-1, 1:], states[:, -1], cells[:, -1], weights)
        for name, a, b in zip(want._fields, got, want, strict=True):
            agree(name, a, b.detach(), dtype)
        used = [x for x in leaves.flat() if x is not None]
        if all(grad is None for grad in grads):
            return
        of_used = iter(exact(want, used, grads))
        for place, grad in enumerate(found.flat()):
            if grad is not None:
                agree(f"d input {place}", grad, next(of_used), dtype)

    return None if odd or dropout_p or 0 in (T, H) else compare


@case
def greedy(read, generator):
    """``decode_greedy``: at each step the likeliest token of those that follow its own choices."""
    of, rest = _drawn(read, generator, 0)
    made = operator.operator_arguments(of, of.hidden.dtype)
    dtype, E, H = made.hidden.dtype, made.inputs.shape[2], made.hidden.shape[2]
    V, most = read.of((1, 2, 3, 5, 17, 40)), 1 + read.number(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    embedding, w_dense, dense_bias = normal(V, E), normal(V, H), normal(V)
    odd = spoil(read, [embedding, of.keys, of.values, of.hidden])
    left_out = torch.tensor([read.number(V) for _ in range(read.number(4))], dtype=torch.int64)
    left_out = left_out.to(read.of((torch.int64, torch.int32, torch.float32)))
    first, last, blank = (read.number(V) for _ in range(3))
    marks = (first, last, blank, most)
    if read.mistake(30):
        at = read.number(4)
        marks = (*marks[:at], read.of((*NUMBERS, V)), *marks[at + 1 :])
    rest = _tabled(read, made, rest)
    inputs = [embedding, made.w_inputs, made.input_bias, *in_order(made, rest)[:-3]]
    inputs += [w_dense, dense_bias, left_out]
    tokens, weights = ops.decode_greedy(*mistaken(read, inputs, 8), *marks)
    B, steps = tokens.shape
    assert ((tokens >= 0) & (tokens < len(embedding))).all() or read.broken, "no tokens"

    def compare():
        assert steps <= most, f"{steps} steps of {most}"
        told = torch.cat((torch.full((B, 1), first), tokens), 1)
        ended = (tokens == last).cumsum(1) > 0
        before = torch.cat((torch.zeros(B, 1, dtype=torch.bool), ended), 1)[:, :steps]
        assert steps == most or bool(ended[:, -1:].all()), "stopped too early"
        assert not before.all(0).any(), "stopped too late"
        assert (tokens[before] == blank).all(), "something behind the end"
        if 0 in (steps, H):
            return
        wide = _leaves(of)._replace(inputs=embedding.double()[told[:, :steps]].transpose(0, 1))
        plain = operator.NonDifferentiable(valid_lens=rest.valid_lens)
        want = operator.by_steps(operator.operator_arguments(wide, torch.float64), plain)
        agree("weights", weights, want.weights.detach().transpose(0, 1), dtype)
        logits = want.features @ w_dense.double().t() + dense_bias.double()
        logits = logits.detach().transpose(0, 1)
        allowed = torch.ones(V, dtype=torch.bool)
        allowed[left_out.long()] = False
        if not allowed.any():
            assert not tokens[~before].any(), "a token that was left out"
            return
        assert allowed[tokens[~before]].all(), "a token that was left out"
        chosen = logits.gather(2, tokens.unsqueeze(2)).squeeze(2)
        best = logits.masked_fill(~allowed, float("-inf")).amax(2)
        agree("logits", chosen[~before], best[~before], dtype)

    return None if odd else compare
