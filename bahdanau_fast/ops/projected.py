"""The operators as PyTorch sees them: schemas, shape functions and autograd formulas.

The implementations live elsewhere, one per dispatch key: csrc/cpu registers the CPU key when the
extension loads, backends.cuda or backends.triton the CUDA key. Operators work on projected queries
and keys; the projections in front of them are ordinary ``Linear`` calls.

==================  ============================================================================
``exp_keys``        table of exp(2 c) (or expm1(2 c) where every c is small) and max|c| per row;
                    ``precise`` where gradients may be asked for
``attend``          context and weights from projected queries and keys; the weights come in no
                    less than fp32, since backward takes differences of them
``attend_backward`` the four gradients of ``attend``
``attend_backward_  that of the queries alone, with what the other three can be taken from later:
queries``           gradients of the scores, and the weights after dropout (empty without)
``attend_backward_  the other three, of many steps at once, from those
keys``
``fingerprint``     two numbers that stand for the bytes of keys, weight and bias in this process
==================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.limits import PRECISION
from bahdanau_fast.ops.again import attend_again
from bahdanau_fast.ops.context import Link
from bahdanau_fast.ops.lifetime import Lifetime, after_backward, save, saved
from bahdanau_fast.ops.shared_gradients import SharedNode, StepGradients

__all__ = [
    "ATTEND_INPUTS",
    "NEED_KEYS",
    "NEED_QUERIES",
    "NEED_VALUES",
    "NEED_W_V",
    "TAGS",
    "AttendInputs",
    "attend_backward_fake",
    "attend_fake",
    "attend_op",
    "attend_recorded",
    "exp_keys_now",
    "exp_keys_op",
    "fingerprint",
    "gradients",
    "implement",
    "implementations",
    "library",
    "setup_context",
    "weights_dtype",
    "without_key",
]


class AttendInputs(NamedTuple):
    """What ``attend`` and its backward operators have as their first arguments, in this order.

    Attributes:
        queries: (B,Tq,H), projected.
        keys: (B,Tk,H), projected.
        table: from :func:`exp_keys`, or None.
        keys_max: likewise.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq); or a mask, bool (B,1,Tk) or (B,Tq,Tk), which the CPU's
            kernels and the reference take.
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
    """

    queries: Tensor
    keys: Tensor
    table: Tensor | None
    keys_max: Tensor | None
    values: Tensor
    w_v: Tensor
    valid_lens: Tensor | None
    seed: Tensor | None = None
    dropout_p: float = 0.0


# Bits of attend_backward's `needs`: which gradients to compute.
NEED_QUERIES, NEED_KEYS, NEED_VALUES, NEED_W_V = 1, 2, 4, 8

library = torch.library.Library("bahdanau_fast", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
ATTEND_INPUTS = (
    "Tensor queries, Tensor keys, Tensor? table, Tensor? keys_max, Tensor values, Tensor w_v, "
    "Tensor? valid_lens, Tensor? seed, float dropout_p"
)
library.define(
    "exp_keys(Tensor keys, bool precise=True) -> (Tensor table, Tensor keys_max)", tags=TAGS
)
library.define(
    f"attend({ATTEND_INPUTS}, bool need_weights) -> (Tensor context, Tensor weights)", tags=TAGS
)
library.define(
    f"attend_backward({ATTEND_INPUTS}, Tensor weights, Tensor? grad_context, "
    "Tensor? grad_weights, int needs) -> (Tensor grad_queries, Tensor grad_keys, "
    "Tensor grad_values, Tensor grad_w_v)",
    tags=TAGS,
)
library.define(
    f"attend_backward_queries({ATTEND_INPUTS}, Tensor weights, Tensor? grad_context, "
    "Tensor? grad_weights, bool needed) -> (Tensor grad_queries, Tensor grad_scores, "
    "Tensor dropped)",
    tags=TAGS,
)
library.define(
    "fingerprint(Tensor keys, Tensor? weight, Tensor? bias) -> (int, int)",
    tags=TAGS,
)
library.define(
    "attend_backward_keys(Tensor queries, Tensor keys, Tensor? table, Tensor? keys_max, "
    "Tensor values, Tensor w_v, Tensor? valid_lens, Tensor weights, Tensor? grad_context, "
    "Tensor grad_scores, int needs) -> (Tensor grad_keys, Tensor grad_values, Tensor grad_w_v)",
    tags=TAGS,
)


def weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the operators give attention weights in: backward takes differences of them."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _exp_keys_fake(keys: Tensor, precise: bool = True) -> tuple[Tensor, Tensor]:
    batch, keys_len, hidden = keys.shape
    most = PRECISION.fp64_cpu_elements if precise else PRECISION.fp64_forward_table_elements
    small = batch * keys_len * hidden <= most
    in_double = keys.dtype == torch.float64 or (keys.dtype == torch.float32 and small)
    dtype, per_line = (torch.float64, 8) if in_double else (torch.float32, 16)
    width = (hidden + per_line - 1) // per_line * per_line  # whole 64-byte lines
    table = keys.new_empty((batch, keys_len, width), dtype=dtype)
    return table, keys.new_empty((batch,), dtype=dtype)


def attend_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results of ``attend``."""
    queries, values, need_weights = inputs[0], inputs[4], inputs[9]
    batch, queries_len, _ = queries.shape
    _, keys_len, features = values.shape
    weights = (batch, queries_len, keys_len) if need_weights else (0,)
    return queries.new_empty((batch, queries_len, features)), queries.new_empty(
        weights, dtype=weights_dtype(queries.dtype)
    )


