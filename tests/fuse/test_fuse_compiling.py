"""``torch.compile(model, backend=...)`` with additive attention as the operator in the graph."""

import copy

import pytest
import torch
import whole
from torch import nn
from torch._dynamo import lookup_backend

from bahdanau_fast.fuse.compiling import backend, fuse_graph

ATTENTION = torch.ops.bahdanau_fast.attention.default


class Looping(nn.Module):
    """A decoder with the formula in its own loop."""

    def __init__(self, steps=2):
        super().__init__()
        self.steps, self.cell = steps, nn.GRUCell(6, 8)
        self.W, self.U, self.v = nn.Linear(8, 16), nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, state, memory, pad):
        states, keys = [], self.U(memory)
        for _ in range(self.steps):
            scores = self.v(torch.tanh(self.W(state).unsqueeze(1) + keys)).squeeze(-1)
            weights = scores.masked_fill(pad, float("-inf")).softmax(-1)
            state = self.cell(torch.bmm(weights.unsqueeze(1), memory).squeeze(1), state)
            states.append(state)
        return torch.stack(states, 1)


@pytest.fixture(autouse=True)
def afresh(threads):
    threads(1)
    torch.compiler.reset()


def given():
    torch.manual_seed(1)
    state, memory = torch.randn(4, 8, requires_grad=True), torch.randn(4, 9, 6, requires_grad=True)
    return state, memory, whole.is_padding(torch.tensor([9, 2, 5, 1]), 9)


def results(model, call, inputs):
    """Outputs, and gradients of parameters and inputs."""
    out = call(*inputs)
    wanted = [*model.parameters(), *(x for x in inputs if x.requires_grad)]
    return [out, *torch.autograd.grad(out, wanted, torch.cos(out.detach()))]


def recording(graphs):
    """A backend that keeps graphs as they came and as they were rewritten."""

    def compiler(graph, inputs):
        made = fuse_graph(graph, inputs)
        graphs.append((graph, made))
        return lookup_backend("aot_eager")(made, inputs)

    return compiler


def targets(graph):
    return [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("by", ["graph", "backend"])
def test_a_decoder_computes_the_same(by):
    torch.manual_seed(0)
    model, graphs = Looping(), []
    other = copy.deepcopy(model)
    call = torch.compile(model, backend=recording(graphs) if by == "graph" else backend)
    for got, want in zip(
        results(model, call, given()), results(other, other, given()), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    if by == "graph":
        assert [targets(made).count(ATTENTION) for _, made in graphs] == [model.steps]


def test_a_model_without_attention_keeps_its_graph():
    graphs, model = [], nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Softmax(1))
    x = torch.randn(4, 9, 6)
    found = torch.compile(model, backend=recording(graphs))(x)
    torch.testing.assert_close(found, model(x))
    assert len(graphs) == 1
    assert all(made is graph for graph, made in graphs)


class Halving(Looping):
    """Writes to its state."""

    def forward(self, state, memory, pad):
        return super().forward(state.mul_(0.5), memory, pad)


def test_nothing_runs_while_it_compiles_and_sizes_are_symbols():
    torch.manual_seed(0)
    graphs, model = [], Halving()
    call = torch.compile(model, backend=recording(graphs), dynamic=True)
    other, told = copy.deepcopy(model), []
    with torch.no_grad():
        for n in (4, 6, 11):
            for each in (call, other):
                torch.manual_seed(n)
                state, memory = torch.randn(n, 8), torch.randn(n, 9, 6)
                told.append(each(state, memory, torch.zeros(n, 9, dtype=torch.bool)))
            torch.testing.assert_close(*told[-2:], rtol=1e-5, atol=1e-6)
    assert [targets(made).count(ATTENTION) for _, made in graphs] == [model.steps]


class Counting(Looping):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *given):
        self.calls.add_(1)
        return super().forward(*given)


def test_what_a_graph_writes_to_is_written_to():
    model, graphs = Counting(), []
    call = torch.compile(model, backend=recording(graphs))
    for _ in range(2):
        call(*given())
    assert float(model.calls) == 2.0
    assert ATTENTION in targets(graphs[0][1])
