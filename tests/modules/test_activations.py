"""AdditiveAttention with ReLU, leaky ReLU and sigmoid: what it projects, adds up, keeps, and says.

Its numbers are in tests/contract/test_general.py, and what may change between two calls is among
the ways of test_ways.py and test_sequences.py.
"""

import copy
import pickle

import pytest
import torch
from profiled import counts
from torch import nn

import bahdanau_fast as bf

B, TK, DK, DQ, DV, H = 3, 53, 17, 5, 7, 64
FORMS = {
    "relu": {"activation": "relu"},
    "leaky_relu": {"activation": "leaky_relu", "negative_slope": 0.3},
    "sigmoid": {"activation": "sigmoid"},
}


@pytest.fixture(params=FORMS)
def module(request):
    torch.manual_seed(0)
    return bf.AdditiveAttention(DK, DQ, H, bias=True, **FORMS[request.param])


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    shapes = (B, 1, DQ), (B, TK, DK), (B, TK, DV)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by_memory(module, queries, keys, values):
    memory = module.memory(keys, values)
    return [module.attend(query, memory) for query in queries]


def truth(module, query, keys, values):
    weights = [layer.weight for layer in (module.W_q, module.W_k, module.w_v)]
    inside = {"activation": module.activation, "negative_slope": module.negative_slope}
    given = (query, keys, values, *weights)
    return bf.reference.additive_attention(*given, bias=module.bias, **inside)[0]


close = torch.testing.assert_close


def test_scores_on_a_memory(module, inputs):
    query, keys, values = inputs
    memory = module.memory(keys, values)
    got = module.scores(query, memory, clip=10.0)
    weights = [layer.weight for layer in (module.W_q, module.W_k, module.w_v)]
    inside = {"activation": module.activation, "negative_slope": module.negative_slope}
    given = (query, keys, *weights)
    want = bf.reference.additive_scores(*given, bias=module.bias, **inside, clip=10.0)
    close(got, want)
    assert memory.projected.table is None  # nobody would read it


@pytest.mark.parametrize("layer", ["W_q", "W_k", "w_v"])
def test_a_layer_that_is_called(module, inputs, layer):
    """With a hook, which nothing but a call would run."""
    want = [truth(module, *inputs)] * 2
    seen = []
    getattr(module, layer).register_forward_hook(lambda *_: seen.append(1))
    got = [by_memory(module, inputs[:1], *inputs[1:])[0], module(*inputs)]
    close(got, want)
    assert len(seen) == 2


def test_a_state_dict_does_not_say_which(module, inputs):
    plain = bf.AdditiveAttention(DK, DQ, H, bias=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    assert (plain(*inputs) - module(*inputs)).abs().max() > 0.001


def test_a_module_that_was_pickled_before_there_was_a_choice(inputs):
    older = bf.AdditiveAttention(DK, DQ, H)
    want = older(*inputs)
    del older.__dict__["_terms"]
    for module in (older, pickle.loads(pickle.dumps(older)), copy.deepcopy(older)):
        assert module.activation == "tanh"
        assert torch.equal(module(*inputs), want)
        close(by_memory(module, inputs[:1], *inputs[1:])[0], want)


def test_from_concat(inputs):
    linear, v = nn.Linear(DQ + DK, H), nn.Linear(H, 1)
    module = bf.AdditiveAttention.from_concat(linear, v, DQ, **FORMS["leaky_relu"])
    query, keys, values = inputs
    pairs = torch.cat((query.unsqueeze(2).expand(-1, -1, TK, -1), keys.unsqueeze(1)), 3)
    scores = v(nn.functional.leaky_relu(linear(pairs), 0.3)).squeeze(3)
    close(module(*inputs), scores.softmax(-1) @ values)


def test_an_activation_cannot_be_exchanged(module):
    """A memory may have been made for the one that it has."""
    with pytest.raises(AttributeError):
        module.activation = "tanh"


# ---- recurrent layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])
def test_a_recurrent_layer_with_another_activation(cls, module, inputs):
    """Step by step: the operator of all steps knows the tanh alone."""
    torch.manual_seed(0)
    layer = cls(4, DQ, key_size=DK, value_size=DV)
    layer.attention = module
    _, keys, values = inputs
    steps = torch.randn(6, B, 4)
    found = []
    assert counts(lambda: found.append(layer(steps, None, keys, values))).get("decode") is None
    hidden, want = None, []
    zeros = torch.zeros(1, B, DQ)
    for step in steps:
        top = zeros if hidden is None else hidden[0] if cls is bf.AttentionLSTM else hidden
        context = truth(module, top[-1].unsqueeze(1), keys, values).squeeze(1)
        output, hidden = layer.rnn(torch.cat((context, step), 1).unsqueeze(0), hidden)
        want.append(output)
    close(found[0][0], torch.cat(want))


# ---- what PyTorch does with it -------------------------------------------------------------------


def test_a_loop_compiled_in_one_graph(module, inputs):
    query, *source = (x.double().requires_grad_() for x in inputs)
    module.double()
    leaves, grads = [query, *source, *module.parameters()], []
    for function in (by_memory, torch.compile(by_memory, fullgraph=True, backend="aot_eager")):
        results = torch.cat(function(module, [query, query + 1], *source), 1)
        grads.append([results, *torch.autograd.grad(results.square().sum(), leaves)])
    torch.testing.assert_close(*grads)
