"""The operators of attention.

    score[b,i,j] = w_v . act(W_q queries[b,i] + W_k keys[b,j] + bias + W_f features[b,j])

===========================  ===================================================================
``exp_keys``                 table of exp(2 c) (or expm1(2 c) where every c is small) and max|c| per
                             row; ``precise`` where gradients may be needed
``attention``                context, and weights in no less than fp32, or ``narrow``, in the dtype
                             of the context; without ``w_q`` or ``w_k`` queries or keys (B,T,H) are
                             projected. ``precise`` where gradients may be needed
``attention.recorded``       and what backward takes: how many keys the lengths leave, int32 of
                             their shape, without a mask; the projected queries; on the CPU the
                             projected keys. A result that does not apply has shape (0,)
``attention_backward``       the gradients, from weights in either dtype; projects again unless it
                             takes the projections. ``attention_backward.onto`` adds the gradient of
                             projected keys to a sum
``attend_backward_queries``  the gradient of projected queries alone, and the inputs of
                             ``attend_backward_keys``: gradients of the scores, and the weights
                             after dropout (empty without); without features
``attend_backward_keys``     the gradients of projected keys, values and w_v, of many steps at once
``attend_scores``            the scores of projected queries and keys, in no less than fp32
``attend_scores_backward``   their gradients
``fingerprint``              two numbers that stand for the bytes of keys, weight and bias in this
                             process
===========================  ===================================================================

Matrix libraries project more than a few rows faster: on the CPU ``attention`` takes raw inputs
where a call costs more than what it computes, and on GPUs, where it launches the same products.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, reference
from bahdanau_fast.checks import ACTIVATIONS
from bahdanau_fast.ops.operator import AttentionOperator, Named, Operator, named_tuple
from bahdanau_fast.ops.second_derivatives import differentiate_again
from bahdanau_fast.reference import ScoreTerms

#: What ``attention`` is differentiated by, in its order.
INPUTS = ("queries", "keys", "values", "w_v", "w_q", "w_k", "bias", "features", "w_f")
#: Bits of `needs`: which gradients a backward is to compute.
NEED = {name: 1 << index for index, name in enumerate(INPUTS)}
#: The gradients of these inputs.
InputGrads = named_tuple("InputGrads", INPUTS)

_INPUTS = "Tensor queries, Tensor keys, Tensor values, Tensor w_v"
_PROJECTIONS = "Tensor? w_q=None, Tensor? w_k=None, Tensor? bias=None"
TABLE = "Tensor? table=None, Tensor? keys_max=None"
LENS = "Tensor? valid_lens=None, Tensor? mask=None"
_INSIDE = "Tensor? features=None, Tensor? w_f=None"
#: The index in :data:`checks.ACTIVATIONS`.
ACTIVATION = "int activation=0, float negative_slope=0.01"
DROPOUT = "Tensor? seed=None, float dropout_p=0.0"
_REST = f"{_INSIDE}, {LENS}, {TABLE}, {DROPOUT}, {ACTIVATION}"
_GRADS = "Tensor? grad_context, Tensor? grad_weights"
_GRADIENTS = f"({', '.join(f'Tensor grad_{name}' for name in INPUTS)})"


def needs_of(inputs: Sequence[str], needed: Sequence[bool]) -> int:
    """The bits of `needs` for these inputs."""
    return sum(NEED[name] for name, need in zip(inputs, needed, strict=True) if need)


def terms_of(named: Named) -> ScoreTerms:
    """The terms of a score, from the arguments of an operator."""
    activation = ACTIVATIONS[named["activation"]]
    return ScoreTerms(named.get("features"), named["w_f"], activation, named["negative_slope"])


# ---- shapes ----


def gradient_like(tensor: Tensor, needed: int | bool) -> Tensor:
    """An empty gradient of a tensor; (0,) where it is not needed."""
    return tensor.new_empty(tensor.shape if needed else (0,))


def gradients_like(inputs: Sequence[Tensor | None], needs: int, like: Tensor) -> tuple[Tensor, ...]:
    """Empty gradients of inputs by the bits of ``needs``; (0,) of one that is None."""
    return tuple(
        like.new_empty((0,)) if x is None else gradient_like(x, needs >> i & 1)
        for i, x in enumerate(inputs)
    )


def recorded_fake(
    like: Tensor,
    valid_lens: Tensor | None,
    mask: Tensor | None,
    *projections: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, ...]:
    """What backward takes: counts of keys; rows by weights, (0,) where the weight is None."""
    counts = (0,) if valid_lens is None or mask is not None else valid_lens.shape
    return (
        like.new_empty(counts, dtype=torch.int32),
        *(x.new_empty((0,) if w is None else (*x.shape[:2], w.shape[0])) for x, w in projections),
    )


def _gradients_fake(*names: str) -> Callable[..., list[Tensor]]:
    """Shapes of the gradients of these arguments, as the kernels give them."""

    def fake(needs: int, **named: Any) -> list[Tensor]:
        grads: list[Tensor] = []
        for name in names:
            tensor, needed = named.get(name), needs & NEED[name]
            if tensor is None:
                grads.append(grads[0].new_empty((0,)))
            elif name == "features" and needed:  # summed over neighbouring keys
                grads.append(tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2))
            else:
                grads.append(gradient_like(tensor, needed))
        return grads

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


def _projects_again(keys: Tensor) -> bool:
    """Whether backward projects the keys again: only the CPU's kernels save them."""
    return keys.device.type != "cpu"


