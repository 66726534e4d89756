"""The operators on projected queries and keys.

    score[b,i,j] = w_v . act(queries[b,i] + keys[b,j] + W_f features[b,j])

===========================  ===================================================================
``exp_keys``                 table of exp(2 c) (or expm1(2 c) where every c is small) and max|c| per
                             row; ``precise`` where gradients may be asked for
``attend``                   context, and weights in no less than fp32, or ``narrow``, in the dtype
                             of the context; backward takes either
``attend.counted``           the same on GPUs, and how many keys the lengths leave, int32 of their
                             shape, which backward takes for them; with lengths and without a mask
``attend_backward``          the gradients of ``attend``; ``attend_backward.onto`` adds that of the
                             keys to a sum
``attend_backward_queries``  that of the queries alone, with what the others can be taken from
                             later: gradients of the scores, and the weights after dropout (empty
                             without); without features
``attend_backward_keys``     the others, of many steps at once, from those
``attend_scores``            the scores, in no less than fp32
``attend_scores_backward``   their gradients
``fingerprint``              two numbers that stand for the bytes of keys, weight and bias in this
                             process
===========================  ===================================================================
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import reference
from bahdanau_fast.checks import ACTIVATIONS
from bahdanau_fast.ops.operator import NUMBERS, Attention, Named, Operator
from bahdanau_fast.ops.second_derivatives import differentiate_again
from bahdanau_fast.reference import Inside

__all__ = [
    "NEED",
    "attend",
    "attend_backward",
    "attend_counted",
    "attend_gradients",
    "attend_scores",
    "exp_keys",
    "fingerprint",
    "gradient_like",
    "inside_of",
    "needs_of",
    "weights_dtype",
]

#: Bits of `needs`: which gradients a backward is to compute.
NEED = {"queries": 1, "keys": 2, "values": 4, "w_v": 8, "features": 16, "w_f": 32}

_INPUTS = "Tensor queries, Tensor keys, Tensor values, Tensor w_v"
TABLE = "Tensor? table=None, Tensor? keys_max=None"
LENS = "Tensor? valid_lens=None, Tensor? mask=None"
_INSIDE = "Tensor? features=None, Tensor? w_f=None"
#: A number for the place in :data:`checks.ACTIVATIONS`.
ACTIVATION = "int activation=0, float negative_slope=0.01"
DROPOUT = "Tensor? seed=None, float dropout_p=0.0"
_ATTEND = f"{_INPUTS}, {_INSIDE}, {LENS}, {TABLE}, {DROPOUT}, {ACTIVATION}"
_FORWARD = f"{_ATTEND}, bool need_weights=True, bool precise=True, int backend=0, bool narrow=False"
GRADS = "Tensor weights, Tensor? grad_context, Tensor? grad_weights"
_GRADIENTS = (
    "(Tensor grad_queries, Tensor grad_keys, Tensor grad_values, Tensor grad_w_v, "
    "Tensor grad_features, Tensor grad_w_f)"
)


def weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the operators give attention weights in where they are not ``narrow``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def _gradients_like(needs: int, **tensors: Tensor | None) -> list[Tensor]:
    """Of each tensor, as the kernels give them."""
    made: list[Tensor] = []
    for name, tensor in tensors.items():
        needed = needs & NEED[name]
        if tensor is None:
            made.append(torch.empty((0,), dtype=torch.float32, device=made[0].device))
        elif name == "features" and needed:  # summed over neighbouring keys
            made.append(tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2))
        else:
            made.append(gradient_like(tensor, needed))
    return made


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
    dtype = queries.dtype if narrow else weights_dtype(queries.dtype)
    return queries.new_empty((batch, queries_len, features)), queries.new_empty(
        weights, dtype=dtype
    )


def _counted_fake(valid_lens: Tensor, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = valid_lens.new_empty(valid_lens.shape, dtype=torch.int32)
    return *attend_fake(**named), counts


def _backward_fake(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_v: Tensor,
    features: Tensor | None,
    w_f: Tensor | None,
    needs: int,
    **_: Any,
) -> list[Tensor]:
    inside: dict[str, Any] = {"features": features, "w_f": w_f}
    return _gradients_like(needs, queries=queries, keys=keys, values=values, w_v=w_v, **inside)


def _backward_queries_fake(
    queries: Tensor, weights: Tensor, dropout_p: float, needed: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dropped = gradient_like(weights, dropout_p > 0.0)
    return gradient_like(queries, needed), gradient_like(weights, True), dropped


def _backward_keys_fake(
    keys: Tensor, values: Tensor, w_v: Tensor, needs: int, **_: Any
) -> list[Tensor]:
    return _gradients_like(needs, keys=keys, values=values, w_v=w_v)


def _scores_fake(queries: Tensor, keys: Tensor, **_: Any) -> Tensor:
    shape = (*queries.shape[:2], keys.shape[1])
    return queries.new_empty(shape, dtype=weights_dtype(queries.dtype))


def _scores_backward_fake(
    queries: Tensor,
    keys: Tensor,
    w_v: Tensor,
    features: Tensor | None,
    w_f: Tensor | None,
    needs: int,
    **_: Any,
) -> list[Tensor]:
    inside: dict[str, Any] = {"features": features, "w_f": w_f}
    return _gradients_like(needs, queries=queries, keys=keys, w_v=w_v, **inside)


# ---- gradients ----


def _scores_of(named: Named) -> tuple[Tensor]:
    inside = inside_of(named)
    return (reference.projected_scores(named["queries"], named["keys"], named["w_v"], inside),)


def _gradients(
    named: Named,
    needed: list[bool],
    grads: Sequence[Tensor | None],
    shared: Any = None,
) -> Sequence[Tensor | None]:
    is_plain = named["features"] is None and named["activation"] == 0
    if not (is_plain and shared is not None and shared.is_awaited()):
        needs = dict(zip(attend.inputs, needed, strict=True))
        return attend_gradients(named, needs, grads, shared)
    weights, (grad_context, grad_weights) = named["weights"], grads
    given = [named[name] for name in attend_backward_queries.names[4:]]
    grad_queries, grad_scores, dropped = attend_backward_queries.now(
        weights, grad_context, grad_weights, needed[0], *given
    )
    # Detached: a backward that fails half way leaves it there, and no graph is to hold itself.
    dropped = dropped if named["dropout_p"] > 0.0 else weights.detach()
    lens, mask = named["valid_lens"], named["mask"]
    shared.pending.add(named["queries"], dropped, lens, mask, grad_context, grad_scores)
    return (grad_queries, *[None] * 5)


def attend_gradients(
    named: Named, needs: dict[str, bool], grads: Sequence[Tensor | None], shared: Any = None
) -> list[Tensor | None]:
    """The six gradients, those of keys and values added to the sums of a shared node if there are.

    Args:
        named: arguments and results of ``attend``; what is missing is None.
        needs: which gradients are needed.
        grads: of context and weights.
        shared: the :class:`SharedNode` of the call, or None.
    """
    weights, (grad_context, grad_weights, *_) = named["weights"], grads
    sums = onto = None
    if shared is not None and shared.is_awaited():
        sums = shared.pending.sums()
        onto = sums.keys
        if needs["values"] and grad_context is not None and named["dropout_p"] == 0.0:
            sums.add(weights.detach(), grad_context)
            needs = {**needs, "values": False}
    asked = needs if onto is None else {**needs, "keys": False}
    given = (weights, grad_context, grad_weights, needs_of(tuple(asked), tuple(asked.values())))
    arguments = [named.get(name) for name in attend_backward_onto.names[5:]]
    if onto is None:
        backend = named.get("backend", 0)
        run = attend_backward.now
        # An eager call goes straight to a backend in Python; a compiler has to meet the operator.
        if backend == NUMBERS["triton"] and type(weights) is Tensor:
            run = attend_backward.in_python["triton"]
        found = list(run(*given, *arguments, backend))
    else:
        found = list(attend_backward_onto.overload(*given, onto, *arguments))
    if sums is not None and needs["keys"]:
        sums.keys, found[1] = found[1] if onto is None else onto, None
    if not needs["values"]:
        found[2] = None
    return found


exp_keys = Operator(
    "exp_keys(Tensor keys, bool precise=True) -> (Tensor table, Tensor keys_max)", _exp_keys_fake
)
fingerprint = Operator(
    "fingerprint(Tensor keys, Tensor? weight=None, Tensor? bias=None) -> (int, int)",
    lambda **_: (0, 0),
)
# The inputs whose gradients go through the activation, which backward computes again.
_THROUGH = ("queries", "keys", "w_v", "features", "w_f")
attend = Attention(
    f"attend({_FORWARD}) -> (Tensor context, Tensor weights)",
    attend_fake,
    {
        "queries": _THROUGH,
        "keys": _THROUGH,
        "values": _THROUGH,
        "w_v": ("queries", "keys", "features", "w_f"),
        "features": _THROUGH,
        "w_f": _THROUGH,
    },
    _scores_of,
    _gradients,
)
attend_counted = Operator(
    f"attend.counted({_FORWARD}) -> (Tensor context, Tensor weights, Tensor counts)", _counted_fake
)
attend_backward = Operator(
    f"attend_backward({GRADS}, int needs, {_ATTEND}, int backend=0) -> {_GRADIENTS}",
    _backward_fake,
)
attend_backward_onto = Operator(
    f"attend_backward.onto({GRADS}, int needs, Tensor(a!) onto, {_ATTEND}) -> {_GRADIENTS}",
    _backward_fake,
)
attend_backward_queries = Operator(
    f"attend_backward_queries({GRADS}, bool needed, {_INPUTS}, {LENS}, {TABLE}, {DROPOUT}) -> "
    "(Tensor grad_queries, Tensor grad_scores, Tensor dropped)",
    _backward_queries_fake,
)
attend_backward_keys = Operator(
    "attend_backward_keys(Tensor weights, Tensor? grad_context, Tensor grad_scores, int needs, "
    f"{_INPUTS}, {LENS}, {TABLE}) -> (Tensor grad_keys, Tensor grad_values, Tensor grad_w_v)",
    _backward_keys_fake,
)
_SCORES = f"Tensor queries, Tensor keys, Tensor w_v, {_INSIDE}, {ACTIVATION}, int backend=0"
attend_scores = Operator(f"attend_scores({_SCORES}) -> Tensor", _scores_fake)
attend_scores_backward = Operator(
    f"attend_scores_backward(Tensor grad_scores, int needs, {_SCORES}) -> (Tensor grad_queries, "
    "Tensor grad_keys, Tensor grad_w_v, Tensor grad_features, Tensor grad_w_f)",
    _scores_backward_fake,
)


def _scores_gradients(
    named: Named, needed: list[bool], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    inputs = [named[name] for name in _SCORED]
    if torch.is_grad_enabled():

        def scores(*tensors: Tensor | None) -> tuple[Tensor]:
            return _scores_of({**named, **dict(zip(_SCORED, tensors, strict=True))})

        return differentiate_again(scores, inputs, needed, grads)
    numbers = [named[name] for name in ("activation", "negative_slope", "backend")]
    needs = needs_of(_SCORED, needed)
    found = attend_scores_backward.overload(grads[0], needs, *inputs, *numbers)
    return [grad if need else None for grad, need in zip(found, needed, strict=True)]


_SCORED = ("queries", "keys", "w_v", "features", "w_f")
attend_scores.differentiate(_SCORED, _scores_gradients)
