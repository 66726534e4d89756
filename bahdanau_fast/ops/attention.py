"""The operators of attention.

    score[b,i,j] = w_v . act(W_q queries[b,i] + W_k keys[b,j] + bias + W_f features[b,j])

===========================  ===================================================================
``exp_keys``                 table of exp(2 c) (or expm1(2 c) where every c is small) and max|c| per
                             row; ``precise`` where gradients may be asked for
``attention``                context, and weights in no less than fp32, or ``narrow``, in the dtype
                             of the context; without ``w_q`` or ``w_k`` queries or keys (B,T,H) are
                             projected. ``precise`` where gradients may be asked for
``attention.recorded``       and what backward takes: how many keys the lengths leave, int32 of
                             their shape, without a mask; the projected queries; on the CPU the
                             projected keys. What there is not of these is (0,)
``attention_backward``       the gradients, from weights in either dtype; what is projected inside
                             and not given is projected again. ``attention_backward.onto`` adds that
                             of projected keys to a sum
``attend_backward_queries``  that of projected queries alone, with what the others can be taken from
                             later: gradients of the scores, and the weights after dropout (empty
                             without); without features
``attend_backward_keys``     the others, of many steps at once, from those
``attend_scores``            the scores of projected queries and keys, in no less than fp32
``attend_scores_backward``   their gradients
``fingerprint``              two numbers that stand for the bytes of keys, weight and bias in this
                             process
===========================  ===================================================================

Matrix libraries project more than a few rows faster: on the CPU ``attention`` is given raw inputs
where a call costs more than what it computes, and on GPUs, where it takes their products itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.checks import ACTIVATIONS
from bahdanau_fast.ops.operator import Attention, Named, Operator
from bahdanau_fast.ops.second_derivatives import differentiate_again
from bahdanau_fast.reference import Inside

__all__ = [
    "NEED",
    "attend_scores",
    "attention",
    "attention_backward",
    "attention_gradients",
    "exp_keys",
    "fingerprint",
    "gradient_like",
    "inside_of",
    "needs_of",
]

#: What ``attention`` is differentiated by, in its order.
INPUTS = ("queries", "keys", "values", "w_v", "w_q", "w_k", "bias", "features", "w_f")
#: Bits of `needs`: which gradients a backward is to compute.
NEED = {name: 1 << place for place, name in enumerate(INPUTS)}

_INPUTS = "Tensor queries, Tensor keys, Tensor values, Tensor w_v"
_PROJECTIONS = "Tensor? w_q=None, Tensor? w_k=None, Tensor? bias=None"
TABLE = "Tensor? table=None, Tensor? keys_max=None"
LENS = "Tensor? valid_lens=None, Tensor? mask=None"
_INSIDE = "Tensor? features=None, Tensor? w_f=None"
#: A number for the place in :data:`checks.ACTIVATIONS`.
ACTIVATION = "int activation=0, float negative_slope=0.01"
DROPOUT = "Tensor? seed=None, float dropout_p=0.0"
_REST = f"{_INSIDE}, {LENS}, {TABLE}, {DROPOUT}, {ACTIVATION}"
_GRADS = "Tensor? grad_context, Tensor? grad_weights"
_GRADIENTS = f"({', '.join(f'Tensor grad_{name}' for name in INPUTS)})"


def needs_of(inputs: Sequence[str], needed: Sequence[bool]) -> int:
    """The bits of `needs` for these inputs."""
    return sum(NEED[name] for name, need in zip(inputs, needed, strict=True) if need)


def inside_of(named: Named) -> Inside:
    """What a score has inside, from the arguments of an operator."""
    activation = ACTIVATIONS[named["activation"]]
    return Inside(named.get("features"), named["w_f"], activation, named["negative_slope"])


# ---- shapes ----


def gradient_like(tensor: Tensor, needed: int | bool) -> Tensor:
    """An empty gradient of a tensor; (0,) where it is not needed."""
    return tensor.new_empty(tensor.shape if needed else (0,))


def _gradients_fake(*names: str) -> Callable[..., list[Tensor]]:
    """Shapes of the gradients of these arguments, as the kernels give them."""

    def fake(needs: int, **named: Any) -> list[Tensor]:
        made: list[Tensor] = []
        for name in names:
            tensor, needed = named.get(name), needs & NEED[name]
            if tensor is None:
                made.append(made[0].new_empty((0,)))
            elif name == "features" and needed:  # summed over neighbouring keys
                made.append(tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2))
            else:
                made.append(gradient_like(tensor, needed))
        return made

    return fake


@functools.cache
def _most_in_fp64(precise: bool) -> int:
    """The elements (B,Tk,H) up to which fp32 keys get a table in fp64."""
    most: int = importlib.import_module("bahdanau_fast._C_cpu").most_table_elements_in_fp64(precise)
    return most


def _exp_keys_fake(keys: Tensor, precise: bool) -> tuple[Tensor, Tensor]:
    batch, keys_len, hidden = keys.shape
    in_double = keys.dtype == torch.float64 or (
        keys.dtype == torch.float32 and batch * keys_len * hidden <= _most_in_fp64(precise)
    )
    dtype, per_line = (torch.float64, 8) if in_double else (torch.float32, 16)
    width = (hidden + per_line - 1) // per_line * per_line  # whole 64-byte lines
    table = keys.new_empty((batch, keys_len, width), dtype=dtype)
    return table, keys.new_empty((batch,), dtype=dtype)


def attend_fake(
    queries: Tensor, values: Tensor, need_weights: bool = True, narrow: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Context and weights of any operator that attends."""
    batch, queries_len = queries.shape[:2]
    keys_len, features = values.shape[1:]
    weights = (batch, queries_len, keys_len) if need_weights else (0,)
    dtype = queries.dtype if narrow else torch.promote_types(queries.dtype, torch.float32)
    context = queries.new_empty((batch, queries_len, features))
    return context, queries.new_empty(weights, dtype=dtype)


