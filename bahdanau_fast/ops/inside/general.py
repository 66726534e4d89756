"""Operators for scores with features or another activation inside, and for scores themselves.

    score[b,i,j] = w_v . act(queries[b,i] + keys[b,j] + W_f features[b,j])

``general_attend`` goes on to weights and context as ``attend`` does; ``general_scores`` stops here.
Activations are numbers: the places of :data:`checks.ACTIVATIONS`. The gradients of features and of
``w_f`` come from the pass that gives those of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.checks import ACTIVATIONS
from bahdanau_fast.ops import TAGS, library, weights_dtype
from bahdanau_fast.ops.again import attend_again, differentiate_again
from bahdanau_fast.ops.context import Link
from bahdanau_fast.reference import Inside

__all__ = [
    "attend_backward",
    "attend_fake",
    "attend_inside",
    "inside_of",
    "numbers",
    "scores_inside",
]

_INSIDE = "Tensor? features, Tensor? w_f, int activation, float negative_slope"
_ATTEND = (
    "Tensor queries, Tensor keys, Tensor values, Tensor w_v, Tensor? valid_lens, "
    f"{_INSIDE}, Tensor? seed, float dropout_p"
)
_SCORES = f"Tensor queries, Tensor keys, Tensor w_v, {_INSIDE}"
library.define(f"general_attend({_ATTEND}) -> (Tensor context, Tensor weights)", tags=TAGS)
_ATTEND_BACKWARD = f"{_ATTEND}, Tensor weights, Tensor? grad_context, Tensor? grad_weights"
_OF_INPUTS = (
    "(Tensor grad_queries, Tensor grad_keys, Tensor grad_values, Tensor grad_w_v, "
    "Tensor grad_features, Tensor grad_w_f)"
)
library.define(f"general_attend_backward({_ATTEND_BACKWARD}, int needs) -> {_OF_INPUTS}", tags=TAGS)
# The same, which adds the gradient of the keys to a sum.
library.define(
    f"general_attend_backward_onto({_ATTEND_BACKWARD}, int needs, Tensor(a!)? onto) -> "
    f"{_OF_INPUTS}",
    tags=TAGS,
)
library.define(f"general_scores({_SCORES}) -> Tensor", tags=TAGS)
library.define(
    f"general_scores_backward({_SCORES}, Tensor grad_scores, int needs) -> (Tensor grad_queries, "
    "Tensor grad_keys, Tensor grad_w_v, Tensor grad_features, Tensor grad_w_f)",
    tags=TAGS,
)
_attend_op = torch.ops.bahdanau_fast.general_attend.default
_attend_backward_op = torch.ops.bahdanau_fast.general_attend_backward.default
_attend_backward_onto_op = torch.ops.bahdanau_fast.general_attend_backward_onto.default
_scores_op = torch.ops.bahdanau_fast.general_scores.default
_scores_backward_op = torch.ops.bahdanau_fast.general_scores_backward.default

# Where the differentiable inputs are among the arguments, and their bits in `needs`.
_OF_ATTEND = {0: 1, 1: 2, 2: 4, 3: 8, 5: 16, 6: 32}
_OF_SCORES = {0: 1, 1: 2, 2: 8, 3: 16, 4: 32}


def attend_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Results of the right shapes; the first inputs are queries, keys and values."""
    queries, _, values = inputs[:3]
    batch, queries_len, _ = queries.shape
    _, keys_len, features = values.shape
    return queries.new_empty((batch, queries_len, features)), queries.new_empty(
        (batch, queries_len, keys_len), dtype=weights_dtype(queries.dtype)
    )


def _scores_fake(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    shape = (*queries.shape[:2], keys.shape[1])
    return queries.new_empty(shape, dtype=weights_dtype(queries.dtype))


def _attend_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(inputs, _OF_ATTEND)


def _attend_backward_onto_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(inputs[:-1], _OF_ATTEND)


def _scores_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(inputs, _OF_SCORES)


def _gradients_fake(inputs: Sequence[Any], places: dict[int, int]) -> tuple[Tensor, ...]:
    made, needs = [], inputs[-1]
    for at, bit in places.items():
        tensor = inputs[at]
        if tensor is None:
            made.append(inputs[0].new_empty((0,), dtype=torch.float32))
        elif not needs & bit:
            made.append(tensor.new_empty((0,)))
        elif bit == _OF_ATTEND[5]:  # the kernels sum those of a feature over neighbouring keys
            made.append(tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2))
        else:
            made.append(tensor.new_empty(tensor.shape))
    return tuple(made)


def _setup(places: dict[int, int]) -> Callable[..., None]:
    """What a call leaves behind for its backward; ``places`` are those of the inputs."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        is_tensor = [x is None or isinstance(x, Tensor) for x in inputs]
        weights = output[1:] if isinstance(output, tuple) else ()
        tensors = [x for x, tensor in zip(inputs, is_tensor, strict=True) if tensor]
        ctx.save_for_backward(*tensors, *weights)
        ctx.inputs = [None if tensor else x for x, tensor in zip(inputs, is_tensor, strict=True)]
        ctx.is_tensor, ctx.places = is_tensor, places
        ctx.set_materialize_grads(False)

    return setup_context


def _inputs(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """The arguments of a call again, and what it left behind beside them."""
    saved = iter(ctx.saved_tensors)
    inputs = [
        next(saved) if tensor else x for x, tensor in zip(ctx.inputs, ctx.is_tensor, strict=True)
    ]
    return inputs, list(saved)


def _backward(
    ctx: Any, operator: Callable[..., tuple[Tensor, ...]], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments."""
    inputs, left = _inputs(ctx)
    found: list[Tensor | None] = [None] * len(inputs)
    if all(grad is None for grad in grads):
        return tuple(found)
    needed = [bool(ctx.needs_input_grad[at]) for at in ctx.places]
    if torch.is_grad_enabled():
        results: Sequence[Tensor | None]
        results = _again(inputs, left, [inputs[at] for at in ctx.places], needed, grads)
    else:
        needs = sum(bit for bit, need in zip(ctx.places.values(), needed, strict=True) if need)
        results = operator(*inputs, *left, *grads, needs)
    for at, result, need in zip(ctx.places, results, needed, strict=True):
        found[at] = result if need else None
    return tuple(found)


