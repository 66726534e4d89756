"""Pooling without a query as one CPU operator, for eager calls.

    score[b,h,j] = w_v[h] . (tanh(W x[b,j] + b) * sigmoid(W_g x[b,j] + b_g)) + b_v[h]

===================  ===============================================================================
``pool``             pooled values (B,heads,Dv) and weights (B,heads,Tk), as ``attention`` its
                     context and weights: heads stand where queries do. Without ``w`` the keys
                     (B,Tk,H) have gone through the first layer, and ``gate`` (B,Tk,H) is what the
                     second has made of them
``pool.recorded``    and what backward takes: how many keys the lengths leave, int32 of their shape,
                     without a mask; what keys become in both layers. A result that does not apply
                     has shape (0,)
``pool_backward``    the gradients
===================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bahdanau_fast.ops.attention import DROPOUT, LENS, attend_fake, gradients_like, recorded_fake
from bahdanau_fast.ops.operator import AttentionOperator, Named, Operator, named_tuple
from bahdanau_fast.ops.pool_in_chunks import plain_scores, scores_of_sums

#: What ``pool`` is differentiated by, in its order.
INPUTS = ("keys", "w_v", "values", "b_v", "gate", "w", "b", "w_gate", "b_gate")
_LAYERS = ("keys", "w", "b", "w_gate", "b_gate")
_INPUTS = (
    "Tensor keys, Tensor w_v, Tensor values, Tensor? b_v=None, Tensor? gate=None, Tensor? w=None, "
    "Tensor? b=None, Tensor? w_gate=None, Tensor? b_gate=None"
)
_Grads = named_tuple("_Grads", INPUTS)


def _fake(keys: Tensor, w_v: Tensor, values: Tensor, narrow: bool, **_: Any) -> tuple[Tensor, ...]:
    heads = keys.new_empty((keys.shape[0], *w_v.shape))
    return attend_fake(heads, values, narrow=narrow)


def _recorded_fake(**named: Any) -> tuple[Tensor, ...]:
    keys = named["keys"]
    projections = (keys, named["w"]), (keys, named["w_gate"])
    return (*_fake(**named), *recorded_fake(keys, named["valid_lens"], named["mask"], *projections))


def _backward_fake(needs: int, **named: Any) -> tuple[Tensor, ...]:
    return gradients_like([named[name] for name in INPUTS], needs, named["keys"])


def _scores(named: Named) -> tuple[Tensor]:
    layers, scoring = ([named[name] for name in names] for names in (_LAYERS, ("w_v", "b_v")))
    if named["w"] is None:
        return (scores_of_sums(named["keys"], named["gate"], *scoring).transpose(1, 2),)
    return (plain_scores(*layers, *scoring),)


def _needing(name: str, named: Named) -> tuple[str, ...]:
    """The inputs whose gradients need the value of ``name``."""
    through = (*_LAYERS, "gate")
    products = {"keys": ("w", "w_gate"), "w": ("keys",), "w_gate": ("keys",)}
    if name in ("b_v", "b", "b_gate"):
        return ()
    if name in products and named["w"] is not None:
        return products[name]
    return through if name == "w_v" else (*through, "w_v")


def _gradients(
    arguments: Any, results: Sequence[Tensor], needs: int, grads: Sequence[Tensor | None], *_: Any
) -> Any:
    *inputs, _narrow = arguments
    weights, *sums = results
    return _Grads(*pool_backward.now(weights, *(sums or (None, None)), *grads, needs, *inputs))


_POOL = f"({_INPUTS}, {LENS}, {DROPOUT}, bool narrow=False) -> (Tensor pooled, Tensor weights"
pool = AttentionOperator(
    f"pool{_POOL})",
    _fake,
    INPUTS,
    _needing,
    _scores,
    _gradients,
    (f"pool.recorded{_POOL}, Tensor counts, Tensor projected, Tensor gate_sums)", _recorded_fake),
)
pool_backward = Operator(
    "pool_backward(Tensor weights, Tensor? projected, Tensor? gate_sums, Tensor? grad_pooled, "
    f"Tensor? grad_weights, int needs, {_INPUTS}, {LENS}, {DROPOUT}) -> "
    f"({', '.join(f'Tensor grad_{name}' for name in INPUTS)})",
    _backward_fake,
)