def _recorded_fake(**named: Any) -> tuple[Tensor, ...]:
    queries, keys = named["queries"], named["keys"]
    projections = (queries, named["w_q"]), (keys, None if _projects_again(keys) else named["w_k"])
    recorded = recorded_fake(queries, named["valid_lens"], named["mask"], *projections)
    return (*_attention_fake(**named), *recorded)


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
    terms = terms_of(named)._asdict()
    return (reference.additive_scores(*inputs, bias=named.get("bias"), **terms),)


def _scores_gradients(
    saved: Sequence[Tensor], numbers: Sequence[Any], needed: tuple[bool, ...], grads: Any
) -> Sequence[Tensor | None]:
    if torch.is_grad_enabled():

        def scores(*tensors: Any) -> tuple[Tensor]:
            return _scores_of(attend_scores.named(*tensors, *numbers))

        return differentiate_again(scores, saved, needed, grads)
    needs = needs_of(_SCORED, needed)
    input_grads = attend_scores_backward.overload(grads[0], needs, *saved, *numbers)
    return [grad if need else None for grad, need in zip(input_grads, needed, strict=True)]


def _needing(name: str, named: Named) -> tuple[str, ...]:
    """The inputs whose gradients need the value of ``name``."""
    through = tuple(other for other in INPUTS if other not in ("values", "w_v"))
    again = _projects_again(named["keys"])
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
    arguments: Any,
    results: Sequence[Any],
    needs: int,
    grads: Sequence[Tensor | None],
    backend: str | None,
    shared: Any,
) -> Any:
    plain_tanh = arguments.features is None and arguments.activation == 0
    if shared is None or not (plain_tanh and shared.is_awaited()):
        return attention_gradients(arguments, results, needs, grads, backend, shared)
    weights: Tensor = results[0]
    needs_queries = bool(needs & NEED["queries"])
    grad_queries, grad_scores, dropped = attend_backward_queries.now(
        weights, *grads, needs_queries, *_queries_arguments(arguments)
    )
    shared.left().steps.append(
        Step(
            queries=arguments.queries,
            # Detached: it stays after a backward that fails half way, and no graph may hold itself.
            weights=dropped if arguments.dropout_p > 0.0 else weights.detach(),
            lens=arguments.valid_lens,
            mask=arguments.mask,
            grad_context=grads[0],
            grad_scores=grad_scores,
        )
    )
    return InputGrads(grad_queries)


class Step(NamedTuple):
    """A call whose share of the gradients of keys, values and w_v is computed with other calls'."""

    queries: Tensor  # (B,Tq,H), projected
    weights: Tensor  # (B,Tq,Tk), after dropout
    lens: Tensor | None
    mask: Tensor | None
    grad_context: Tensor | None
    grad_scores: Tensor


def attention_gradients(
    arguments: Any,
    results: Sequence[Any],
    needs: int,
    grads: Sequence[Tensor | None],
    backend: str | None,
    shared: Any,
) -> Any:
    """The nine gradients; a shared node adds up the gradients of keys and values, None here.

    :data:`InputGrads` from the arguments of ``attention``; its results from the weights on, all or
    the weights alone; bits of :data:`NEED`; the gradients of context and weights.
    """
    weights, *projected = results
    grad_context, grad_weights, *_ = grads
    left = shared.left() if shared is not None and shared.is_awaited() else None
    needs_keys, needs_values = needs & NEED["keys"], needs & NEED["values"]
    deferrable = grad_context is not None and arguments.dropout_p == 0.0
    if left is not None and needs_values and deferrable:
        left.weights.append(weights.detach())
        left.contexts.append(grad_context)
        needs_values = 0
    needs = needs & ~(NEED["keys"] | NEED["values"]) | needs_values
    call: tuple[Any, ...]
    if left is not None and left.keys is not None:
        call = weights, grad_context, grad_weights, needs, left.keys, *_onto_arguments(arguments)
        input_grads = InputGrads._make(attention_backward_onto.overload(*call))
    else:
        call = weights, *(projected or (None, None)), grad_context, grad_weights, needs | needs_keys
        run = attention_backward.kernel(backend)
        input_grads = InputGrads._make(run(*call, *_backward_arguments(arguments)))
        if left is None:
            return input_grads
        left.keys = input_grads.keys if needs_keys else None
    return input_grads._replace(keys=None, values=input_grads.values if needs_values else None)


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
attention = AttentionOperator(
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
_backward_arguments = attention_backward.in_order(attention.names, after="needs")
_onto_arguments = attention_backward_onto.in_order(attention.names, after="onto")
_queries_arguments = attend_backward_queries.in_order(attention.names, after="needed")
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
