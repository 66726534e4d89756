"""Graphs of calls: one that ``torch.compile`` captured, or one recorded while the calls run."""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from bahdanau_fast import checks
from bahdanau_fast.graphs.graph import (
    ACTIVATIONS,
    SIZED,
    Graph,
    Node,
    Ref,
    state,
    tensors,
    tree_map,
)

_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_OURS = _PACKAGE / "ops"
_IN_PLACE = {f"i{name}" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift", "matmul",
)}  # fmt: skip
_NAMES = {"_get_data_attr": "detach"}
# Functions that read no values of a tensor.
_QUERIES = {
    *("size", "dim", "numel", "__len__", "__hash__", "stride", "is_floating_point"),
    *("shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "is_contiguous"),
}  # fmt: skip


class GraphNotes:
    """A graph of ``torch.fx`` as a :class:`Graph`.

    Attributes:
        graph: its last call reads all that the graph returns.
        calls: the fx node of each call.
        makers: the fx node of each tensor, by number.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.graph = Graph()
        self.calls: list[fx.Node] = []
        self.makers: dict[int, fx.Node] = {}
        self._refs: dict[Any, Any] = {}
        inputs, current, inside = iter(example_inputs), state(), 0
        self._axis_less: dict[fx.Node, Tensor] = {}  # their examples have got the axis already
        for node in reversed(module.graph.find_nodes(op="call_method", target="unsqueeze_")):
            x = self._axis_less.get(node, _example(node))
            self._axis_less[node.args[0]] = x.squeeze(*node.args[1:], **node.kwargs)
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
            value = self._axis_less.get(node, value)
            if node.op in ("get_attr", "placeholder"):
                fixed = node.op == "get_attr"
                data = getattr(module, node.target, None) if fixed else next(inputs, None)
                value = data if value is None else value
                constant = fixed or isinstance(value, nn.Parameter)
                self._refs[node] = self._ref(value, None, constant, data)
            elif node.op in ("call_function", "call_method", "output"):
                name = str(getattr(node.target, "__name__", node.target))
                if name == "_set_grad_enabled":
                    current = current._replace(grad=bool(node.args[0]))
                inside += (name == "_enter_autocast") - (name == "_exit_autocast")
                self._refs[node] = self._call(node, name, value, current, inside > 0)
            if type(self._refs.get(node)) is Ref:
                self.makers.setdefault(self._refs[node], node)

    def _ref(self, value: Any, maker: int | None, constant: bool, data: Any = None) -> Any:
        """Numbers of the tensors that a node gives; the value itself where that is none."""
        if isinstance(value, Tensor):
            return self.graph.add(value, maker, data, constant)
        if isinstance(value, (tuple, list)):
            return tuple(self._ref(item, maker, constant) for item in value)
        return self.graph.size(value) if isinstance(value, torch.SymInt) else value

    def _call(self, node: Any, name: str, value: Any, current: Any, pinned: bool) -> Any:
        graph, refs, maker = self.graph, self._refs, len(self.graph.nodes)
        args, kwargs = (
            tree_map(lambda x: refs.get(x) if isinstance(x, fx.Node) else x, part)
            for part in (node.args, node.kwargs)
        )
        if name == "getitem" and type(args[0]) is tuple:
            return args[0][args[1]]
        name = _NAMES.get(name, name)
        wrote_to = writes(node.target, name, args, kwargs)
        if not wrote_to and args and args[-1] is True:  # as of relu
            first = node.all_input_nodes[:1]
            same = any(value is operand.meta.get("example_value") for operand in first)
            wrote_to = [args[0]] * same
        written = wrote_to[0] if len(wrote_to) == 1 else None
        target = node.kwargs.get("out", node.args[0] if node.args else None)
        if name == "setitem" and type(written) is Ref:
            value = target.meta.get("example_value")  # it returns nothing
        result = self._ref(value, maker, graph.constant(tensors((args, kwargs))))
        wrote = tuple((ref, ref) for ref in tensors(wrote_to))
        if type(written) is type(result) is Ref and written == refs.get(target):
            wrote = ((written, result),)
            refs[target] = result
        if name == "setitem" and type(result) is Ref:
            self.makers[result] = target
        func = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        out, single = tuple(tensors([result])), type(result) is Ref and name != "setitem"
        # A number that is computed may be another one in another call.
        numeric = not all(tensors(refs.get(operand)) for operand in node.all_input_nodes)
        pinned |= numeric and name.strip("_") not in SIZED
        name, source = name.strip("_"), _line(node) if name.strip("_") in ACTIVATIONS else ""
        graph.append(Node(func, name, args, kwargs, out, wrote, single, current, pinned, source))
        self.calls.append(node)
        return result


def _example(node: Any) -> Any:
    """What a compiler knows of the value of a node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _line(node: fx.Node) -> str:
    """File and line of the user's code that made a node; empty for operators of this package."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line.split('"') for line in reversed(lines) if line.startswith('File "')]
    return _user_line((frame[1], frame[2].split()[2].rstrip(",")) for frame in frames)


def _running_line() -> str:
    """The same of the code that is running."""
    stack = traceback.walk_stack(sys._getframe(1))
    return _user_line((frame.f_code.co_filename, line) for frame, line in stack)


def _user_line(frames: Iterable[tuple[str, Any]]) -> str:
    """The innermost of frames, in that order, that is of the user's; none behind an operator."""
    for name, line in frames:
        path = Path(name)
        if path.is_relative_to(_OURS):
            break
        if not path.is_relative_to(_TORCH) and not path.is_relative_to(_PACKAGE):
            return f"{path.name}:{line}"
    return ""


def writes(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a function may write to, by its schema or its name."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = func.default if hasattr(func, "default") else getattr(func, func.overloads()[0])
    schema = getattr(getattr(func, "_opoverload", func), "_schema", None)
    if schema is not None:
        infos = [x for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        positions = {x.name: i for i, x in enumerate(schema.arguments)}
        padded = [*args, *[None] * 9]
        return [kwargs[x.name] if x.name in kwargs else padded[positions[x.name]] for x in infos]
    if "out" in kwargs:
        return [kwargs["out"]]
    in_place = name.endswith("_") != name.endswith("__") or name in ("setitem", "__setitem__")
    in_place |= name in _IN_PLACE or name.strip("_") in _IN_PLACE
    in_place |= bool(kwargs.get("inplace"))
    first = args[:1] if in_place else ()
    return [*first[0]] if first and isinstance(first[0], (list, tuple)) else [*first]


class CallRecorder(TorchFunctionMode):
    """Records what is called inside it, of tensors their kinds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.spans = Graph(), []  # type: ignore[var-annotated]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, self.graph
        if torch.compiler.is_dynamo_compiling():  # what torch.cond is given
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        if name == "__get__":  # of an attribute
            name = {"data": "detach"}.get(func.__self__.__name__, func.__self__.__name__)
        if name in _QUERIES or checks.in_transform(False):  # whose tensors have no storage
            return func(*args, **kwargs)
        maker, before = len(graph.nodes), state()
        recorded = tree_map(lambda x: self.ref(x) if isinstance(x, Tensor) else x, (args, kwargs))
        result = func(*args, **kwargs)
        refs = tensors(recorded)
        wrote_to = tensors(writes(func, name, args, kwargs))
        wrote = tuple((self.ref(t), graph.add(t, maker)) for t in wrote_to)
        constant = graph.constant(refs)
        results = tensors(result) if isinstance(result, (Tensor, tuple, list)) else []
        out = [n for _, n in wrote] if name == "__setitem__" else []
        numbered = [(t, graph.find(t)) for t in results]
        out += [graph.add(t, maker, constant=constant) if n is None else n for t, n in numbered]
        source = _running_line() if name.strip("_") in ACTIVATIONS else ""
        single = isinstance(result, Tensor)
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        name, (args, kwargs) = name.strip("_"), recorded
        graph.append(
            Node(func, name, args, kwargs, tuple(out), wrote, single, before, hooked, source)
        )
        return result

    def ref(self, x: Tensor) -> Ref:
        """The number of a tensor, an old or a new one."""
        ref = self.graph.find(x)
        return self.graph.add(x, constant=isinstance(x, nn.Parameter)) if ref is None else ref
