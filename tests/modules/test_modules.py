"""The modules are drop-ins for the course's: signatures, parameters, numbers, copies."""

import contextlib
import copy
import pickle

import pytest
import torch
from course import CourseAttention, CourseMLPAttention, inputs
from torch import nn

import bahdanau_fast as bf

LENS = [None, torch.tensor([2, 6]), torch.tensor([0.5, 11.0]), torch.tensor([[1, 2, 3], [4, 0, 9]])]


def same(module, course, lens, data=None):
    data = inputs() if data is None else data
    got, want = module(*data, lens), course(*data, lens)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(module.attention_weights, course.attention_weights)


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("sizes", [(8,), (2, 20, 8)], ids=["new", "old"])
def test_state_dict_goes_both_ways(sizes, lens):
    course, ours = CourseAttention(*sizes), bf.AdditiveAttention(*sizes)
    course(*inputs(), lens)
    assert ours.load_state_dict(course.state_dict(), strict=True).missing_keys == []
    same(ours, course, lens)
    fresh, trained = CourseAttention(*sizes), bf.AdditiveAttention(*sizes)
    trained(*inputs(), lens)
    fresh.load_state_dict(trained.state_dict(), strict=True)
    assert list(fresh.state_dict()) == list(trained.state_dict())
    same(trained, fresh, lens)


def test_a_lazy_state_dict_loads_into_a_sized_module_and_back():
    lazy, sized = bf.AdditiveAttention(8), bf.AdditiveAttention(2, 20, 8)
    lazy.load_state_dict(sized.state_dict(), strict=True)
    same(lazy, sized, None)
    assert lazy.W_k.weight.shape == (8, 2)
    assert type(lazy(*inputs())) is torch.Tensor
    assert type(lazy.W_k) is nn.Linear


@pytest.mark.parametrize("lens", LENS, ids=str)
def test_the_oldest_state_dict(lens):
    course, ours = CourseMLPAttention(8, 6), bf.MLPAttention(8, 6)
    data = inputs(6, 6)
    ours.load_state_dict(course.state_dict(), strict=True)
    same(ours, course, lens, data)
    torch.testing.assert_close(ours(*data[:2]), ours(*data[:2], data[1]))
    course.load_state_dict(bf.MLPAttention(8, 6).state_dict(), strict=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((2, 20, 8, 0.1), {}),
        ((2, 20, 8), {"dropout": 0.1}),
        ((2, 20), {"num_hiddens": 8, "dropout": 0.1}),
        ((2,), {"query_size": 20, "num_hiddens": 8, "dropout": 0.1}),
        ((), {"key_size": 2, "query_size": 20, "num_hiddens": 8, "dropout": 0.1}),
        ((8, 0.1), {}),
        ((8, 0.1), {"query_size": 20, "key_size": 2}),
        ((8,), {"dropout": 0.1}),
        ((), {"num_hiddens": 8, "dropout": 0.1}),
        ((2, 20, 8), {}),
        ((2,), {"query_size": 20, "num_hiddens": 8}),
        ((8,), {"query_size": 20, "key_size": 2}),
    ],
)
def test_signatures(arguments, named):
    module = bf.AdditiveAttention(*arguments, **named)
    assert module.dropout.p == (0.1 if 0.1 in (*arguments, *named.values()) else 0.0)
    module.eval()(*inputs())
    assert [tuple(p.shape) for p in module.state_dict().values()] == [(8, 2), (8, 20), (1, 8)]
    assert list(module.state_dict()) == ["W_k.weight", "W_q.weight", "w_v.weight"]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("query", "key", "given"), [(5, 5, None), (5, 5, 5), (7, 3, 7), (1, 9, 1)])
def test_from_concat(query, key, given, with_bias):
    linear, v = nn.Linear(query + key, 8, bias=with_bias), nn.Linear(8, 1)
    slope = {"activation": "leaky_relu", "negative_slope": 0.3}
    module = bf.AdditiveAttention.from_concat(linear, v, given, **slope)
    q, k, values = inputs(query, key)
    pairs = torch.cat([q[:, :, None].expand(-1, -1, 10, -1), k[:, None].expand(-1, 3, -1, -1)], -1)
    weights = v(nn.functional.leaky_relu(linear(pairs), 0.3)).squeeze(-1).softmax(-1)
    torch.testing.assert_close(module(q, k, values), weights @ values)
    with torch.no_grad():
        linear.weight.zero_()
    assert module.W_k.weight.abs().max() > 0  # copies
    kept = bf.AdditiveAttention.from_concat(linear.double(), v.double(), given, 0.25)
    assert kept.W_q.weight.dtype == torch.float64
    assert (kept.dropout.p, kept.activation) == (0.25, "tanh")


