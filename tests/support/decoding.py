"""Decoders drawn for the operators that take all their steps, what is exact, and single steps."""

import dataclasses
from contextlib import nullcontext

import cells
import torch
from entry_points import dispatched
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bahdanau_fast.ops import decode_on_gpu
from bahdanau_fast.ops.attention import NEED
from bahdanau_fast.ops.decode_arguments import Arguments, NonDifferentiable
from bahdanau_fast.ops.operator import operators
from bahdanau_fast.parity import allowed, error

BF16, FP16 = torch.bfloat16, torch.float16
NEEDS = NEED["keys"] | NEED["values"] | NEED["w_v"]
NAMES = (
    "states", "cells", "contexts", "queries", "weights",
    "grad_gates", "grad_first", "grad_first_cell", "grad_queries", "keys", "values", "w_v",
)  # fmt: skip


@dataclasses.dataclass
class Case:
    """A decoder; sizes are multiples of 32, as its launch takes them."""

    lstm: bool
    B: int = 3
    T: int = 2
    Tk: int = 5
    F: int = 32
    Dv: int = 32
    H: int = 32
    lens: object = None
    mask: object = None
    dropout_p: float = 0.0
    grads: tuple = (True, True, True, True)  # of states, last states, last cells, weights
    scale: float = 1.0

    def draw(self, dtype):
        """The arguments of the operator and gradients of results, in fp64, as dtype has them."""
        G, H = (4 if self.lstm else 3) * self.H, self.H
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape, std=1.0):
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * std * self.scale
            return x.to(dtype).double()

        one_layer = (1, self.B, H)
        arguments = Arguments(
            inputs=drawn(self.T, self.B, G),
            w_inputs=torch.eye(G, dtype=torch.float64),
            input_bias=torch.zeros(G, dtype=torch.float64),
            hidden=drawn(*one_layer, std=0.5),
            cell=drawn(*one_layer) if self.lstm else None,
            keys=drawn(self.B, self.Tk, self.F),
            values=drawn(self.B, self.Tk, self.Dv),
            w_query=drawn(self.F, H, std=H**-0.5),
            w_v=drawn(1, self.F, std=2 * self.F**-0.5),
            w_context=drawn(G, self.Dv, std=self.Dv**-0.5),
            w_input=torch.zeros(0, G, H, dtype=torch.float64),
            w_hidden=drawn(1, G, H, std=H**-0.5),
            bias=torch.cat([torch.zeros(1, 3 * H).double(), drawn(1, H)], 1),
        )
        if self.lstm:
            arguments = arguments._replace(bias=torch.zeros(1, 4 * H).double())
        shapes = (self.T, self.B, H), one_layer, one_layer, (self.T, self.B, self.Tk)
        wanted = (*self.grads[:2], self.grads[2] and self.lstm, self.grads[3])
        grads = [drawn(*s) if want else None for s, want in zip(shapes, wanted, strict=True)]
        return arguments, grads


def cast(arguments, grads, dtype):
    """Both in a dtype; gradients of weights in fp32 at the least."""
    arguments = Arguments(*(None if x is None else x.to(dtype) for x in arguments))
    wide = torch.promote_types(dtype, torch.float32)
    kinds = (*[dtype] * 3, wide)
    return arguments, [None if g is None else g.to(k) for g, k in zip(grads, kinds, strict=True)]


def rest_of(case):
    seed = torch.tensor([77]) if case.dropout_p else None
    return NonDifferentiable(None, None, case.lens, case.mask, None, seed, case.dropout_p)


def in_order(arguments, rest):
    """What ``decode`` takes behind the gates of inputs."""
    named = {**arguments._asdict(), **rest._asdict()}
    return tuple(named[name] for name in operators["decode"].names[1:-1])


