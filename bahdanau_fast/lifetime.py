"""How long the nodes of the autograd graph that several calls share keep what they were given.

Autograd frees what a node saved once a backward has gone through it. Calls on the same keys share
the node of the projection, and plain code, which projects at each call, may run a backward for each
of them. So shared nodes keep their tensors themselves, until no call is left whose backward could
still come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Due", "Held", "Lifetime", "saved_as_needed"]


class Lifetime:
    """Counts the calls whose backward may still come to the nodes they share."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: set[int] = set()

    def begin(self) -> Due:
        """Count one more; to be kept by the node of the call in the graph."""
        return Due(self._due)

    def is_over(self) -> bool:
        """Whether the backward that is running, and frees the graph, is the last one."""
        return not self._due and not torch._C._autograd._get_current_graph_task_keep_graph()


class Due:
    """A backward that may still come: until it has freed the graph, or the graph is dropped."""

    __slots__ = ("_due",)

    def __init__(self, due: set[int]) -> None:
        self._due = due
        due.add(id(self))

    def after_backward(self) -> bool:
        """Stop counting, unless the running backward keeps the graph; whether it stopped."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return False
        self._due.discard(id(self))
        return True

    def __del__(self) -> None:
        self._due.discard(id(self))


class Held:
    """What a shared node saves for its backward.

    Args:
        lifetime: of the calls that share the node.
        tensors: to be saved; None for those that the backward will not need.
        grad_fns: nodes that the gradients go to.
    """

    __slots__ = (
        "__weakref__",
        "_lifetime",
        "_memory",
        "_tensors",
        "_versions",
        "grad_fns",
        "on_release",
    )

    def __init__(
        self, lifetime: Lifetime, *tensors: Tensor | None, grad_fns: tuple[Any, ...] = ()
    ) -> None:
        self._lifetime = lifetime
        self.grad_fns = grad_fns
        self._tensors: tuple[Tensor | None, ...] | None = tensors
        # The memory of now, whatever `.data =` gives the tensor later; it counts the same versions.
        self._memory = [None if t is None else t.detach() for t in tensors]
        self._versions = [_version(t) for t in self._memory]
        self.on_release: Callable[[], None] | None = None

    @property
    def released(self) -> bool:
        """Whether the last backward has been here."""
        return self._tensors is None

    def get(self) -> Sequence[Tensor | None]:
        """The tensors, as autograd gives back saved ones; with their graph if it is recorded.

        Raises:
            RuntimeError: they were freed, or changed in place.
        """
        if self._tensors is None:
            raise RuntimeError(
                "Trying to backward through the attention's keys a second time, after what was "
                "saved for it has been freed: give retain_graph=True to the first backward"
            )
        for tensor, version in zip(self._memory, self._versions, strict=True):
            if tensor is not None and _version(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tuple(tensor.shape)} of the attention's keys or weights "
                    f"is at version {tensor._version}, expected version {version}"
                )
        return self._tensors if torch.is_grad_enabled() else self._memory

    def after_backward(self) -> None:
        """Let go of the tensors, if that was the last backward."""
        if self._lifetime.is_over():
            self._tensors, self._memory, self.grad_fns = None, [], ()
            if self.on_release is not None:
                self.on_release()


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def saved_as_needed(
    tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[list[Tensor | None], Held | None]:
    """What to save of the inputs of a call, so that it minds changes in place as plain code does.

    Plain code saves an input where some gradient needs its value, and raises in backward if it was
    changed in place meanwhile. Any other input may be changed.

    Args:
        tensors: inputs of a call.
        needed: of which of them a first derivative needs the value.

    Returns:
        The tensors to save, without version counters where they are not needed; and where such a
        one requires a gradient itself, all inputs as they are, for second derivatives.
    """
    saved: list[Tensor | None] = []
    whole = False
    for tensor, need in zip(tensors, needed, strict=True):
        if tensor is None or need:
            saved.append(tensor)
        else:
            whole = whole or tensor.requires_grad
            saved.append(tensor.data)
    return saved, Held(Lifetime(), *tensors) if whole else None