def attend_backward_fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of ``attend_backward``."""
    queries, keys, values, w_v, needs = (inputs[at] for at in (0, 1, 4, 5, 12))
    return (
        _gradient_fake(queries, needs & NEED_QUERIES),
        _gradient_fake(keys, needs & NEED_KEYS),
        _gradient_fake(values, needs & NEED_VALUES),
        _gradient_fake(w_v, needs & NEED_W_V),
    )


def _gradient_fake(of: Tensor, needed: int | bool) -> Tensor:
    return of.new_empty(of.shape if needed else (0,))


def _backward_queries_fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    queries, dropout_p, weights, needed = inputs[0], inputs[8], inputs[9], inputs[12]
    return (
        _gradient_fake(queries, needed),
        weights.new_empty(weights.shape),
        _gradient_fake(weights, dropout_p > 0.0),
    )


def _backward_keys_fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    keys, values, w_v, needs = inputs[1], inputs[4], inputs[5], inputs[10]
    return (
        _gradient_fake(keys, needs & NEED_KEYS),
        _gradient_fake(values, needs & NEED_VALUES),
        _gradient_fake(w_v, needs & NEED_W_V),
    )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward of ``attend`` needs."""
    *tensors, dropout_p, need_weights = inputs
    if not need_weights:
        raise RuntimeError("attend must be called with need_weights=True where a gradient is due")
    ctx.save_for_backward(*tensors, output[1])
    ctx.dropout_p = dropout_p
    ctx.shared = None
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    tensors: Sequence[Any],
    backward: Callable[..., tuple[Tensor, ...]],
    needed: list[bool],
    *grads: Tensor | None,
) -> list[Tensor | None]:
    """Of queries, keys, values and w_v, as far as they are needed."""
    grad_context, grad_weights = grads
    *inputs, weights = tensors
    queries, keys, _, _, values, w_v, valid_lens, seed = inputs
    if grad_context is None and grad_weights is None:
        return [None] * 4
    if torch.is_grad_enabled():
        differentiated = (queries, keys, values, w_v)

        def scores(queries: Tensor, keys: Tensor, _: Tensor, w_v: Tensor) -> tuple[Tensor]:
            return (reference.projected_scores(queries, keys, w_v),)

        link = Link(values, seed, ctx.dropout_p)
        return attend_again(scores, differentiated, needed, weights, valid_lens, link, grads)
    if ctx.shared is not None and ctx.shared.is_awaited():
        grad_queries, grad_scores, dropped = _backward_queries_op(
            *inputs, ctx.dropout_p, weights, grad_context, grad_weights, needed[0]
        )
        # Detached: a backward that fails half way leaves it there, and no graph is to hold itself.
        dropped = dropped if ctx.dropout_p > 0.0 else weights.detach()
        left = StepGradients(queries, dropped, valid_lens, grad_context, grad_scores)
        ctx.shared.pending.add(left)
        return [grad_queries if needed[0] else None, None, None, None]
    needs = sum(1 << i for i, need in enumerate(needed) if need)
    results = backward(*inputs, ctx.dropout_p, weights, grad_context, grad_weights, needs)
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[at] for at in (0, 1, 4, 5)]
    grad_q, grad_k, grad_v, grad_w = gradients(ctx, ctx.saved_tensors, _backward_op, needed, *grads)
    return grad_q, grad_k, None, None, grad_v, grad_w, None, None, None, None


