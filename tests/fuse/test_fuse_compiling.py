"""``torch.compile(model, backend=...)`` with additive attention as the operator in the graph."""

import copy
from functools import partial

import pytest
import torch
from beside import results, same
from torch import nn
from torch._dynamo import lookup_backend
from whole import Speller

from bahdanau_fast.fuse.compiling import backend, fuse_graph

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


def recording(graphs):
    """A backend that keeps graphs as they came and as they were rewritten."""

    def compiler(graph, inputs):
        made = fuse_graph(graph, inputs)
        graphs.append((graph, made))
        return lookup_backend("aot_eager")(made, inputs)

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
    call = torch.compile(model, backend=recording(graphs), dynamic=True)
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
