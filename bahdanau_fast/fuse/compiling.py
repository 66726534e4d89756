"""Additive attention in the graphs of ``torch.compile``, by the finder that serves eager code.

``torch.compile(model, backend="bahdanau_fast")`` hands graphs to inductor with the fused operator
in them; :func:`fuse_graph` is the rewrite alone, for who composes backends. The graph is read, not
run: sizes are its own symbols, and what is tried is tried on small tensors of our own.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from bahdanau_fast.fuse.caches import Caches
from bahdanau_fast.fuse.find import find, summed
from bahdanau_fast.fuse.graph import (
    ACTIVATIONS,
    Graph,
    Left,
    Node,
    Ref,
    mapped,
    name_of,
    need,
    state,
    tensors,
)  # fmt: skip
from bahdanau_fast.fuse.plan import Dim, plan
from bahdanau_fast.fuse.probe import small_sizes
from bahdanau_fast.fuse.prove import prove

__all__ = ["backend", "fuse_graph"]

_IN_PLACE = {f"i{name}": f"__i{name}__" for name in ("add", "sub", "mul", "truediv")}


def fuse_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph with additive attention as the fused operator; the same one where it has none.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise; read where the graph does not say what its inputs are.
    """
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    notes = _Notes(made, example_inputs)
    fused = False
    for at, node in enumerate(notes.graph.nodes):
        if node.name in ACTIVATIONS and summed(notes.graph, at)[0]:
            try:
                _fuse(made, notes, at)
                fused = True
            except (Left, RuntimeError, KeyError):
                continue
    if not fused:
        return graph
    made.recompile()
    return made