def _attention_fake(queries: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    # A tensor of the meta device among others brings a call here, where nothing else refuses it.
    for name, other in named.items():
        if isinstance(other, Tensor) and other.device != queries.device:
            checks.reject(ValueError, name, "be on the device of queries", other.device)
    return attend_fake(queries, **named)


def _recorded_fake(**named: Any) -> tuple[Tensor, ...]:
    queries, keys, lens = named["queries"], named["keys"], named["valid_lens"]
    counts = (0,) if lens is None or named["mask"] is not None else lens.shape
    kept_keys = named["w_k"] if keys.device.type == "cpu" else None
    projected = (
        x.new_empty((0,) if w is None else (*x.shape[:2], w.shape[0]))
        for x, w in ((queries, named["w_q"]), (keys, kept_keys))
    )
    counted = queries.new_empty(counts, dtype=torch.int32)
    return (*_attention_fake(**named), counted, *projected)


def _backward_queries_fake(
    queries: Tensor, weights: Tensor, dropout_p: float, needed: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dropped = gradient_like(weights, dropout_p > 0.0)
    return gradient_like(queries, needed), gradient_like(weights, True), dropped


def _scores_fake(queries: Tensor, keys: Tensor, **_: Any) -> Tensor:
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return queries.new_empty((*queries.shape[:2], keys.shape[1]), dtype=dtype)


# ---- gradients ----


def _scores_of(named: Named) -> tuple[Tensor]:
    inputs: Any = (named.get(name) for name in ("queries", "keys", "w_q", "w_k", "w_v"))
    inside = inside_of(named)._asdict()
    return (reference.additive_scores(*inputs, bias=named.get("bias"), **inside),)


def _scores_gradients(
    saved: Sequence[Tensor], numbers: Sequence[Any], asked: tuple[bool, ...], grads: Any
) -> Sequence[Tensor | None]:
    if torch.is_grad_enabled():

        def scores(*tensors: Any) -> tuple[Tensor]:
            return _scores_of(attend_scores.named(*tensors, *numbers))

        return differentiate_again(scores, saved, asked, grads)
    needs = needs_of(_SCORED, asked)
    found = attend_scores_backward.overload(grads[0], needs, *saved, *numbers)
    return [grad if need else None for grad, need in zip(found, asked, strict=True)]


def _needing(name: str, named: Named) -> tuple[str, ...]:
    """The inputs whose gradients need the value of one of them."""
    through = tuple(other for other in INPUTS if other not in ("values", "w_v"))
    again = named["keys"].device.type != "cpu"  # keys are projected again
    weight = {"queries": "w_q", "keys": "w_k", "w_q": "queries", "w_k": "keys"}.get(name)
    if name == "w_v":
        return through
    if name == "bias" and not again:
        return ()
    if weight is not None and named[weight] is not None and not (again and weight in _OF_KEYS):
        return (weight,)
    return (*through, "w_v")


_OF_KEYS = ("keys", "w_k")


def _gradients(
    saved: Sequence[Any],
    numbers: Sequence[Any],
    needs: int,
    grads: Sequence[Tensor | None],
    backend: str | None,
    shared: Any,
) -> Sequence[Tensor | None]:
    count = len(attention.tensors)
    tensors, (weights, *projected) = saved[:count], saved[count:]
    is_left = shared is not None and tensors[7] is None and numbers[1] == 0
    if not (is_left and shared.is_awaited()):
        results = (weights, *(projected or (None, None)))
        given = (*numbers[:3], numbers[5])
        return attention_gradients(results, tensors, given, needs, grads, backend, shared)
    of_projected = *tensors[:4], *tensors[9:], numbers[0]
    grad_queries, grad_scores, dropped = attend_backward_queries.now(
        weights, *grads, bool(needs & 1), *of_projected
    )
    # Detached: a backward that fails half way leaves it there, and no graph is to hold itself.
    dropped = dropped if numbers[0] > 0.0 else weights.detach()
    lens, mask = tensors[9:11]
    shared.left().steps.append((tensors[0], dropped, lens, mask, grads[0], grad_scores))
    return (grad_queries, *[None] * 8)


def attention_gradients(
    results: Sequence[Any],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[Any],
    needs: int,
    grads: Sequence[Tensor | None],
    backend: str | None,
    shared: Any,
) -> Sequence[Tensor | None]:
    """The nine gradients, those of keys and values added to the sums of a shared node if there are.

    From weights, projected queries and keys; ``tensors`` of ``attention``; ``dropout_p`` and the
    numbers of its backward; bits of :data:`NEED`; the gradients of context and weights.
    """
    left = shared.left() if shared is not None and shared.is_awaited() else None
    of_keys, of_values = NEED["keys"], NEED["values"]
    found: Sequence[Any]
    if left is not None and grads[0] is not None and needs & of_values and numbers[0] == 0.0:
        left.weights.append(results[0].detach())
        left.contexts.append(grads[0])
        needs &= ~of_values
    if left is not None and left.keys is not None:
        given = results[0], *grads[:2], needs & ~of_keys, left.keys
        found = attention_backward_onto.overload(*given, *tensors[:4], *tensors[7:], *numbers[:3])
    else:
        run = attention_backward.kernel(backend)
        found = run(*results, *grads[:2], needs, *tensors, *numbers)
        if left is None:
            return found
        left.keys = found[1] if needs & of_keys else None
    return [found[0], None, found[2] if needs & of_values else None, *found[3:]]


exp_keys = Operator(
    "exp_keys(Tensor keys, bool precise=True) -> (Tensor table, Tensor keys_max)", _exp_keys_fake
)
fingerprint = Operator(
    "fingerprint(Tensor keys, Tensor? weight=None, Tensor? bias=None) -> (int, int)",
    lambda **_: (0, 0),
)
_ATTENTION = (
    f"({_INPUTS}, {_PROJECTIONS}, {_REST}, bool need_weights=True, bool precise=True, "
    "int backend=0, bool narrow=False) -> (Tensor context, Tensor weights"
)
_RECORDED = "Tensor counts, Tensor projected_queries, Tensor projected_keys"
attention = Attention(
    f"attention{_ATTENTION})",
    _attention_fake,
    INPUTS,
    _needing,
    _scores_of,
    _gradients,
    (f"attention.recorded{_ATTENTION}, {_RECORDED})", _recorded_fake),
)
attention_backward = Operator(
    "attention_backward(Tensor weights, Tensor? projected_queries, Tensor? projected_keys, "
    f"{_GRADS}, int needs, {_INPUTS}, {_PROJECTIONS}, {_REST}, int backend=0) -> {_GRADIENTS}",
    _gradients_fake(*INPUTS),
)
attention_backward_onto = Operator(
    f"attention_backward.onto(Tensor weights, {_GRADS}, int needs, Tensor(a!) onto, {_INPUTS}, "
    f"{_REST}) -> {_GRADIENTS}",
    _gradients_fake(*INPUTS),
)
attend_backward_queries = Operator(
    f"attend_backward_queries(Tensor weights, {_GRADS}, bool needed, {_INPUTS}, {LENS}, {TABLE}, "
    f"{DROPOUT}) -> "
    "(Tensor grad_queries, Tensor grad_scores, Tensor dropped)",
    _backward_queries_fake,
)
attend_backward_keys = Operator(
    "attend_backward_keys(Tensor weights, Tensor? grad_context, Tensor grad_scores, int needs, "
    f"{_INPUTS}, {LENS}, {TABLE}) -> (Tensor grad_keys, Tensor grad_values, Tensor grad_w_v)",
    _gradients_fake("keys", "values", "w_v"),
)
_SCORED = ("queries", "keys", "w_v", "features", "w_f")
_SCORES = f"Tensor queries, Tensor keys, Tensor w_v, {_INSIDE}, {ACTIVATION}, int backend=0"
attend_scores = Operator(f"attend_scores({_SCORES}) -> Tensor", _scores_fake)
attend_scores_backward = Operator(
    f"attend_scores_backward(Tensor grad_scores, int needs, {_SCORES}) -> (Tensor grad_queries, "
    "Tensor grad_keys, Tensor grad_w_v, Tensor grad_features, Tensor grad_w_f)",
    _gradients_fake(*_SCORED),
)
attend_scores.differentiate(len(_SCORED), _scores_gradients)
