"""The operators refuse what they cannot compute, also when they are called directly."""

import pytest
import torch
from fresh import python
from test_errors import good

import bahdanau_fast as bf  # noqa: F401  defines the operators

ones = torch.ones
ops = torch.ops.bahdanau_fast


INPUTS = {
    "queries": ones(2, 3, 8),
    "keys": ones(2, 5, 8),
    "values": ones(2, 5, 7),
    "w_v": ones(8),
}
GRADS = {
    "weights": ones(2, 3, 5),
    "grad_context": ones(2, 3, 7),
    "grad_weights": None,
    "needs": 15,
}


def call_attend(**changed):
    return ops.attend(**{**INPUTS, **changed})


def call_backward(**changed):
    return ops.attend_backward(**{**INPUTS, **GRADS, **changed})


WRONG = [
    {"queries": ones(2, 8)},
    {"keys": ones(2, 8)},
    {"values": ones(7)},
    {"queries": ones(2, 3, 9)},
    {"keys": ones(1, 5, 8)},
    {"keys": ones(2, 6, 8)},
    {"values": ones(2, 4, 7)},
    {"w_v": ones(9)},
    {"w_v": ones(2, 4)},
    {"w_v": ones(8, 1)},
    {"w_v": torch.tensor(1.0)},
    {"w_v": ones(8).double()},
    {"keys": ones(2, 5, 8).half()},
    {"values": ones(2, 5, 7).int()},
    {"queries": ones(2, 3, 8).to(torch.complex64)},
    {"queries": ones(2, 3, 8) > 0},
    {"valid_lens": ones(3)},
    {"valid_lens": ones(2, 2)},
    {"valid_lens": torch.tensor(1)},
    {"valid_lens": ones(2) > 0},
    {"valid_lens": ones(2, dtype=torch.complex64)},
    {"valid_lens": ones(2, 3, 5) > 0},
    {"mask": ones(2, 3, 5)},
    {"mask": ones(2, 5) > 0},
    {"mask": ones(2, 2, 5) > 0},
    {"mask": ones(3, 1, 5) > 0},
    {"mask": ones(2, 1, 4) > 0},
    {"features": ones(2, 5, 4)},
    {"w_f": ones(8, 4)},
    {"features": ones(2, 4, 4), "w_f": ones(8, 4)},
    {"features": ones(2, 5, 4), "w_f": ones(8, 3)},
    {"features": ones(2, 5, 4).double(), "w_f": ones(8, 4)},
    {"activation": 3},
    {"dropout_p": -0.5},
    {"dropout_p": 1.5},
    {"dropout_p": float("nan")},
    {"dropout_p": 0.5},
    {"dropout_p": -0.5, "seed": torch.tensor([1])},
    {"dropout_p": 1.5, "seed": torch.tensor([1])},
    {"dropout_p": 0.5, "seed": ones(1)},
    {"dropout_p": 0.5, "seed": torch.tensor([1, 2])},
    {"dropout_p": 0.5, "seed": torch.tensor([], dtype=torch.int64)},
    {"table": ones(2, 5, 3).double(), "keys_max": ones(2).double()},
    {"table": ones(2, 5, 8).double(), "keys_max": ones(3).double()},
    {"table": ones(2, 5, 8).double(), "keys_max": ones(2)},
    {"table": ones(2, 8, 5).double().transpose(1, 2), "keys_max": ones(2).double()},
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_operators_raise(number):
    for call in (call_attend, call_backward):
        with pytest.raises(RuntimeError, match=r"must|expected"):
            call(**WRONG[number])


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": ones(2, 3, 6)},
        {"weights": ones(2, 3)},
        {"weights": ones(0)},
        {"weights": ones(2, 3, 5).double()},
        {"grad_context": ones(2, 3, 6)},
        {"grad_context": ones(2, 3, 7).half()},
        {"grad_weights": ones(2, 3, 7)},
        {"grad_weights": ones(2, 3)},
    ],
    ids=str,
)
def test_the_backward_operator_raises(wrong):
    with pytest.raises(RuntimeError, match="must"):
        call_backward(**wrong)


def whole():
    return {**good(), "bias": None, "seed": None, "dropout_p": 0.0}