class _Notes:
    """A graph of ``torch.fx`` as one of ours.

    Attributes:
        calls: the node of each call.
        made: the node of each tensor, by number, and its place in what that node gives.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.graph = Graph()
        self.calls: list[fx.Node] = []
        self.made: dict[int, tuple[fx.Node, int | None]] = {}
        self.numbers: dict[fx.Node, Any] = {}
        inputs, now, inside = iter(example_inputs), state(), 0
        for node in module.graph.nodes:
            value = node.meta.get("example_value", node.meta.get("val"))
            if node.op == "placeholder":
                given = next(inputs, None)
                value = given if value is None else value
                constant = isinstance(value, nn.Parameter)
                self.numbers[node] = self.add(node, value, None, constant)
            elif node.op == "get_attr":
                held = getattr(module, node.target, None) if "." not in node.target else None
                self.numbers[node] = self.add(node, held if value is None else value, None, True)
            elif node.op in ("call_function", "call_method"):
                name = name_of(node.target) if node.op == "call_function" else node.target
                if name == "_set_grad_enabled":
                    now = now._replace(grad=bool(node.args[0]))
                inside += (name == "_enter_autocast") - (name == "_exit_autocast")
                self.call(node, _IN_PLACE.get(name, name), value, now, inside > 0)

    def add(self, node: fx.Node, value: Any, maker: int | None, constant: bool) -> Any:
        """Numbers of what a node gives; the value itself where that is no tensor."""
        if isinstance(value, Tensor):
            number = self.graph.add(value, maker, False, constant)
            self.made[number] = node, None
            return number
        if isinstance(value, (tuple, list)):
            numbers = [self.add(node, each, maker, constant) for each in value]
            self.made.update({n: (node, i) for i, n in enumerate(numbers) if type(n) is Ref})
            return tuple(numbers)
        return value.node.hint if isinstance(value, torch.SymInt) else value

    def call(self, node: fx.Node, name: str, value: Any, now: Any, changed: bool) -> None:
        graph, numbers = self.graph, self.numbers
        first: Any = node.args[0] if node.args else None
        if name == "getitem" and type(numbers.get(first)) is tuple:
            numbers[node] = numbers[first][node.args[1]]
            return
        args, kwargs = (
            mapped(lambda x: numbers[x] if isinstance(x, fx.Node) else x, part)
            for part in (node.args, node.kwargs)
        )
        at = len(graph.nodes)
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or name == "setitem" or name in _IN_PLACE.values()
        writes = in_place and type(numbers.get(first)) is Ref
        constant = graph.constant(tensors((args, kwargs)))
        found = None if value is None else self.add(node, value, at, constant)
        numbers[node] = found
        wrote: tuple[tuple[int, int], ...] = ()
        if writes:
            wrote = ((numbers[first], found if type(found) is Ref else numbers[first]),)
            numbers[first] = wrote[0][1]
        func = getattr(Tensor, name) if node.op == "call_method" else node.target
        out, single = tuple(tensors([found])), type(found) is Ref
        graph.append(Node(func, name, args, kwargs, out, wrote, single, now, changed))
        self.calls.append(node)


def _fuse(module: fx.GraphModule, notes: _Notes, at: int) -> None:
    """Put the operator in place of the piece around an activation."""
    graph = notes.graph
    sizes = small_sizes(graph, at)
    piece = find(graph, at, sizes, range(len(graph.nodes)))
    symbols = _symbols(graph)
    prove(graph, piece, sizes, None)
    made = plan(graph, piece, sizes, lambda n: symbols.get(sizes.full(n), (sizes.full(n),))[0])
    places = [symbols[int(dim)][1] for dim in made.dims]
    given: list[Any] = [graph.values[number].tensor for number in made.inputs]
    given += [graph.values[number].tensor.shape[axis] for number, axis in places]  # type: ignore[union-attr]
    from torch.fx.experimental.proxy_tensor import make_fx

    trace = make_fx(
        lambda *inputs: made.run(_NoCaches(), lambda w: w, *inputs),
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
    )
    # The route of compiled code: no size decides.
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        traced = trace(*given)
    end = notes.calls[piece.end]
    with module.graph.inserting_before(end):
        inputs = [_node(module, notes, number) for number in made.inputs]
        for number, axis in places:
            of = _node(module, notes, number), axis
            inputs.append(module.graph.call_function(torch.ops.aten.sym_size.int, of))
        names = [node for node in traced.graph.nodes if node.op == "placeholder"]
        copies = dict(zip(names, inputs, strict=True))
        outs: Any = module.graph.graph_copy(traced.graph, copies)
    results = {piece.context if piece.context is not None else piece.scores: outs[0]}
    if piece.weights is not None:
        results[piece.weights] = outs[1]
    own = [notes.calls[i] for i in sorted({*piece.late, piece.end})]
    for number, new in results.items():
        node, _ = notes.made[number]
        node.replace_all_uses_with(new, lambda user: user not in own)
        new.meta["example_value"] = node.meta.get("example_value")
    for call in reversed(own):
        if not call.users:
            module.graph.erase_node(call)


class _NoCaches(Caches):
    """A graph keeps nothing between calls."""

    def _cache(self, vector: Tensor, w_k: Tensor | None) -> None:
        return None


def _symbols(graph: Graph) -> dict[int, tuple[Dim, tuple[int, int]]]:
    """Of each size that is a symbol: its name in a plan, and a tensor and an axis that have it."""
    found: dict[int, tuple[Dim, tuple[int, int]]] = {}
    exprs: dict[int, str] = {}
    for number, value in enumerate(graph.values):
        for axis, n in enumerate(value.tensor.shape):  # type: ignore[union-attr]
            if isinstance(n, torch.SymInt):
                hint = value.shape[axis]
                need(
                    exprs.setdefault(hint, str(n)) == str(n), "two of its sizes are equal by chance"
                )
                if hint not in found:
                    found[hint] = Dim(hint, f"n{hint}"), (number, axis)
    return found


def _node(module: fx.GraphModule, notes: _Notes, number: int) -> fx.Node:
    node, place = notes.made[number]
    return node if place is None else module.graph.call_function(operator.getitem, (node, place))


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
