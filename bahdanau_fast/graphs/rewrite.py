"""Pieces of a graph become operators: found, proved and replaced, one after the other."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bahdanau_fast.graphs.attend import NotServed
from bahdanau_fast.graphs.caches import Shared
from bahdanau_fast.graphs.find import activates_sum, is_pooling
from bahdanau_fast.graphs.graph import ACTIVATIONS, Graph, Ref, require, tree_map
from bahdanau_fast.graphs.notes import GraphNotes
from bahdanau_fast.graphs.piece import Piece
from bahdanau_fast.graphs.plan import FusedPlan, find_plan
from bahdanau_fast.graphs.prove import isolated, prove


class Rewriter:
    """A graph in which pieces become operators: :meth:`find` and :meth:`insert` them in turn."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], shared: Shared) -> None:
        self.module, self.shared = _sizes_from_inputs(graph), shared
        self.notes = GraphNotes(self.module, inputs)
        self._proved: set[Any] = set()
        self._graph: fx.Graph | None = None  # a copy with operators in it
        self._consistent = True  # no insertion has failed half way

    def activations(self) -> list[int]:
        """Calls that activate a sum, or what scores of pooling are of."""
        graph = self.notes.graph
        nodes = enumerate(graph.nodes)
        sums = [i for i, n in nodes if n.name in ACTIVATIONS]
        with isolated(torch.device("cpu")):
            return [i for i in sums if activates_sum(graph, i)[0] or is_pooling(graph, i)]

    def source(self, anchor: int) -> str:
        """File and line of the user's code."""
        return self.notes.graph.nodes[anchor].source

    def find(self, anchor: int, eager: bool) -> tuple[Piece, FusedPlan]:
        """The piece around an activation, and its plan, proved."""
        graph = self.notes.graph
        device = graph.values[graph.nodes[anchor].out[0]].device
        with isolated(device):
            # Whether a mask is of truths is tested where that costs no wait.
            checked = eager and device.type == "cpu"
            piece, plan, sizes = find_plan(graph, anchor, self.shared, checked)
            signature = plan.text, _signature(graph, sorted({*piece.deferred, piece.end}))
            if signature not in self._proved:  # steps of a loop have the same one
                prove(graph, piece, sizes)
                self._proved.add(signature)
        return piece, plan

    def rewritten(self) -> fx.GraphModule:
        """The graph with what was put into it; as it came where nothing was."""
        if self._graph is None:
            return self.module
        require(self._consistent, "a piece was put in half")
        self._graph.lint()
        for node in self._graph.find_nodes(op="placeholder"):
            node.meta.pop("grapharg", None)  # which holds a tensor of the user's
        return fx.GraphModule(self.module, self._graph)

    def insert(self, piece: Piece, plan: FusedPlan, traced: fx.Graph | None = None) -> None:
        """The operator in place of a piece, in a copy of the graph."""
        notes = self.notes
        if self._graph is None:
            self._graph = copy.deepcopy(self.module.graph)
            copied = dict(zip(self.module.graph.nodes, self._graph.nodes, strict=True))
            notes.calls = [copied[node] for node in notes.calls]
            notes.makers = {number: copied[node] for number, node in notes.makers.items()}
        new, calls, nodes = self._graph, notes.calls, notes.makers
        self._consistent = False
        fused, outs = {*piece.deferred, piece.end}, piece.outputs
        results: Any
        with new.inserting_before(calls[piece.insert_before]):
            inputs = [nodes[number] for number in plan.inputs]
            if piece.unconditional and not piece.assumed_binary:
                source = plan.graph if traced is None else traced
                copies = dict(zip(source.find_nodes(op="placeholder"), inputs, strict=True))
                results = new.graph_copy(source, copies)
            else:
                either = _Either(plan, [calls[i] for i in sorted(fused)], [nodes[v] for v in outs])
                both = new.call_function(either, (*inputs, *either.inputs))
                results = [new.call_function(operator.getitem, (both, i)) for i in range(len(outs))]
        stay = _calls_that_stay(notes.graph, piece)
        gone = [calls[i] for i in sorted(fused - stay)]
        for number, out in zip(outs, results, strict=False):
            nodes[number].replace_all_uses_with(out, lambda user: user not in gone)
            out.meta["example_value"] = nodes[number].meta.get("example_value")
            nodes[number] = out
        last = results[-1]
        for i in sorted(stay):  # views of the weights come after them
            last.append(calls[i])
            last = calls[i]
        for call in reversed(gone):
            if not call.users:
                new.erase_node(call)
        self._consistent = True