def by_operators(call, case, arguments, grads):
    """Results and gradients by name, of the operators that ``call`` runs."""
    a, rest, given = arguments, rest_of(case), in_order(arguments, rest_of(case))
    kept = call("decode", a.inputs, *given, True)
    kept = tuple(x.clone() for x in kept)
    states, cells_, contexts, queries, weights, gates = kept
    found = call("decode_backward", *given, states, cells_, queries, weights, gates, *grads)
    *first, grad_contexts, scores, dropped = (x.clone() for x in found)
    dropped = weights if dropped.numel() == 0 else dropped
    by_row = [x.transpose(0, 1) for x in (dropped, grad_contexts, scores, queries)]
    memory = call(
        "attend_backward_keys",
        *(*by_row[:3], NEEDS, by_row[3], a.keys, a.values, a.w_v, rest.valid_lens, rest.mask),
        *(None, None),
    )
    made = (states, cells_, contexts, queries, weights, *first, *(x.clone() for x in memory))
    return dict(zip(NAMES, made, strict=True))


def by_steps(case, arguments, grads):
    """The same by single steps of torch's products and cells, and of the kernel of a step.

    Without a GPU, the CPU's.
    """
    rest, gpu = rest_of(case), torch.cuda.is_available()
    if gpu:
        moved = tree_map_only(torch.Tensor, Tensor.cuda, (arguments, grads, rest))
        arguments, grads, rest = moved
    with nullcontext() if gpu else cells.on_the_cpu(), torch.no_grad():
        kept = decode_on_gpu.forward("cuda", arguments.inputs, arguments, rest, keep=True)
        found = decode_on_gpu.backward("cuda", arguments, rest, kept, grads, NEEDS)
    made = [x.cpu() for x in (*kept[:5], *found)]
    return dict(zip(NAMES, made, strict=True))


def check(call, case, dtype):
    """The parity rule for what ``call(name, *arguments)`` makes, with single steps as eager."""
    arguments, grads = case.draw(dtype)
    exact = by_operators(dispatched, case, arguments, grads)
    given = cast(arguments, grads, dtype)
    steps = by_steps(case, *given)
    ours = by_operators(call, case, *given)
    for name, want in exact.items():
        limit = allowed(
            error(steps[name], want), float(want.abs().max()) if want.numel() else 0, dtype
        )
        off = error(ours[name], want)
        assert off <= limit, f"{name}: {off} of {limit}"


def check_tokens(call, case, seed, most, tokens=39):
    """Each token is the likeliest after those before, within rounding; how many there are of a row.

    In fp64 they are given as inputs to all steps.
    """
    arguments, _ = case.draw(BF16)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(BF16).double()

    G, first, last, blank = arguments.w_inputs.shape[0], 1, 3, 0
    a = arguments._replace(inputs=drawn(tokens, 8), w_inputs=drawn(G, 8), input_bias=drawn(G))
    dense, bias = 4 * drawn(48, case.H), drawn(48)  # more rows than tokens, a multiple of 16
    bias[last] += 12  # rows end at several steps
    bias[2], bias[tokens:] = -torch.inf, -torch.inf
    b, rest = cast(a, [None] * 4, BF16)[0], rest_of(case)
    found = call(
        "decode_greedy",
        *(b.inputs, b.w_inputs, b.input_bias, b.hidden, b.cell, b.keys, None, None, b.values),
        *(rest.valid_lens, rest.mask, b.w_query, b.w_v, b.w_context, b.w_input, b.w_hidden),
        *(b.bias, dense.to(BF16), bias.to(BF16), torch.empty(0, dtype=torch.int64)),
        *(first, last, blank, most),
    )
    got, weights = (x.clone() for x in found)
    before = torch.cat([torch.full((case.B, 1), first), got[:, :-1]], 1)
    gates = a.inputs[before.t()] @ a.w_inputs.t() + a.input_bias
    states, _, _, _, exact, _ = operators["decode"].overload(gates, *in_order(a, rest), False)
    logits = states[0, 1:] @ dense.t() + bias
    likeliest = logits.max(-1).values.t()
    chosen = logits.transpose(0, 1).gather(2, got.unsqueeze(2)).squeeze(2)
    ended = (before == last).cumsum(1) > 0
    assert (got[ended] == blank).all()
    assert ((likeliest - chosen)[~ended] <= 0.02 * logits[logits.isfinite()].abs().max()).all()
    assert (weights - exact.transpose(0, 1)).abs().max() < 0.02
    ends = ((got == last).cumsum(1) > 0).all(0)
    assert not ends[:-1].any()
    assert ends[-1] or got.shape[1] == most
    return got.shape[1]
