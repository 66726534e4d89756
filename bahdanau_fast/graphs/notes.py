"""Notes of calls: of a graph that ``torch.compile`` captured, or of a first call while it runs."""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from bahdanau_fast.graphs.graph import ACTIVATIONS, SIZED, Graph, Node, Ref, mapped, state, tensors

__all__ = ["GraphNotes", "Recorder", "writes"]

_HERE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_IN_PLACE = {f"i{name}" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift", "matmul",
)}  # fmt: skip
_NAMES = {"_get_data_attr": "detach"}
# What asks for no values.
_QUERIES = {
    *("size", "dim", "numel", "__len__", "__hash__", "stride", "is_floating_point"),
    *("shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "is_contiguous"),
}  # fmt: skip


class GraphNotes:
    """A graph of ``torch.fx`` as one of ours.

    Attributes:
        graph: the notes; the last call is what the graph returns, a reader of all of that.
        calls: the node of each call.
        made: the node of each tensor, by number.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.graph = Graph()
        self.calls: list[fx.Node] = []
        self.made: dict[int, fx.Node] = {}
        self._numbers: dict[Any, Any] = {}
        inputs, now, inside = iter(example_inputs), state(), 0
        for node in module.graph.find_nodes(op="placeholder"):
            for n in getattr(node.meta.get("example_value"), "shape", ()):
                if str(n).partition(" - s")[0].isdigit():
                    int(n)  # a guard: joined with others, it is as wide as a weight
        for node in module.graph.find_nodes(op="call_function", target=operator.setitem):
            shapes = [getattr(_example(x), "shape", ()) for x in node.args[:2]]
            for a, b in zip(*shapes, strict=False):
                bool(a == b)  # a guard: sizes of a mask are those of what it hides
        for node in module.graph.nodes:
            value = node.meta.get("example_value", node.meta.get("val"))
            if node.op in ("get_attr", "placeholder"):
                fixed = node.op == "get_attr"
                held = getattr(module, node.target, None) if fixed else next(inputs, None)
                value = held if value is None else value
                constant = fixed or isinstance(value, nn.Parameter)
                self._numbers[node] = self._number(value, None, constant, held)
            elif node.op in ("call_function", "call_method", "output"):
                name = str(getattr(node.target, "__name__", node.target))
                if name == "_set_grad_enabled":
                    now = now._replace(grad=bool(node.args[0]))
                inside += (name == "_enter_autocast") - (name == "_exit_autocast")
                self._numbers[node] = self._call(node, name, value, now, inside > 0)
            if type(self._numbers.get(node)) is Ref:
                self.made.setdefault(self._numbers[node], node)

    def _number(self, value: Any, maker: int | None, constant: bool, held: Any = None) -> Any:
        """Numbers of the tensors that a node gives; the value itself where that is none."""
        if isinstance(value, Tensor):
            return self.graph.add(value, maker, held, constant)
        if isinstance(value, (tuple, list)):
            return tuple(self._number(each, maker, constant) for each in value)
        return self.graph.size(value) if isinstance(value, torch.SymInt) else value

    def _call(self, node: Any, name: str, value: Any, now: Any, changed: bool) -> Any:
        graph, numbers, at = self.graph, self._numbers, len(self.graph.nodes)
        args, kwargs = (
            mapped(lambda x: numbers.get(x) if isinstance(x, fx.Node) else x, part)
            for part in (node.args, node.kwargs)
        )
        if name == "getitem" and type(args[0]) is tuple:
            return args[0][args[1]]
        name = _NAMES.get(name, name)
        wrote_to = writes(node.target, name, args, kwargs)
        if not wrote_to and args and args[-1] is True:  # as of relu
            first = node.all_input_nodes[:1]
            same = any(value is each.meta.get("example_value") for each in first)
            wrote_to = [args[0]] * same
        written = wrote_to[0] if len(wrote_to) == 1 else None
        target = node.kwargs.get("out", node.args[0] if node.args else None)
        if name == "setitem" and type(written) is Ref:
            value = target.meta.get("example_value")  # it returns nothing
        found = self._number(value, at, graph.constant(tensors((args, kwargs))))
        wrote = tuple((ref, ref) for ref in tensors(wrote_to))
        if type(written) is type(found) is Ref and written == self._numbers.get(target):
            wrote = ((written, found),)
            numbers[target] = found
        if name == "setitem" and type(found) is Ref:
            self.made[found] = target
        func = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        out, single = tuple(tensors([found])), type(found) is Ref and name != "setitem"
        # A number that is computed may be another one in another call.
        numeric = not all(tensors(numbers.get(each)) for each in node.all_input_nodes)
        changed |= numeric and name.strip("_") not in SIZED
        name, place = name.strip("_"), _line(node) if name.strip("_") in ACTIVATIONS else ""
        graph.append(Node(func, name, args, kwargs, out, wrote, single, now, changed, place))
        self.calls.append(node)
        return found


def _example(node: Any) -> Any:
    """What a compiler knows of the value of a node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _line(node: fx.Node) -> str:
    """File and line of the user's code that made a node."""
    lines = [each.strip() for each in (node.stack_trace or "").splitlines()]
    for words in [each.split('"') for each in lines[::-1] if each.startswith("File")]:
        path = Path(words[1])
        if not path.is_relative_to(_TORCH) and not path.is_relative_to(_HERE):
            return f"{Path(words[1]).name}:{words[2].split()[2].rstrip(',')}"
    return ""


def writes(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a function may write to, by its schema or its name."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = func.default if hasattr(func, "default") else getattr(func, func.overloads()[0])
    schema = getattr(getattr(func, "_opoverload", func), "_schema", None)
    if schema is not None:
        infos = [x for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        places = {x.name: i for i, x in enumerate(schema.arguments)}
        named = [(x.name, places[x.name]) for x in infos]
        return [kwargs[n] if n in kwargs else [*args, *[None] * 9][i] for n, i in named]
    if "out" in kwargs:
        return [kwargs["out"]]
    in_place = name.endswith("_") != name.endswith("__") or name in ("setitem", "__setitem__")
    in_place |= name in _IN_PLACE or name.strip("_") in _IN_PLACE
    in_place |= bool(kwargs.get("inplace"))
    first = args[:1] if in_place else ()
    return [*first[0]] if first and isinstance(first[0], (list, tuple)) else [*first]


class Recorder(TorchFunctionMode):
    """Notes what is called inside, of tensors their kinds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.spans = Graph(), []  # type: ignore[var-annotated]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, self.graph
        name = str(getattr(func, "__name__", ""))
        if name == "__get__":  # of an attribute
            name = {"data": "detach"}.get(func.__self__.__name__, func.__self__.__name__)
        if name in _QUERIES:
            return func(*args, **kwargs)
        at, before = len(graph.nodes), state()
        noted = mapped(lambda x: self.number(x) if isinstance(x, Tensor) else x, (args, kwargs))
        result = func(*args, **kwargs)
        refs = tensors(noted)
        wrote_to = tensors(writes(func, name, args, kwargs))
        wrote = tuple((self.number(t), graph.add(t, at)) for t in wrote_to)
        constant = graph.constant(refs)
        found = tensors(result) if isinstance(result, (Tensor, tuple, list)) else []
        out = [n for _, n in wrote] if name == "__setitem__" else []
        known = [(t, graph.find(t)) for t in found]
        out += [graph.add(t, at, constant=constant) if n is None else n for t, n in known]
        place = _place() if name.strip("_") in ACTIVATIONS else ""
        single = isinstance(result, Tensor)
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        name, (args, kwargs) = name.strip("_"), noted
        graph.append(
            Node(func, name, args, kwargs, tuple(out), wrote, single, before, hooked, place)
        )
        return result

    def number(self, x: Tensor) -> Ref:
        """The number of a tensor, an old or a new one."""
        known = self.graph.find(x)
        return self.graph.add(x, constant=isinstance(x, nn.Parameter)) if known is None else known


def _place() -> str:
    """File and line of the user's code that is running."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_HERE) and not path.is_relative_to(_TORCH):
            return f"{path.name}:{line}"
    return ""
