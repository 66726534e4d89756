"""The context as a node of the autograd graph behind the weights, where plain code has it.

A kernel makes weights and context at once, and their gradients too. In the graph of plain code the
context comes from weights and values, so that ``retain_grad``, hooks and ``autograd.grad`` find the
gradient of the weights. Here a call has the same two nodes. In an ordinary backward the node of the
context hands its gradient to that of the weights, whose kernel does all in one pass. Where somebody
may look at the gradient of the weights, it is computed here, by plain operations: where they have
hooks, and where ``autograd.grad`` is to find certain gradients and the caller has the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast.ops.dropout import dropout_factors
from bahdanau_fast.ops.saved_tensors import changed, will_run

# A leaf that no gradient comes to: a backward visits it unless it was told which gradients to find.
with torch.inference_mode(False):
    _LEAF = torch.zeros((), device="cpu", requires_grad=True)
_AT_LEAF = torch.autograd.graph.get_gradient_edge(_LEAF).node

#: ``torch.autograd.Function`` without what its ``apply`` does, at every call, for ``torch.func``.
Node = torch.autograd.function._SingleLevelFunction


class Link:
    """What the two nodes of a call exchange; the context (B,Tq,Dv) is the kernel's."""

    __slots__ = ("_grads", "_values", "context", "dropout_p", "seed", "turned")

    def __init__(self, values: Tensor, seed: Tensor | None, dropout_p: float) -> None:
        self._values: Tensor | None = values
        self.context: Tensor | None = None
        self.seed, self.dropout_p, self.turned = seed, dropout_p, None
        self._grads: dict[int, Tensor] = {}  # by backward pass

    def connect(self, weights: Tensor, turned: Any = None) -> Tensor:
        """The context, its gradient going through these weights, as the caller sees them.

        Their axes may be ``turned``: sizes of those of (B,Tq,Tk), and the order in which they are.
        """
        values, self._values, self.turned = self._values, None, turned
        connected: Tensor = _Context.apply(weights, values, _LEAF, self)  # type: ignore[attr-defined]
        return connected

    def leave(self, grad_context: Tensor) -> None:
        """Hand the gradient of the context to the node of the weights."""
        self._grads[torch._C._current_graph_task_id()] = grad_context

    def take(self) -> Tensor | None:
        """What was left in the backward pass that is running, or None."""
        return self._grads.pop(torch._C._current_graph_task_id(), None)


class Box:
    """The weights of a call as its caller sees them, and whether it has read them."""

    __slots__ = ("is_read", "weights")

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.is_read = weights, True


class _Context(Node):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, leaf: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.saved, ctx.box = link, None, None
        ctx.set_materialize_grads(False)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            ctx.box, ctx.saved = Box(weights), (values, (weights._version, values._version))
        else:
            ctx.save_for_backward(weights, values)
        context, link.context = link.context, None
        assert context is not None
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grads: tuple[Tensor | None, ...] = (None, None)
        if grad is not None:
            if _is_seen(ctx):
                grads = _gradients(ctx, grad)
            else:
                ctx.link.leave(grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.saved = ctx.box = None
        return (*grads, None, None)


def _is_seen(ctx: Any) -> bool:
    """Whether anything but the node of the weights may look at their gradient."""
    if ctx.saved is None or torch.is_grad_enabled():
        return True
    box = ctx.box
    if box.is_read and not torch._C._will_engine_execute_node(_AT_LEAF):
        return True
    weights = box.weights
    return bool(weights._backward_hooks or weights.retains_grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of weights and values; an error where one was changed that the other's gradient needs."""
    saved = ctx.saved_tensors  # raises after the graph was freed
    if ctx.saved is not None:
        values, versions = ctx.saved
        saved = ctx.box.weights, values
        if (saved[0]._version, values._version) != versions:
            others = reversed(ctx.next_functions[:2])
            for tensor, version, (other, _) in zip(saved, versions, others, strict=True):
                if tensor._version != version and will_run(other):
                    raise changed(tensor, version)
    (weights, values), link = saved, ctx.link
    dropout, needed = (link.seed, link.dropout_p), ctx.needs_input_grad
    if link.turned is None:
        return gradients_of_context(grad, weights, values, *dropout, needed)
    (sizes, order), shape = link.turned, weights.shape
    weights = weights.reshape([sizes[d] for d in order]).permute(
        *map(order.index, range(len(order)))
    )
    grad_weights, grad_values = gradients_of_context(grad, weights, values, *dropout, needed)
    if grad_weights is not None:
        grad_weights = grad_weights.permute(order).reshape(shape)
    return grad_weights, grad_values


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products take the dtype of what is multiplied, autocast or not."""
    if torch._C._is_any_autocast_enabled():
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def gradients_of_context(
    grad: Tensor,
    weights: Tensor,
    values: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weights, in any shape, and values, as needed, by plain operations."""
    shape = (*grad.shape[:-1], values.shape[1])
    factors = grad_weights = grad_values = None
    if dropout_p > 0.0:
        assert seed is not None
        factors = dropout_factors(seed, shape, dropout_p, weights.dtype)
    with without_autocast(grad.device):
        if needed[0]:
            looked = torch.bmm(grad, values.transpose(1, 2)).to(weights.dtype)
            looked = looked if factors is None else looked * factors
            grad_weights = looked.reshape(weights.shape)
        if needed[1]:
            dropped = weights.reshape(shape)
            dropped = dropped if factors is None else dropped * factors
            grad_values = torch.bmm(dropped.transpose(1, 2).to(grad.dtype), grad)
    return grad_weights, grad_values
