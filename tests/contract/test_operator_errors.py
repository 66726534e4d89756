"""The operators refuse what they cannot compute, also when they are called directly."""

import pytest
import torch
from fresh import python
from test_errors import BAD, good, spoil

import bahdanau_fast as bf

bf.backends.available()  # loads the kernels
ones = torch.ones
ops = torch.ops.bahdanau_fast

RAW = {**good(), "bias": ones(8)}
PROJECTED = {
    "queries": ones(2, 3, 8),
    "keys": ones(2, 5, 8),
    "values": ones(2, 5, 7),
    "w_v": ones(8),
}
STEP = {**PROJECTED, "queries": ones(2, 3, 4), "w_q": ones(8, 4)}
# Of a backward that projects again, and is asked for all gradients.
GRADS = {
    **dict.fromkeys(("projected_queries", "projected_keys", "grad_weights")),
    "weights": ones(2, 3, 5),
    "grad_context": ones(2, 3, 7),
    "needs": 511,
}


def listed(*more, **wrong):
    """Arguments that are wrong: each value of a name, and what is wrong together."""
    return [{name: x} for name, values in wrong.items() for x in values] + [*more]


WRONG = listed(
    *({"w_f": ones(8, 4), "features": x} for x in (ones(2, 4, 4), ones(2, 5, 4).double())),
    {"features": ones(2, 5, 4), "w_f": ones(8, 3)},
    *({"dropout_p": p, "seed": torch.tensor([1])} for p in (-0.5, 1.5)),
    *({"dropout_p": 0.5, "seed": x} for x in (ones(1), torch.tensor([1, 2]), ones(0).long())),
    values=[ones(7), ones(2, 4, 7), ones(2, 5, 7).int()],
    w_v=[*map(ones, [7, 9, (2, 4), (8, 1)]), torch.tensor(1.0), ones(8).double()],
    valid_lens=[
        *(ones(3), ones(2, 2), torch.tensor(1), ones(2).to(torch.complex64)),
        *(ones(2) > 0, ones(2, 3, 5) > 0),
    ],
    mask=[ones(2, 3, 5), *(ones(s) > 0 for s in ((2, 5), (2, 2, 5), (3, 1, 5), (2, 1, 4)))],
    features=[ones(2, 5, 4)],
    w_f=[ones(8, 4)],
    activation=[4],
    dropout_p=[-0.5, 1.5, float("nan"), 0.5],
)
OF_TABLE = {"table": ones(2, 5, 8).double(), "keys_max": ones(2).double()}
WRONG_PROJECTED = listed(
    *(
        OF_TABLE | wrong
        for wrong in listed(
            table=[ones(2, 5, 3).double(), ones(2, 8, 5).double().transpose(1, 2)],
            keys_max=[ones(3).double(), ones(2)],
        )
    ),
    queries=[ones(2, 8), ones(2, 3, 9), ones(2, 3, 8).to(torch.complex64), ones(2, 3, 8) > 0],
    keys=[ones(2, 8), ones(1, 5, 8), ones(2, 6, 8), ones(2, 5, 8).half()],
    w_q=[ones(8, 7), ones(4, 8)],
    w_k=[ones(8, 7)],
    bias=[ones(8)],
)
WRONG_STEP = listed(w_q=[ones(8, 5), ones(7, 4)], w_k=[ones(8, 7)], bias=[ones(8)])
WRONG_RAW = listed(
    {"queries": RAW["queries"], "w_q": None},
    OF_TABLE,
    queries=[ones(2, 4), ones(2, 3, 4).double()],
    w_q=[ones(8)],
)


def elsewhere(value):
    """Whether a tensor takes a call to another place than the kernels of the CPU."""
    return isinstance(value, torch.Tensor) and (value.is_sparse or value.is_meta)


NAMES = {argument.name for argument in ops.attention.default._schema.arguments}
for _name, _value, *_ in BAD:
    _value = spoil(_value, RAW.get(_name))
    if _name in NAMES and not elsewhere(_value) and (_name, _value) != ("w_q", None):
        WRONG_RAW.append({_name: _value})


