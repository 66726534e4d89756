"""``torch.compile(model, backend=...)`` with additive attention as the operator in the graph."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from beside import results, same
from torch import nn
from torch._dynamo import lookup_backend
from whole import Speller

from bahdanau_fast.fuse.compiling import backend, fuse_graph
from bahdanau_fast.graphs import rewrite
from bahdanau_fast.graphs.graph import state

ATTENTION, STEPS = torch.ops.bahdanau_fast.attention.default, 2


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def speller(kind=Speller):
    return kind(tokens=7, memory=6, hidden=16)


def given(n=4):
    memory = torch.randn(n, 9, 6, generator=torch.Generator().manual_seed(n))
    return memory, torch.arange(n) % 9 + 1, torch.arange(n * STEPS).view(n, STEPS) % 7


def recording(graphs, then="aot_eager"):
    """A backend that keeps graphs as they came and as they were rewritten."""

    def compiler(graph, inputs):
        made = fuse_graph(graph, inputs)
        graphs.append((graph, made))
        return lookup_backend(then)(made, inputs)

    return compiler


def operators(graphs):
    """How often each graph has the operator."""
    return [[node.target for node in made.graph.nodes].count(ATTENTION) for _, made in graphs]


@pytest.mark.parametrize("by", ["graph", "backend"])
def test_a_decoder_computes_the_same(by):
    model, graphs, inputs = speller(), [], given()
    call = torch.compile(model, backend=recording(graphs) if by == "graph" else backend)
    inputs[0].requires_grad_()
    both = call, copy.deepcopy(model)
    same(*(results(partial(each, *inputs), inputs[:1], each) for each in both))
    assert operators(graphs) == [STEPS] * (by == "graph")


def test_a_model_without_attention_keeps_its_graph():
    graphs, model = [], nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Softmax(1))
    x = torch.randn(4, 9, 6)
    same(torch.compile(model, backend=recording(graphs))(x), model(x))
    assert len(graphs) == 1
    assert all(made is graph for graph, made in graphs)


class Halving(Speller):
    """Writes to its memory."""

    def forward(self, memory, *others):
        return super().forward(memory.mul_(0.5), *others)


def test_nothing_runs_while_it_compiles_and_sizes_are_symbols():
    graphs, model, made = [], speller(Halving), set()
    call = torch.compile(model, backend=recording(graphs, "eager"), dynamic=True)
    with torch.no_grad():
        for n in (5, 8, 11):
            same(*(each(*given(n)) for each in (call, model)))
            made.add(len(graphs))  # more than one of torch's own accord
    assert len(made) == 1
    assert {*operators(graphs)} == {STEPS}


class Counting(Speller):
    """Counts its calls."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *given):
        self.calls.add_(1)
        return super().forward(*given)


def test_what_a_graph_writes_to_is_written_to():
    model, graphs = speller(Counting), []
    call = torch.compile(model, backend=recording(graphs))
    for _ in range(2):
        call(*given())
    assert float(model.calls) == 2.0
    assert operators(graphs) == [STEPS]


def scores(m, q, u):
    return m.V(torch.tanh(m.W(q) + u)).squeeze(2)


def weigh(scores, values):
    return scores.softmax(1).unsqueeze(1) @ values


READ = {
    "sum_in_place": lambda m, q, k: [(u := m.U(k)).view(-1), m.V(u.add_(m.W(q)).tanh()).softmax(1)],
    "tanh_in_place": lambda m, q, k: [x := m.W(q) + m.U(k), m.V(x.tanh_()).softmax(1)],
    "masked": lambda m, q, k: [s := scores(m, q, k), weigh(s.masked_fill_(k[..., 0] < 0, -1e9), k)],
    "relu_in_place": lambda m, q, k: weigh(scores(m, q, u := m.U(k)), F.relu(u, inplace=True)),
    "out": lambda m, q, k: weigh(scores(m, q, u := m.U(k).detach()), torch.mul(u, 2, out=u)),
    "second": lambda m, q, k: weigh(scores(m, c := weigh(scores(m, q, k), k), k), k) + c,
}


@pytest.mark.parametrize("name", READ)
def test_what_is_written_to_or_returned_is_there(name):
    module = nn.ModuleDict({"W": nn.Linear(6, 6), "U": nn.Linear(6, 6), "V": nn.Linear(6, 1)})
    both = torch.compile(READ[name], backend=recording([])), READ[name]
    for n in (2, 8, 20):
        x = [torch.randn(n, t, 6, requires_grad=True) for t in (1, 9)]
        same(*(results(partial(each, module, *x), x, module) for each in both))


@pytest.mark.parametrize("rewrites", [None, 0, 1])
def test_a_rewrite_that_fails_leaves_the_graph_before_it(rewrites, monkeypatch):
    """After some rewrites, or before any, where the graph cannot even be noted."""
    left, model, graphs = iter([True] * (rewrites or 0)), speller(), []
    insert = rewrite.Rewriter.insert
    if rewrites is None:
        monkeypatch.setattr(rewrite, "GraphNotes", None)
    monkeypatch.setattr(rewrite.Rewriter, "insert", lambda *x: next(left) and insert(*x))
    same(torch.compile(model, backend=recording(graphs, "eager"))(*given()), model(*given()))
    assert operators(graphs) == [rewrites or 0]


def test_a_trial_is_no_part_of_what_the_user_does():
    def compiler(graph, inputs):
        before = torch.random.get_rng_state(), state()
        with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
            made = fuse_graph(graph, inputs)
        assert made is not graph
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert state() == before[1]
        return made

    torch.compile(speller(), backend=compiler)(*given())