def inside_of(features: Any, w_f: Any, activation: int, negative_slope: float) -> Inside:
    """What :func:`numbers` was given."""
    return Inside(features, w_f, ACTIVATIONS[activation], negative_slope)


def _again(
    inputs: list[Any],
    left: list[Tensor],
    differentiated: list[Any],
    needed: list[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again; of the scores where no weights were left."""

    def scores(queries: Tensor, keys: Tensor, *others: Any) -> tuple[Tensor]:
        *_, w_v, features, w_f = others
        inside = inside_of(features, w_f, *numbers_inside)
        return (reference.projected_scores(queries, keys, w_v, inside),)

    if not left:
        numbers_inside = inputs[5:]
        return differentiate_again(scores, differentiated, needed, grads)
    valid_lens, _, _, *numbers_inside, seed, dropout_p = inputs[4:]
    link = Link(inputs[2], seed, dropout_p)
    return attend_again(scores, differentiated, needed, left[0], valid_lens, link, grads)


def attend_backward(
    inputs: Sequence[Any],
    weights: Tensor,
    grad_context: Tensor | None,
    grad_weights: Tensor | None,
    needed: Sequence[bool],
    onto: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys, values, w_v, features and w_f; not differentiable again.

    Args:
        inputs: of ``general_attend``.
        weights: its second result.
        grad_context: gradient of its first result, or None.
        grad_weights: likewise of the second.
        needed: which gradients are wanted; the others are empty.
        onto: (B,Tk,H), a sum to which the gradient of the keys is added, in the place of a result.
    """
    needs = sum(bit for bit, need in zip(_OF_ATTEND.values(), needed, strict=True) if need)
    given = (*inputs, weights, grad_context, grad_weights, needs)
    found: tuple[Tensor, ...]
    found = _attend_backward_op(*given) if onto is None else _attend_backward_onto_op(*given, onto)
    return found


def _attend_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(ctx, _attend_backward_op, *grads)


def _scores_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(ctx, _scores_backward_op, grad)


_FAKES: dict[str, Callable[..., Any]] = {
    "general_attend": attend_fake,
    "general_attend_backward": _attend_backward_fake,
    "general_attend_backward_onto": _attend_backward_onto_fake,
    "general_scores": _scores_fake,
    "general_scores_backward": _scores_backward_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"bahdanau_fast::{_name}", _fake, lib=library)
torch.library.register_autograd(
    "bahdanau_fast::general_attend",
    _attend_backward,
    setup_context=_setup(_OF_ATTEND),
    lib=library,
)
torch.library.register_autograd(
    "bahdanau_fast::general_scores",
    _scores_backward,
    setup_context=_setup(_OF_SCORES),
    lib=library,
)


class _Attend(torch.autograd.Function):
    """The same for eager calls: gives the weights; the context gets a node behind them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *given, link = inputs
        with torch._C._AutoDispatchBelowAutograd():
            output = _attend_op(*given)
        _setup(_OF_ATTEND)(ctx, tuple(given), output)
        ctx.link = link
        link.context, weights = output
        made: Tensor = weights
        return made

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_context = ctx.link.take()
        found = list(_attend_backward(ctx, grad_context, grad_weights))
        if grad_context is None:
            found[2] = None  # that of the values is the context's
        return (*found, None)


def attend_inside(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor,
    valid_lens: Tensor | None,
    inside: Inside,
    seed: Tensor | None,
    dropout_p: float,
    traced: bool,
) -> tuple[Tensor | None, Tensor, Link | None]:
    """Context (B,Tq,Dv) and weights (B,Tq,Tk), these fp64 for fp64 and else fp32; and None.

    Of a recorded call the context is in the link, which is the third result.

    Args:
        queries: (B,Tq,H), projected.
        keys: (B,Tk,H), projected.
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        inside: features and activation, of the dtype of the queries.
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
        traced: the call is traced: it has to be the operator itself.
    """
    given = (queries, keys, values, w_v, valid_lens, *numbers(inside), seed, dropout_p)
    if traced or not checks.needs_gradient(*given[:4], *given[5:7]):
        return (*_attend_op(*given), None)
    link = Link(values, seed, dropout_p)
    return None, _Attend.apply(*given, link), link  # type: ignore[no-untyped-call]


def scores_inside(queries: Tensor, keys: Tensor, w_v: Tensor, inside: Inside) -> Tensor:
    """The scores (B,Tq,Tk), fp64 for fp64 and else fp32; arguments of :func:`attend_inside`."""
    scores: Tensor = _scores_op(queries, keys, w_v, *numbers(inside))
    return scores


def numbers(inside: Inside) -> tuple[Any, ...]:
    """``inside`` as the operators take it."""
    features, w_f, activation, negative_slope = inside
    return features, w_f, ACTIVATIONS.index(activation), float(negative_slope)
