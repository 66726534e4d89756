"""A graph as the user wrote it, or with the operator: whichever takes less time, now and later."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from bahdanau_fast.graphs.caches import Caches, NoCaches, Shared
from bahdanau_fast.graphs.notes import writes
from bahdanau_fast.graphs.prove import isolated

# A graph is fused where it takes at most so much of its own code's time.
PAYS = 0.95
# Timing takes at most so much of the time of the calls until it is done again.
_SHARE = 0.01
# Calls with the keys of the call before, from which on they are expected again.
_REPEATS = 2
# The most seconds and rounds of timing.
_SECONDS, _ROUNDS = 0.05, 15


class Times(NamedTuple):
    """Seconds of a graph, with its backward where gradients are recorded."""

    plain: float
    fused: float
    shapes: tuple[tuple[int, ...], ...]  # of the inputs that are no parameters


class GraphError(Exception):
    """A graph failed that has written to nothing: the user's own code says what is wrong."""


def _writes(node: fx.Node) -> bool:
    """Whether a node may write to a tensor."""
    if not node.op.startswith("call"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    wrote = writes(node.target, name, node.args, node.kwargs)
    return bool(wrote) or "norm" in name or (*node.args, None)[-2:][0] is True


# Modules of functions that compute, and do nothing else.
_PURE = (
    r"(torch(?!\._ops)|torch\._ops\.(aten|prims|bahdanau_fast)|_operator|builtins|math|einops)\b"
)


def _acts(node: fx.Node) -> bool:
    """Whether a node may do more than compute: a collective, or a function of others."""
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and not re.match(_PURE, module)


class _Kind:
    """Calls of some sizes: what they run, how often, and their times."""

    def __init__(self) -> None:
        self.run: Any = None
        self.runs = 0  # with the operator
        self.times: Times | None = None
        self.due = 0.0
        self.wait = 0.2  # grows while decisions stay
        # Calls that ran as written; those with the keys of the call before, and their address.
        self.calls = self.repeats = self.last = 0


class Choice:
    """Both ways of a graph.

    Attributes:
        shared: with other graphs of the module.
        grad: whether gradients are recorded.
        kinds: by size, a power of two of each symbol.
    """

    def __init__(
        self, plain: fx.GraphModule, fused: fx.GraphModule | None, inputs: Any, shared: Shared
    ) -> None:
        _LazyGraphModule.force_recompile(plain)  # its lazy forward calls the module
        self.plain, self.fused = plain.forward, None if fused is None else fused.forward
        self.shared, self._writes = shared, any(map(_writes, plain.graph.nodes))
        self.grad, self._acts = torch.is_grad_enabled(), any(map(_acts, plain.graph.nodes))
        self._symbols = [i for i, x in enumerate(inputs) if not isinstance(x, Tensor)]
        self.kinds: dict[Any, _Kind] = {}
        sizes = {i: x.numel() for i, x in enumerate(inputs)
                 if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)}  # fmt: skip
        self._keys = max(sizes, key=lambda i: int(sizes[i]), default=None)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        sizes = tuple([inputs[i].bit_length() for i in self._symbols if type(inputs[i]) is int])
        kind = self.kinds.get(sizes) or self.kinds.setdefault(sizes, _Kind())
        if self.shared.always or self.fused is None:
            kind.run = self.fused or self.plain
        elif time.perf_counter() >= kind.due:
            self._decide(kind, inputs)
        if kind.run is self.fused:
            kind.runs += 1
        elif self._keys is not None:
            kind.calls += 1
            address = inputs[self._keys].data_ptr()
            kind.repeats += kind.last == address
            kind.last = address
            if kind.repeats == _REPEATS:  # the projection is cached from then on
                kind.due = 0.0
        try:
            return kind.run(*inputs)
        except Exception as error:
            torch.set_grad_enabled(self.grad)  # as a graph that fails may not leave it
            if self._writes:
                raise
            raise GraphError from error

    @property
    def pays(self) -> bool:
        """Whether calls of any size are fused, or may be soon."""
        kinds = self.kinds.values()
        return any(kind.run is self.fused or kind.calls < 3 * _REPEATS for kind in kinds)

    def _decide(self, kind: _Kind, inputs: tuple[Any, ...]) -> None:
        """Time both, on copies of the inputs."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        on_gpu = any(x.is_cuda for x in tensors)
        if (
            self._acts
            or torch._C._autograd._profiler_enabled()
            or (on_gpu and torch.cuda.is_current_stream_capturing())
        ):  # a profile shows the user's calls alone, a capture cannot wait, nor can other processes
            kind.run = kind.run or self.plain
            return
        begin, before = time.perf_counter(), kind.run
        repeat = kind.repeats >= _REPEATS and not self._writes
        # Else keys may come once.
        caches, self.shared.caches = self.shared.caches, Caches() if repeat else NoCaches()
        try:
            with isolated(next(x.device for x in tensors)), torch.set_grad_enabled(self.grad):
                plain, fused = self._time(inputs, begin, repeat)
        except Exception:  # of a graph that fails, or needs too much memory twice
            kind.run, kind.due = self.plain, math.inf
            return
        finally:
            self.shared.caches = caches
        kind.run = self.fused if fused <= PAYS * plain else self.plain
        shapes = tuple(tuple(x.shape) for x in tensors if not isinstance(x, nn.Parameter))
        kind.times = Times(plain, fused, shapes)
        kind.wait = min(2 * kind.wait, 64.0) if kind.run is before else 0.2
        end = time.perf_counter()
        kind.due = end + kind.wait * (end - begin) / _SHARE

    def _time(self, inputs: Any, begin: float, repeat: bool) -> tuple[float, float]:
        """Seconds of both, plain first, on the same inputs or on new ones."""
        copies = self._copies(inputs)
        ways, took = [self.fused or self.plain, self.plain], ([], [])  # type: ignore[var-annotated]
        for i in range(1 + _ROUNDS):
            for way, seconds in zip(ways, took, strict=True):
                seconds.append(self._once(way, *(copies if repeat else self._copies(inputs))))
            large = time.perf_counter() - begin > _SECONDS
            far = max(took[0][-1], took[1][-1]) > 1.5 * min(took[0][-1], took[1][-1])
            if large and (i > 1 or (i and far)):
                break
        a, b = (sorted(seconds[1:])[(len(seconds) - 1) // 3] for seconds in reversed(took))
        return a, b

    def _copies(self, inputs: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
        """Of inputs, and the leaves among them."""
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
        leaves = []
        if self.grad:
            learnt = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
            leaves = [copies[i].requires_grad_() for i in learnt]
            for i, leaf in zip(learnt, leaves, strict=True):
                copies[i] = leaf.clone() if self._writes else leaf
        return copies, leaves

    def _once(self, way: Callable[..., Any], copies: list[Any], leaves: list[Tensor]) -> float:
        for leaf in leaves:
            leaf.grad = None
        begin = _now(copies)
        outs = [x for x in way(*copies) if isinstance(x, Tensor) and x.requires_grad]
        if leaves and outs:
            torch.autograd.backward(outs, [*map(torch.ones_like, outs)])
        return _now(copies) - begin


def _now(inputs: list[Any]) -> float:
    """Seconds, once a GPU has done its work."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in inputs):
        torch.cuda.synchronize()
    return time.perf_counter()