@pytest.mark.parametrize("biases", [(True, True, True), (False, True, False), (False, False, True)])
def test_from_linears(biases):
    sizes = ((7, 8), (3, 8), (8, 1))
    layers = [nn.Linear(*size, bias=bias) for size, bias in zip(sizes, biases, strict=True)]
    w_q, w_k, v = layers
    module = bf.AdditiveAttention.from_linears(*layers)
    q, k, values = inputs(7, 3)
    weights = v(torch.tanh(w_q(q).unsqueeze(2) + w_k(k).unsqueeze(1))).squeeze(-1).softmax(-1)
    torch.testing.assert_close(module(q, k, values), weights @ values)
    assert (module.bias is None) == (biases[:2] == (False, False))
    other = bf.AdditiveAttention.from_linears(
        *(x.double() for x in layers), 0.25, activation="relu"
    )
    assert (other.W_q.weight.dtype, other.dropout.p) == (torch.float64, 0.25)
    assert other.activation == "relu"


def test_a_state_dict_with_biases_names_the_constructor():
    module = bf.AdditiveAttention(3, 7, 8)
    state = {"W_q.bias": torch.zeros(8), "w_v.bias": torch.zeros(1), **module.state_dict()}
    for strict in (True, False):
        model = nn.ModuleDict({"attention": module})
        loaded = {f"attention.{name}": x for name, x in state.items()}
        refused = pytest.raises(RuntimeError) if strict else contextlib.nullcontext()
        with pytest.warns(UserWarning, match=r"W_q.bias, w_v.bias are not .*from_linears"), refused:
            model.load_state_dict(loaded, strict=strict)


# ---- activations ---------------------------------------------------------------------------------


def test_a_state_dict_does_not_say_which_activation():
    plain, ours = bf.AdditiveAttention(8), bf.AdditiveAttention(2, 20, 8, activation="relu")
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert (plain(*inputs()) - ours(*inputs())).abs().max() > 0.001


def test_a_module_that_was_pickled_before_there_was_a_choice():
    older, (queries, *source) = bf.AdditiveAttention(2, 20, 8), inputs()
    want = older(queries, *source)
    del older.__dict__["_terms"]
    for module in (older, pickle.loads(pickle.dumps(older)), copy.deepcopy(older)):
        assert module.activation == "tanh"
        assert torch.equal(module(queries, *source), want)
        torch.testing.assert_close(module.attend(queries, module.memory(*source)), want)


def test_an_activation_cannot_be_exchanged():
    """A memory may have been made for the one that it has, which reads no table."""
    module = bf.AdditiveAttention(2, 20, 64, activation="relu")
    assert module.memory(*inputs(Tk=500)[1:]).projected.table is None
    with pytest.raises(AttributeError):
        module.activation = "tanh"


# ---- the course's printed examples ---------------------------------------------------------------


def test_printed_masked_softmax():
    torch.manual_seed(0)
    weights = bf.masked_softmax(torch.rand(2, 2, 4), torch.tensor([2, 3]))
    zero = torch.tensor([[[0, 0, 1, 1]] * 2, [[0, 0, 0, 1]] * 2], dtype=torch.bool)
    assert torch.equal(weights == 0, zero)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
    weights = bf.masked_softmax(torch.rand(2, 2, 4), torch.tensor([[1, 3], [2, 4]]))
    assert (weights == 0).sum(-1).tolist() == [[3, 1], [2, 0]]


def printed_data():
    values = torch.arange(40, dtype=torch.float32).reshape(1, 10, 4).repeat(2, 1, 1)
    return torch.ones(2, 10, 2), values, torch.tensor([2, 6])


@pytest.mark.parametrize(
    ("module", "query"),
    [
        (bf.AdditiveAttention(8, 0.1), 20),
        (bf.AdditiveAttention(2, 20, 8, 0.1), 20),
        (bf.MLPAttention(8, 2, 0.1), 2),
        (bf.DotProductAttention(0.5), 2),
        (bf.DotProductAttention(0.5, need_weights=False), 2),
    ],
    ids=["new", "old", "mlp", "dot", "dot without weights"],
)
def test_printed_attention(module, query):
    torch.manual_seed(0)
    keys, values, lens = printed_data()
    context = module.eval()(torch.normal(0, 1, (2, 1, query)), keys, values, lens)
    want = torch.tensor([[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]])
    torch.testing.assert_close(context, want)


def test_what_print_shows():
    shown = str(bf.AdditiveAttention(8, 8, 16, bias=True, cache_keys=False))
    assert "\n  bias=True, activation='tanh', cache_keys=False\n" in shown
    shown = str(bf.AdditiveAttention(8, activation="leaky_relu", negative_slope=0.2))
    assert "\n  bias=False, activation='leaky_relu', negative_slope=0.2, cache_keys=True\n" in shown
    assert "\n  bias=True, activation='tanh'\n" in str(bf.LocationAttention(4, 4, 8))