def refused(operator, names, given):
    """It raises an error that names one of these arguments."""
    with pytest.raises(RuntimeError, match=r"must|[Ee]xpected") as raised:
        operator(**given)
    assert any(name in str(raised.value) for name in names), raised.value


@pytest.mark.parametrize(
    ("own", "wrong_ones"),
    [(PROJECTED, WRONG_PROJECTED), (STEP, WRONG_STEP), (RAW, WRONG_RAW)],
    ids=["projected", "step", "raw"],
)
def test_operators_raise(own, wrong_ones):
    for wrong in WRONG + wrong_ones:
        refused(ops.attention, wrong, {**own, **wrong})
        refused(ops.attention.recorded, wrong, {**own, **wrong})
        refused(ops.attention_backward, wrong, {**own, **GRADS, **wrong})
    ops.attention_backward(**own, **GRADS)


def test_what_is_wrong_is_refused_where_there_is_nothing_to_compute():
    for B, Tq, Tk in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        empty = {"queries": ones(B, Tq, 8), "keys": ones(B, Tk, 8), "values": ones(B, Tk, 7)}
        own = {**PROJECTED, **empty}
        ops.attention(**own)
        for wrong in (
            {"valid_lens": ones(B + 1)},
            {"valid_lens": ones(B, Tq + 1)},
            {"valid_lens": ones(B) > 0},
            {"valid_lens": ones(B, Tq) > 0},
            {"mask": ones(B, Tq, Tk)},
            {"mask": ones(B, 1, Tk + 1) > 0},
        ):
            refused(ops.attention, wrong, {**own, **wrong})


@pytest.mark.parametrize("own", [PROJECTED, RAW], ids=["projected", "raw"])
def test_the_backward_operator_raises(own):
    context, weights, _, *projected = ops.attention.recorded(**own)
    given = dict(zip(("projected_queries", "projected_keys"), projected, strict=True))
    given |= {"weights": weights, "grad_context": context, "grad_weights": weights}
    ops.attention_backward(**own, **given, needs=511)
    for name, right in given.items():
        if name.startswith("projected") and own is PROJECTED:  # it reads none
            continue
        spoiled = [right[:1], right[..., :1], right.half(), right.double(), right[0]]
        spoiled += [torch.cat((right, right), -1)]
        spoiled += [] if name.startswith("projected") else [right.new_ones(0)]
        for wrong in spoiled:
            wrongly = {**own, **given, "needs": 511, name: wrong}
            refused(ops.attention_backward, [name], wrongly)


@pytest.mark.parametrize("saved_as", [torch.float32, torch.float64], ids=str)
def test_projections_of_another_dtype_are_refused(saved_as):
    # They fit together, but the weights of the projections are read and written as theirs.
    given = dict(RAW)
    context, weights, _, *projected = ops.attention.recorded(**given)
    other = torch.float64 if saved_as == torch.float32 else torch.float32
    for name in ("queries", "keys", "w_q", "w_k", "bias"):
        given[name] = given[name].to(other)
    for name in ("values", "w_v"):
        given[name] = given[name].to(saved_as)
    given |= {"weights": weights, "grad_context": context}
    given |= zip(("projected_queries", "projected_keys"), projected, strict=True)
    saved = ("weights", "grad_context", "projected_queries", "projected_keys")
    given |= {name: given[name].to(saved_as) for name in saved}
    with pytest.raises(RuntimeError, match="projected_queries must be those"):
        ops.attention_backward(**given, grad_weights=None, needs=511)


def test_exp_keys_raises():
    for keys in (ones(3), ones(2, 3, 4).int(), ones(2, 3, 4).to(torch.complex128)):
        with pytest.raises(RuntimeError, match="must"):
            ops.exp_keys(keys)


def test_pooling_raises():
    keys, w, values = ones(2, 5, 4), ones(8, 4), ones(2, 5, 7)
    for w_v in (torch.tensor(1.0), ones(8), ones(1, 7)):
        refused(ops.pool, ["w_v"], {"keys": keys, "w": w, "values": values, "w_v": w_v})


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