WRONG_WHOLE = [
    {"queries": ones(2, 4)}, {"keys": ones(3, 5, 6)}, {"values": ones(2, 4, 7)},
    {"w_q": ones(8, 5)}, {"w_q": ones(7, 4)}, {"w_q": ones(8)}, {"w_k": ones(8, 4)},
    {"w_k": ones(8, 6, 1)}, {"w_v": ones(7)}, {"w_v": ones(2, 4)}, {"bias": ones(7)},
    {"bias": ones(8).double()}, {"w_q": ones(8, 4).half()}, {"keys": ones(2, 5, 6).int()},
    {"valid_lens": ones(3)}, {"valid_lens": ones(2) > 0}, {"dropout_p": -1.0}, {"dropout_p": 0.5},
    {"queries": ones(2, 3, 4).to(torch.complex64)},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG_WHOLE)))
def test_the_whole_operator_raises(number):
    given = whole()
    context, *saved = ops.additive_attention(**given)
    names = ("weights", "projected_queries", "projected_keys")
    saved = dict(zip(names, saved, strict=True))
    wrong = {**given, **WRONG_WHOLE[number]}
    with pytest.raises(RuntimeError, match=r"must|expected"):
        ops.additive_attention(**wrong)
    with pytest.raises(RuntimeError, match=r"must|expected"):
        ops.additive_attention_backward(**wrong, **saved, grad_context=context, grad_weights=None)


@pytest.mark.parametrize(
    "name", ["weights", "projected_queries", "projected_keys", "grad_context", "grad_weights"]
)
def test_the_whole_backward_operator_raises(name):
    given = whole()
    context, weights, queries, keys = ops.additive_attention(**given)
    given |= {
        "weights": weights,
        "projected_queries": queries,
        "projected_keys": keys,
        "grad_context": context,
        "grad_weights": weights,
    }
    ops.additive_attention_backward(**given)
    for spoiled in (given[name][:1], given[name][..., :1], given[name].half(), given[name][0]):
        with pytest.raises(RuntimeError, match="must"):
            ops.additive_attention_backward(**{**given, name: spoiled})


@pytest.mark.parametrize("saved_as", [torch.float32, torch.float64], ids=str)
def test_projections_of_another_dtype_are_refused(saved_as):
    # They fit together, but the weights of the projections are read and written as theirs.
    given = whole()
    context, *saved = ops.additive_attention(**given)
    other = torch.float64 if saved_as == torch.float32 else torch.float32
    for name in ("queries", "keys", "w_q", "w_k"):
        given[name] = given[name].to(other)
    for name in ("values", "w_v"):
        given[name] = given[name].to(saved_as)
    weights, *projected = (x.to(saved_as) for x in saved)
    with pytest.raises(RuntimeError, match="the projections must be those"):
        ops.additive_attention_backward(**given, weights=weights, projected_queries=projected[0],
                                        projected_keys=projected[1],
                                        grad_context=context.to(saved_as),
                                        grad_weights=None)  # fmt: skip


def test_exp_keys_raises():
    for keys in (ones(3), ones(2, 3, 4).int(), ones(2, 3, 4).to(torch.complex128)):
        with pytest.raises(RuntimeError, match="must"):
            ops.exp_keys(keys)


EMPTY = """
import itertools, torch, bahdanau_fast as bf
# Sizes of zero anywhere: results or a plain error, never the end of the process.
for B, Tq, Tk, H, D, Dv in itertools.product((0, 2), (0, 3), (0, 5), (0, 4), (0, 6), (0, 7)):
    shapes = (B, Tq, D), (B, Tk, D), (B, Tk, Dv), (H, D), (H, D), (1, H)
    inputs = [torch.ones(s, requires_grad=True) for s in shapes]
    for backend in ("cpu", "reference"):
        context, weights = bf.additive_attention(*inputs, backend=backend)
        assert context.shape == (B, Tq, Dv) and weights.shape == (B, Tq, Tk)
        if Tk:  # all scores alike
            assert torch.allclose(weights, torch.full_like(weights, 1 / Tk)), (backend, shapes)
            assert torch.allclose(context, torch.ones_like(context)), (backend, shapes)
        else:
            assert not context.any()
        grads = torch.autograd.grad(context.sum() + weights.sum(), inputs, allow_unused=True)
        assert all(g is None or (g.abs() < 1e3).all() for g in grads), (backend, shapes)
"""


def test_empty_sizes_do_not_crash():
    # What is never written shows: glibc fills new memory with -1.7e38.
    python("-c", EMPTY, MALLOC_PERTURB_="1")
