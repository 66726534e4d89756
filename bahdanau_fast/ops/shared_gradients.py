"""One node of the autograd graph for the keys, values and w_v that many calls look at.

A decoder attends once per step. What its recurrence waits for in backward is the gradient of that
step's queries; the gradients of keys, values and w_v are sums over all steps. So a step's backward
computes the first and leaves the gradients of its scores here, and when autograd has been through
all the steps and comes to the shared node, one pass over the keys computes the sums: no step
allocates, or adds up, a tensor of the size of the keys.

A step with features inside the tanh has no such pass, which would have to compute every tanh again:
its backward adds the gradient of the keys to a sum here, and leaves the weights and the gradient of
the context, from which the shared node computes the gradient of the values.

Whatever a step cannot leave (it is to be differentiated again, or autograd is not going to the
shared node this time) it returns to autograd in the ordinary way, and the shared node adds that.

Calls that share a node may still run ``backward`` one by one, as if they shared nothing: see
:class:`~bahdanau_fast.ops.saved_tensors.PendingBackwards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.ops.attention import Step, attend_backward_keys, fingerprint, needs_of
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.saved_tensors import PendingBackwards, SavedTensors


class Left:
    """What the calls of one backward pass leave."""

    __slots__ = ("contexts", "keys", "steps", "weights")

    def __init__(self) -> None:
        self.steps: list[Step] = []  # calls whose share of the sums is still to be computed
        # (B,Tk,H), the gradient of the keys from the first call that computes it, to which other
        # calls add theirs; None before, and where it is not needed.
        self.keys: Tensor | None = None
        self.weights: list[Tensor] = []  # (B,Tq,Tk), of these calls
        self.contexts: list[Tensor] = []  # (B,Tq,Dv), the gradients of theirs

    def values(self) -> Tensor | None:
        """(B,Tk,Dv), the gradient of the values from weights and contexts; None without."""
        if not self.weights:
            return None
        weights, contexts = _join(self.weights), _join(self.contexts)
        with without_autocast(weights.device):
            grad_values = torch.bmm(weights.transpose(1, 2), contexts.to(weights.dtype))
        return grad_values.to(contexts.dtype)


class SharedNode:
    """Keys, values and w_v as results of the shared node, in the dtype of the keys."""

    __slots__ = (
        *("__weakref__", "_bytes", "_copies", "_grad_fns", "_left", "_saved", "_values"),
        *("results", "w_v"),
    )

    def __init__(
        self,
        values: Tensor,
        w_v: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        saved: SavedTensors,
        left: dict[int, Left],
    ) -> None:
        self._values, self.w_v = values, w_v
        self._saved, self.results, self._left = saved, results, left
        self._grad_fns = (values.grad_fn, w_v.grad_fn)
        # Results share the memory of the inputs, unless they are copies in another dtype: then the
        # bytes of the inputs have to be the same as well.
        copied = values.dtype != results[1].dtype or w_v.dtype != results[2].dtype
        self._bytes = fingerprint.now(values, w_v) if copied else None
        self._copies: dict[str, Tensor] = {}

    def node(self) -> Any:
        """The shared node."""
        return next(r.grad_fn for r in self.results if r.grad_fn is not None)

    def is_awaited(self) -> bool:
        """Whether the backward pass that is running will come to the shared node."""
        return bool(torch._C._will_engine_execute_node(self.node()))

    def left(self) -> Left:
        """What the calls have left in the backward pass that is running."""
        return self._left.setdefault(torch._C._current_graph_task_id(), Left())

    def fits(self, values: Tensor, w_v: Tensor) -> bool:
        """Whether a call with these may go by the shared node."""
        return (
            torch.is_grad_enabled()
            and not self._saved.released
            and values is self._values
            and w_v is self.w_v
            and self._is(values, 0)
            and self._is(w_v, 1)
            and (self._bytes is None or self._bytes == fingerprint.now(values, w_v))
        )

    def _is(self, tensor: Tensor, index: int) -> bool:
        result = self.results[index + 1]
        return (
            tensor.grad_fn is self._grad_fns[index]
            and tensor.requires_grad == result.requires_grad
            and tensor.shape == result.shape
            and (
                self._bytes is not None
                or (tensor.data_ptr() == result.data_ptr() and tensor.stride() == result.stride())
            )
        )

    def same(self, lens: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, ...]:
        """Lengths and mask of a call, for its backward; the same tensors for all that are alike."""
        return self._same("lens", lens), self._same("mask", mask)

    def _same(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        saved = self._copies.get(name)
        if saved is None or saved.dtype != tensor.dtype or not torch.equal(saved, tensor):
            saved = self._copies[name] = tensor
        return saved


def share(
    keys: Tensor,
    table: Tensor | None,
    keys_max: Tensor | None,
    values: Tensor,
    w_v: Tensor,
    backwards: PendingBackwards,
) -> SharedNode | None:
    """Put the shared node behind keys, values and w_v; None where no gradient is needed.

    Keys are projected; table and keys_max those of ``ops.exp_keys``, or None.
    """
    if (
        torch.compiler.is_compiling()
        or not checks.needs_gradient(keys, values, w_v)
        or checks.in_transform()
        or type(keys) is not Tensor  # calls on a DTensor share no node
        or values.is_inference()
        or w_v.is_inference()
    ):
        return None
    inputs = (keys, values.to(keys.dtype), w_v.to(keys.dtype))
    # The calls themselves save values and w_v as well, and notice another version.
    saved = SavedTensors(backwards, keys, inputs[1].data, inputs[2].data, table, keys_max)
    left: dict[int, Left] = {}  # by backward pass: several may go over one graph, also at once
    results = _Share.apply(*inputs, saved, left)  # type: ignore[no-untyped-call]
    return SharedNode(values, w_v, results, saved, left)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.saved, ctx.left = inputs
        ctx.set_materialize_grads(False)
        results = [tensor.detach() for tensor in tensors]
        needed = zip(results, ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(result for result, need in needed if not need))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        left = ctx.left.pop(torch._C._current_graph_task_id(), None)
        saved = ctx.saved.get()
        ctx.saved.after_backward()
        sums: Sequence[Tensor | None] = grads
        if left is not None:
            if left.steps:
                sums = tuple(map(_add, _sums(left.steps, saved, ctx.needs_input_grad[:3]), sums))
            sums = tuple(map(_add, (left.keys, left.values(), None), sums))
        return (*sums, None, None)


def _sums(
    steps: list[Step], saved: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of keys, values and w_v, from all the steps together."""
    keys, values, w_v, table, keys_max = saved
    assert values is not None
    steps.reverse()  # backward ran from the last step to the first
    queries, weights, lens, masks, contexts, scores = zip(*steps, strict=True)
    keys_len = values.shape[1]
    results = attend_backward_keys.overload(
        _join(weights),
        _join_contexts(contexts, queries, values),
        _join(scores),
        needs_of(("keys", "values", "w_v"), needed),
        *(_join(queries), keys, values, w_v),
        _join_seen(lens, queries, keys_len, torch.float64),
        _join_seen(masks, queries, keys_len, torch.bool),
        *(table, keys_max),
    )
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)


def _join_seen(
    parts: Sequence[Tensor | None], queries: Sequence[Tensor], keys_len: int, dtype: torch.dtype
) -> Tensor | None:
    """Lengths, or masks, which are bool; one for all queries where it is the same for all."""
    first = parts[0]
    for_all = first is None or first.dim() == 1 or (first.dim() == 3 and first.shape[1] == 1)
    if for_all and all(part is first for part in parts):
        return first
    size = (keys_len,) if dtype is torch.bool else ()
    per_query = []
    for part, query in zip(parts, queries, strict=True):
        whole = query.new_full(size, keys_len, dtype=dtype) if part is None else part.to(dtype)
        if part is not None and part.dim() == 1:
            whole = whole.unsqueeze(1)
        per_query.append(whole.expand(*query.shape[:2], *size))
    return _join(per_query)


def _join_contexts(
    grads: Sequence[Tensor | None], queries: Sequence[Tensor], values: Tensor
) -> Tensor | None:
    if all(grad is None for grad in grads):
        return None
    return _join(
        [
            query.new_zeros((*query.shape[:2], values.shape[2])) if grad is None else grad
            for grad, query in zip(grads, queries, strict=True)
        ]
    )


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
