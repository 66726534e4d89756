"""What nodes of the autograd graph save, and how long nodes keep it that several calls share.

Autograd frees what a node saved once a backward has gone through it. Calls on the same keys share
the node of the projection, and plain code, which projects at every call, may run a backward for all
of them. So shared nodes hold their tensors themselves, until no call is left whose backward could
still come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PendingBackwards:
    """The calls whose backward may still come to the nodes they share, from any thread."""

    __slots__ = ("_tokens", "lock")

    def __init__(self) -> None:
        # By call: the backward pass that freed its graph, and is on its way to the shared nodes.
        self._tokens: dict[int, int | None] = {}
        self.lock = threading.Lock()  # a call begins before a node is freed, or after

    def begin(self) -> BackwardToken:
        """Count one more, for the node of the call in the graph to hold."""
        with self.lock:
            return BackwardToken(self._tokens)

    def is_over(self, visits: set[int]) -> bool:
        """Whether no backward will come any more to a node where these passes have been."""
        return all(visit in visits for visit in list(self._tokens.values()))


class BackwardToken:
    """A backward that may still come: until it has freed the graph, or the graph is dropped."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: dict[int, int | None]) -> None:
        self._tokens = tokens
        tokens[id(self)] = None

    def after_backward(self) -> bool:
        """Wait no longer, unless the running backward keeps the graph; whether it is the last."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return False
        self._tokens[id(self)] = torch._C._current_graph_task_id()
        return True

    def __del__(self) -> None:
        self._tokens.pop(id(self), None)


class SavedTensors:
    """What a shared node saves for its backward; ``grad_fns`` are nodes its gradients go to."""

    __slots__ = (
        "__weakref__",
        "_backwards",
        "_memory",
        "_tensors",
        "_versions",
        "_visits",
        "grad_fns",
        "on_release",
    )

    def __init__(
        self, backwards: PendingBackwards, *tensors: Tensor | None, grad_fns: tuple[Any, ...] = ()
    ) -> None:
        self._backwards = backwards
        self._visits: set[int] = set()
        self.grad_fns = grad_fns
        # The memory of now, whatever `.data =` gives the tensor later; it counts the same versions.
        self._memory = [None if t is None else t.detach() for t in tensors]
        self._tensors: tuple[Tensor | None, ...] | None = tuple(
            t if t is not None and t.requires_grad else memory
            for t, memory in zip(tensors, self._memory, strict=True)
        )
        self._versions = versions(self._memory)
        self.on_release: Callable[[], None] | None = None

    @property
    def released(self) -> bool:
        """Whether the last backward has been here."""
        return self._tensors is None

    @property
    def is_current(self) -> bool:
        """Whether one more call may come to the node: neither freed nor modified."""
        return not self.released and versions(self._memory) == self._versions

    def get(self) -> Sequence[Tensor | None]:
        """The tensors, as autograd gives back saved ones; with their graph if it is recorded."""
        if self._tensors is None:
            raise RuntimeError(
                "Trying to backward through the attention's keys a second time, after what was "
                "saved for it has been freed: give retain_graph=True to the first backward"
            )
        now = versions(self._memory)
        for tensor, version, expected in zip(self._memory, now, self._versions, strict=True):
            if version != expected:
                raise changed(tensor, expected)
        return self._tensors if torch.is_grad_enabled() else self._memory

    def after_backward(self) -> None:
        """Let go of the tensors, if that was the last backward."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return
        with self._backwards.lock:
            self._visits.add(torch._C._current_graph_task_id())
            if not self._backwards.is_over(self._visits):
                return
            self._tensors, self._memory, self.grad_fns = None, [], ()
        if self.on_release is not None:
            self.on_release()


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """The version of each; None of none, and of a tensor of inference mode, which counts none."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]


def changed(tensor: Tensor | None, expected: int | None) -> RuntimeError:
    """The error that autograd has for a saved tensor with another version."""
    assert tensor is not None
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: an input {tuple(tensor.shape)} of the attention is at version "
        f"{tensor._version}, expected version {expected}"
    )


def save_inputs(ctx: Any, inputs: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
    """``ctx.save_for_backward`` of all inputs but the first, to be read by :func:`saved_inputs`."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        ctx.save_for_backward(*inputs, *others)
        ctx.saved_inputs = None
        return
    # The memory of now, as in SavedTensors.
    memory = [None if t is None else t.detach() for t in inputs]
    ctx.save_for_backward(*others)
    ctx.saved_inputs = inputs, memory, [None if t is None else t._version for t in memory]


def with_rows_together(x: Tensor) -> Tensor:
    """What torch's product saves of (...,D): a copy where one stride does not fit all rows."""
    together: Tensor = x.flatten(0, -2).unflatten(0, x.shape[:-1])
    return together


def saved_inputs(ctx: Any, operator: Any, nodes: Sequence[Any] | None) -> Sequence[Any]:
    """``ctx.saved_tensors``; it rejects modified inputs only where plain code does.

    A node of plain code saves what the gradients through it need, and one that a backward does not
    come to does not look at what it has saved. One node for all of them, which saves everything,
    has to find out whether a changed input is needed this time. ``nodes`` are where the gradients
    of the inputs go, unless that is ``next_functions``.
    """
    tensors: Sequence[Tensor | None] = ctx.saved_tensors  # raises after the graph was freed
    if ctx.saved_inputs is None:
        return tensors
    inputs, memory, expected = ctx.saved_inputs
    again = torch.is_grad_enabled()
    now = [None if t is None else t._version for t in memory]
    if now != expected:
        named = dict(zip(operator.inputs, memory, strict=True))
        edges = iter(ctx.next_functions if nodes is None else nodes)
        due = {n for n, t in named.items() if t is not None and will_run(next(edges)[0])}
        for (name, t), before, after in zip(named.items(), expected, now, strict=True):
            if before != after and (again or due.intersection(operator.needing(name, named))):
                raise changed(t, before)
    return (*(inputs if again else memory), *tensors)


def will_run(node: Any) -> bool:
    """Whether the backward that is running will come to a node."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for leaves that are inputs of autograd.grad alone
        return True


def after_backward(ctx: Any) -> None:
    """Free what :func:`save_inputs` saved, as autograd does, unless it keeps the graph."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.saved_inputs = None
