"""One node of the autograd graph for the keys, values and w_v that many calls look at.

A decoder attends once per step. What its recurrence waits for in backward is the gradient of that
step's queries; those of the keys, the values and w_v are sums over all steps. So a step's backward
computes the first and leaves the gradients of its scores here, and when autograd has been through
all the steps and comes to the shared node, one pass over the keys makes the sums: no tensor of the
size of the keys is made, or added up, per step.

A step with features inside the tanh has no such pass, which would have to compute every tanh again:
its backward adds the gradient of the keys to a sum that is kept here, and leaves what that of the
values is made of.

Whatever a step cannot leave (it is to be differentiated again, or autograd is not going to the
shared node this time) it returns to autograd in the ordinary way, and the shared node adds that.

Calls that share a node may still have a ``backward`` each, as if they shared nothing: see
:class:`~bahdanau_fast.ops.saved_tensors.PendingBackwards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.ops.attention import attend_backward_keys, fingerprint, needs_of
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.saved_tensors import PendingBackwards, SavedTensors

__all__ = ["PendingGradients", "SharedNode", "StepGradients", "share"]


class StepGradients(NamedTuple):
    """What the backward of one call leaves.

    Attributes:
        queries: (B,Tq,H), projected.
        weights: (B,Tq,Tk), after dropout.
        valid_lens: None, (B,) or (B,Tq).
        mask: None, or bool (B,1,Tk) or (B,Tq,Tk).
        grad_context: (B,Tq,Dv) or None.
        grad_scores: (B,Tq,Tk).
    """

    queries: Tensor
    weights: Tensor
    valid_lens: Tensor | None
    mask: Tensor | None
    grad_context: Tensor | None
    grad_scores: Tensor


class KeptSums:
    """What the backward of calls with features, or another activation, leaves.

    Attributes:
        keys: (B,Tk,H), the gradient of the keys from the first of them, to which the others add
            theirs; None before, and where it is not wanted.
    """

    __slots__ = ("_contexts", "_weights", "keys")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self._weights: list[Tensor] = []
        self._contexts: list[Tensor] = []

    def add(self, weights: Tensor, grad_context: Tensor) -> None:
        """Leave a call's share of the gradient of the values.

        Args:
            weights: (B,Tq,Tk), of a call without dropout.
            grad_context: (B,Tq,Dv).
        """
        self._weights.append(weights.detach())
        self._contexts.append(grad_context)

    def values(self) -> Tensor | None:
        """(B,Tk,Dv), the gradient of the values; None where none was left."""
        if not self._weights:
            return None
        weights, contexts = _join(self._weights), _join(self._contexts)
        with without_autocast(weights.device):
            found = torch.bmm(weights.transpose(1, 2), contexts.to(weights.dtype))
        return found.to(contexts.dtype)


class PendingGradients:
    """The calls whose backward has run but whose share of the sums is still to be computed.

    They are kept apart by backward pass: several may go over one graph, also at once.
    """

    __slots__ = ("_calls", "_sums")

    def __init__(self) -> None:
        self._calls: dict[int, list[StepGradients]] = {}
        self._sums: dict[int, KeptSums] = {}

    def sums(self) -> KeptSums:
        """The sums of the backward pass that is running."""
        return self._sums.setdefault(torch._C._current_graph_task_id(), KeptSums())

    def take_sums(self) -> KeptSums | None:
        """The same, which are over now; None where there are none."""
        return self._sums.pop(torch._C._current_graph_task_id(), None)

    def add(self, *step: Any) -> None:
        """Leave a call to the shared node: what :class:`StepGradients` has."""
        calls = self._calls.setdefault(torch._C._current_graph_task_id(), [])
        calls.append(StepGradients(*step))

    def take(self) -> list[StepGradients]:
        """The calls of the backward pass that is running."""
        return self._calls.pop(torch._C._current_graph_task_id(), [])


class SharedNode:
    """Keys, values and w_v as results of the shared node.

    Attributes:
        results: keys, values and w_v behind the node, in the dtype of the keys.
        pending: what the calls leave.
    """

    __slots__ = (
        *("__weakref__", "_bytes", "_copies", "_grad_fns", "_saved", "_sources"),
        *("pending", "results"),
    )

    def __init__(
        self,
        values: Tensor,
        w_v: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        saved: SavedTensors,
        pending: PendingGradients,
    ) -> None:
        self._sources = (values, w_v)
        self._saved = saved
        self.results = results
        self.pending = pending
        self._grad_fns = (values.grad_fn, w_v.grad_fn)
        # Results share the memory of what came in, unless they are copies in another dtype: then
        # the bytes of what came in have to be the same as well.
        copied = values.dtype != results[1].dtype or w_v.dtype != results[2].dtype
        self._bytes = _fingerprint(values, w_v) if copied else None
        self._copies: dict[str, Tensor] = {}

    def node(self) -> Any:
        """The shared node."""
        return next(r.grad_fn for r in self.results if r.grad_fn is not None)

    def is_awaited(self) -> bool:
        """Whether the backward pass that is running will come to the shared node."""
        return bool(torch._C._will_engine_execute_node(self.node()))

    @property
    def w_v(self) -> Tensor:
        """(1,H) or (H,), as it came in."""
        return self._sources[1]

    def fits(self, values: Tensor, w_v: Tensor) -> bool:
        """Whether a call with these may go by the shared node."""
        return (
            torch.is_grad_enabled()
            and not self._saved.released
            and self._is(values, 0)
            and self._is(w_v, 1)
            and (self._bytes is None or self._bytes == _fingerprint(values, w_v))
        )

    def _is(self, tensor: Tensor, index: int) -> bool:
        result = self.results[index + 1]
        return (
            tensor is self._sources[index]
            and tensor.grad_fn is self._grad_fns[index]
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
        kept = self._copies.get(name)
        if kept is None or kept.dtype != tensor.dtype or not torch.equal(kept, tensor):
            kept = self._copies[name] = tensor
        return kept


def _fingerprint(values: Tensor, w_v: Tensor) -> Any:
    return fingerprint.now(values, w_v)


def share(
    keys: Tensor,
    table: Tensor | None,
    keys_max: Tensor | None,
    values: Tensor,
    w_v: Tensor,
    backwards: PendingBackwards,
) -> SharedNode | None:
    """Put the shared node behind keys, values and w_v; None where no gradient will be asked for.

    Args:
        keys: (B,Tk,H), projected.
        table: of ``ops.exp_keys``, or None.
        keys_max: likewise.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        backwards: of what the calls share.
    """
    if (
        torch.compiler.is_compiling()
        or not checks.needs_gradient(keys, values, w_v)
        or checks.in_transform()
        or type(keys) is not Tensor  # a DTensor's calls know no other node than their own
        or values.is_inference()
        or w_v.is_inference()
    ):
        return None
    inputs = (keys, values.to(keys.dtype), w_v.to(keys.dtype))
    # The calls themselves save values and w_v as well, and see changes in place.
    saved = SavedTensors(backwards, keys, inputs[1].data, inputs[2].data, table, keys_max)
    pending = PendingGradients()
    results = _Share.apply(*inputs, saved, pending)  # type: ignore[no-untyped-call]
    return SharedNode(values, w_v, results, saved, pending)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.saved, ctx.pending = inputs
        ctx.set_materialize_grads(False)
        results = [tensor.detach() for tensor in tensors]
        asked = zip(results, ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(result for result, need in asked if not need))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        calls, kept = ctx.pending.take(), ctx.pending.take_sums()
        saved = ctx.saved.get()
        ctx.saved.after_backward()
        found: Sequence[Tensor | None] = grads
        if calls:
            found = tuple(map(_add, _sums(calls, saved, ctx.needs_input_grad[:3]), found))
        if kept is not None:
            found = tuple(map(_add, (kept.keys, kept.values(), None), found))
        return (*found, None, None)


def _sums(
    calls: list[StepGradients], saved: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of keys, values and w_v, from all the calls together."""
    keys, values, w_v, table, keys_max = saved
    assert values is not None
    calls.reverse()  # backward ran from the last step to the first
    queries, weights, lens, masks, contexts, scores = zip(*calls, strict=True)
    results = attend_backward_keys.overload(
        _join(weights),
        _join_contexts(contexts, queries, values),
        _join(scores),
        needs_of(("keys", "values", "w_v"), needed),
        *(_join(queries), keys, values, w_v),
        _join_lens(lens, queries, values.shape[1]),
        _join_masks(masks, queries, values.shape[1]),
        *(table, keys_max),
    )
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)