def _sizes_from_inputs(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with calls of ``size`` replaced by inputs that are such a size."""
    if not module.graph.find_nodes(op="call_method", target="size"):
        return module
    graph = copy.deepcopy(module.graph)
    symbols = {
        str(node.meta["example_value"]): node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("example_value"), torch.SymInt)
    }

    def read(value: Any) -> Any:
        return value if isinstance(value, int) else symbols[str(value)]

    for node in graph.find_nodes(op="call_method", target="size"):
        value = node.meta.get("example_value")
        whole = isinstance(value, (tuple, list))
        try:
            sizes = [*map(read, value)] if whole else read(value)
        except KeyError:
            continue
        for user in [*node.users]:
            if whole and user.target is operator.getitem and isinstance(user.args[1], int):
                part = sizes[user.args[1]]
                for other in [*user.users]:
                    _replace(other, user, part)
            else:
                _replace(user, node, sizes)
        for unused in (*[u for u in node.users if not u.users], node):
            if not unused.users:
                graph.erase_node(unused)
    return fx.GraphModule(module, graph)


def _replace(user: fx.Node, old: fx.Node, new: Any) -> None:
    """Another argument, a node or sizes, in place of a node."""
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: new if n is old else n)
    user.args, user.kwargs = args, kwargs


def _calls_that_stay(graph: Graph, piece: Piece) -> set[int]:
    """The calls that make views of the weights for others, and what these are views of."""
    stay, todo = set[int](), [*piece.weight_views]
    while todo:
        i = todo.pop()
        if i not in stay:
            stay.add(i)
            makers = [graph.values[v].maker for v in graph.nodes[i].refs if v != piece.weights]
            todo += [j for j in makers if j in piece.deferred]
    return stay


class _Either:
    """A piece by the operator, or as it was written where the operator does not serve it."""

    def __init__(self, plan: FusedPlan, calls: list[fx.Node], outs: list[fx.Node]) -> None:
        self.__name__ = "either"
        plain, copies, self.inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()

        def copy_of(node: fx.Node) -> fx.Node:
            """A call, a part of its result, or an input."""
            if node not in copies:
                part = node.target is operator.getitem and node.args[0] in calls
                if node in calls or part:
                    copies[node] = plain.node_copy(node, copy_of)
                else:
                    self.inputs.insert(0, node)
                    with plain.inserting_before(next(iter(plain.nodes), None)):
                        copies[node] = plain.placeholder(f"x{len(self.inputs)}")
            return copies[node]

        for call in calls:
            copy_of(call)
        plain.output(tuple(copies[node] for node in outs))
        self._plain: Any = fx.GraphModule({}, plain).forward
        self._fused, self._n = plan.run, len(plan.inputs)

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self._fused(*inputs[: self._n])
        except NotServed:
            return self._plain(*inputs[self._n :])


def _signature(graph: Graph, calls: list[int]) -> Any:
    """What is equal for calls that compute the same on other tensors."""
    aliases: dict[int, int] = {}

    def alias(x: Any) -> Any:
        return f"#{aliases.setdefault(x, len(aliases))}" if type(x) is Ref else x

    nodes = [graph.nodes[i] for i in calls]
    texts = [repr((n.name, tree_map(alias, (n.args, n.kwargs)), n.state)) for n in nodes]
    values = [graph.values[v] for v in aliases]
    kinds = [(v.dtype, v.device, v.requires_grad, v.shape, v.constant) for v in values]
    return tuple(texts), tuple(kinds)
