"""Additive attention in the graphs of ``torch.compile``, by the finder that serves eager code.

``torch.compile(model, backend="bahdanau_fast")`` hands graphs to inductor with the fused operator
in them; :func:`fuse_graph` is the rewrite alone, for who composes backends. The graph is read, not
run: sizes are its own symbols, and what is tried is tried on small tensors of our own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from bahdanau_fast.fuse.caches import NoCaches
from bahdanau_fast.fuse.find import summed
from bahdanau_fast.fuse.graph import ACTIVATIONS, SIZED, Graph, Node, Ref, mapped, state, tensors
from bahdanau_fast.fuse.plan import find_plan
from bahdanau_fast.fuse.probe import small_sizes
from bahdanau_fast.fuse.prove import apart, as_before, prove

__all__ = ["backend", "fuse_graph"]

_IN_PLACE = {f"i{name}": f"__i{name}__" for name in ("add", "sub", "mul", "truediv")}


def fuse_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph with additive attention as the fused operator; the same one where it has none.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise; read where the graph does not say what its inputs are.
    """
    made = graph
    with contextlib.suppress(Exception):  # whatever fails, the graph before it is used
        notes = _Notes(graph, example_inputs)
        for at, node in enumerate(notes.graph.nodes):
            if node.name in ACTIVATIONS and summed(notes.graph, at)[0]:
                with contextlib.suppress(Exception):  # it is left
                    made = _fused(made, notes, at)
    return made


class _Notes:
    """A graph of ``torch.fx`` as one of ours."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.graph = Graph()
        self.calls: list[fx.Node] = []  # the node of each call
        self.made: dict[int, fx.Node] = {}  # the node of each tensor, by number
        self.numbers: dict[Any, Any] = {}
        inputs, now, inside = iter(example_inputs), state(), 0
        for node in module.graph.find_nodes(op="placeholder"):
            for n in getattr(node.meta.get("example_value"), "shape", ()):
                if str(n).partition(" - s")[0].isdigit():
                    int(n)  # a guard: joined with others, it is as wide as a weight
        for node in module.graph.nodes:
            value = node.meta.get("example_value", node.meta.get("val"))
            held = node.op == "get_attr"
            if held or node.op == "placeholder":
                given = getattr(module, node.target, None) if held else next(inputs, None)
                value = given if value is None else value
                constant = held or isinstance(value, nn.Parameter)
                self.numbers[node] = self.number(value, None, constant)
            elif node.op in ("call_function", "call_method", "output"):
                name = str(getattr(node.target, "__name__", node.target))
                if name == "_set_grad_enabled":
                    now = now._replace(grad=bool(node.args[0]))
                inside += (name == "_enter_autocast") - (name == "_exit_autocast")
                self.numbers[node] = self.call(node, name, value, now, inside > 0)
            if type(self.numbers.get(node)) is Ref:
                self.made.setdefault(self.numbers[node], node)

    def number(self, value: Any, maker: int | None, constant: bool) -> Any:
        """Numbers of the tensors that a node gives; the value itself where that is none."""
        if isinstance(value, Tensor):
            return self.graph.add(value, maker, False, constant)
        if isinstance(value, (tuple, list)):
            return tuple(self.number(each, maker, constant) for each in value)
        return self.graph.size(value) if isinstance(value, torch.SymInt) else value

    def call(self, node: fx.Node, name: str, value: Any, now: Any, changed: bool) -> Any:
        graph, numbers, at = self.graph, self.numbers, len(self.graph.nodes)
        args, kwargs = (
            mapped(lambda x: numbers.get(x) if isinstance(x, fx.Node) else x, part)
            for part in (node.args, node.kwargs)
        )
        if name == "getitem" and type(args[0]) is tuple:
            return args[0][args[1]]
        name = _IN_PLACE.get(name, name)
        in_place = name.endswith("_") != name.endswith("__")
        in_place |= name in ("setitem", *_IN_PLACE.values())
        if kwargs.get("inplace") or (len(args) > 1 and args[-1] is True):  # as of relu
            first = node.all_input_nodes[:1]
            in_place |= any(value is each.meta.get("example_value") for each in first)
        found = self.number(value, at, graph.constant(tensors((args, kwargs))))
        written = kwargs.get("out", args[0] if in_place else None)
        wrote = tuple((ref, ref) for ref in tensors([written]))
        if type(written) is type(found) is Ref:
            wrote = ((written, found),)
            numbers[node.kwargs.get("out", node.args[0])] = found
        func = getattr(Tensor, name) if node.op == "call_method" else node.target
        out, single = tuple(tensors([found])), type(found) is Ref
        # A number that is computed may be another one in another call.
        numeric = not all(tensors(numbers.get(each)) for each in node.all_input_nodes)
        changed |= numeric and name.strip("_") not in SIZED
        graph.append(Node(func, name.strip("_"), args, kwargs, out, wrote, single, now, changed))
        self.calls.append(node)
        return found


def _fused(module: fx.GraphModule, notes: _Notes, at: int) -> fx.GraphModule:
    """A copy with the operator in place of the piece around an activation."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph, sizes = notes.graph, small_sizes(notes.graph, at)
    with apart(graph, at):
        piece, made = find_plan(graph, at, sizes, range(len(graph.nodes)))
        prove(graph, piece, sizes, None)
        # A graph keeps nothing between calls.
        function = functools.partial(made.run, NoCaches(), lambda w: w)
        trace = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)
        # The route of compiled code: no size decides.
        compiling = mock.patch.object(torch.compiler, "_is_compiling_flag", True)
        with as_before(graph.nodes[at].state), compiling:
            traced = trace(*[graph.values[number].tensor for number in made.inputs])
    new = copy.deepcopy(module.graph)
    copied = dict(zip(module.graph.nodes, new.nodes, strict=True))
    calls = [copied.get(node, node) for node in notes.calls]
    nodes = {number: copied.get(node, node) for number, node in notes.made.items()}
    inputs = [nodes[number] for number in made.inputs]
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with new.inserting_before(calls[piece.end]):
        outs: Any = new.graph_copy(traced.graph, copies)
    own = [calls[i] for i in sorted({*piece.late, piece.end})]
    wanted: Any = [piece.scores] if piece.context is None else [piece.context, piece.weights]
    for number, out in zip(wanted, outs, strict=False):
        nodes[number].replace_all_uses_with(out, lambda user: user not in own)
        out.meta["example_value"] = nodes[number].meta.get("example_value")
        nodes[number] = out
    for call in reversed(own):
        if not call.users:
            new.erase_node(call)
    new.lint()
    rewritten = fx.GraphModule(module, new)
    notes.calls, notes.made = calls, nodes
    return rewritten


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, with the fused operator in the graph. A backend for ``torch.compile``.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise.
        options: of inductor.
    """
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(fuse_graph(graph, example_inputs), example_inputs, **options)
    return made