def _join_lens(
    lens: Sequence[Tensor | None], queries: Sequence[Tensor], keys_len: int
) -> Tensor | None:
    first = lens[0]
    if (first is None or first.dim() == 1) and all(each is first for each in lens):
        return first
    per_query = []
    for each, asked in zip(lens, queries, strict=True):
        whole = asked.new_full((), keys_len, dtype=torch.float64) if each is None else each.double()
        column = whole if whole.dim() != 1 else whole.unsqueeze(1)
        per_query.append(column.expand(asked.shape[:2]))
    return _join(per_query)


def _join_masks(
    masks: Sequence[Tensor | None], queries: Sequence[Tensor], keys_len: int
) -> Tensor | None:
    first = masks[0]
    if (first is None or first.shape[1] == 1) and all(each is first for each in masks):
        return first
    per_query = []
    for mask, asked in zip(masks, queries, strict=True):
        whole = asked.new_ones((1, 1, keys_len), dtype=torch.bool) if mask is None else mask
        per_query.append(whole.expand(*asked.shape[:2], keys_len))
    return _join(per_query)


def _join_contexts(
    grads: Sequence[Tensor | None], queries: Sequence[Tensor], values: Tensor
) -> Tensor | None:
    if all(grad is None for grad in grads):
        return None
    return _join(
        [
            asked.new_zeros((*asked.shape[:2], values.shape[2])) if grad is None else grad
            for grad, asked in zip(grads, queries, strict=True)
        ]
    )


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