torch.library.register_fake("bahdanau_fast::exp_keys", _exp_keys_fake, lib=library)
torch.library.register_fake("bahdanau_fast::attend", attend_fake, lib=library)
torch.library.register_fake("bahdanau_fast::attend_backward", attend_backward_fake, lib=library)
torch.library.register_fake(
    "bahdanau_fast::attend_backward_queries", _backward_queries_fake, lib=library
)
torch.library.register_fake("bahdanau_fast::attend_backward_keys", _backward_keys_fake, lib=library)
torch.library.register_autograd(
    "bahdanau_fast::attend", _backward, setup_context=setup_context, lib=library
)


# Of queries, keys, values and w_v: whose gradients need their values.
_USES = ((0, 1, 3), (0, 1, 3), (0, 1, 3), (0, 1))


class _Attend(torch.autograd.Function):
    """The same formulas for eager calls: the registered path takes several times as long.

    Gives the weights; the context gets a node behind them, by the link. Only what is
    differentiated is an argument of its own; each argument costs time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        w_v: Tensor,
        rest: list[Any],
        backend: str,
        shared: SharedNode | None,
        lifetime: Lifetime | None,
        link: Link,
    ) -> Tensor:
        table, keys_max, valid_lens, seed, ctx.dropout_p = rest
        forward, ctx.attend_backward = implementations[backend]
        with torch._C._AutoDispatchBelowAutograd():
            link.context, weights = forward(
                *(queries, keys, table, keys_max, values, w_v, valid_lens, seed, ctx.dropout_p),
                True,
            )
        if valid_lens is not None:  # plain code makes a mask of it at once: it may change
            valid_lens = valid_lens.clone() if shared is None else shared.lens(valid_lens)
        ctx.set_materialize_grads(False)
        made = (table, keys_max, valid_lens, seed, weights)
        save(ctx, (queries, keys, values, w_v), made, _USES)
        ctx.shared, ctx.link = shared, link
        ctx.due = None if lifetime is None else lifetime.begin()
        return weights

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        nodes = None  # behind a shared node are those its gradients are for
        if ctx.shared is not None:
            nodes = (ctx.next_functions[0], *ctx.shared.node().next_functions)
        queries, keys, values, w_v, table, keys_max, valid_lens, seed, weights = saved(ctx, nodes)
        tensors = (queries, keys, table, keys_max, values, w_v, valid_lens, seed, weights)
        needed, grad_context = list(ctx.needs_input_grad[:4]), ctx.link.take()
        needed[2] = needed[2] and grad_context is not None
        grads = (grad_context, grad_weights)
        results = gradients(ctx, tensors, ctx.attend_backward, needed, *grads)
        after_backward(ctx)
        if ctx.due is not None and ctx.due.after_backward():
            ctx.shared = None
        return (*results, None, None, None, None, None)


# The weights; with queries, keys, values, w_v, the other inputs, backend, shared node, lifetime and
# link.
attend_recorded: Callable[..., Tensor] = _Attend.apply
attend_op: Callable[..., tuple[Tensor, Tensor]] = torch.ops.bahdanau_fast.attend.default
# The same past OpOverload's __call__, for eager calls.
_attend_now: Callable[..., tuple[Tensor, Tensor]] = torch.ops.bahdanau_fast.attend.default._op
exp_keys_op: Callable[[Tensor, bool], tuple[Tensor, Tensor]]
exp_keys_op = torch.ops.bahdanau_fast.exp_keys.default
exp_keys_now: Callable[[Tensor, bool], tuple[Tensor, Tensor]]
exp_keys_now = torch.ops.bahdanau_fast.exp_keys.default._op
# A fingerprint of the bytes of up to three CPU tensors, keyed anew in each process.
fingerprint: Callable[[Tensor, Tensor | None, Tensor | None], tuple[int, int]]
fingerprint = torch.ops.bahdanau_fast.fingerprint.default._op
_backward_op = torch.ops.bahdanau_fast.attend_backward.default
_backward_queries_op = torch.ops.bahdanau_fast.attend_backward_queries.default
# What eager calls run: forward and backward of each backend, the CPU's behind its dispatch key.
implementations: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Any]]]
implementations = {"cpu": (_attend_now, _backward_op)}
# Those of them that stand behind no dispatch key.
without_key: set[str] = set()


def implement(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    dispatch_key: str | None,
) -> None:
    """Take in a backend written in Python.

    Args:
        name: of the backend.
        forward: with the arguments and results of the operator ``attend``.
        backward: likewise of ``attend_backward``.
        dispatch_key: of the tensors it serves where the operators themselves are called (compiled
            code, say); None for a backend that is only called by name.
    """
    implementations[name] = (forward, backward)
    if dispatch_key is None:
        without_key.add(name)
    else:
        library.impl("attend", forward, dispatch_key)
        library.impl("attend_backward", backward, dispatch_key)
