"""The backward operators by the Triton kernels: allocate, plan and launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import switches
from bahdanau_fast.backends.triton.call import KernelCall, Table, usual
from bahdanau_fast.backends.triton.launch import PlanCache, Steps
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.backward import (
    grad_softmax_kernel,
    grad_values_kernel,
    grad_weights_kernel,
)
from bahdanau_fast.kernels.grad_fourier import grad_fourier_kernel
from bahdanau_fast.kernels.grad_step import step_keys_kernel, step_sums_kernel, step_values_kernel
from bahdanau_fast.kernels.grad_tanh import grad_tanh_kernel
from bahdanau_fast.ops.attention import NEED

_OF_QUERIES = NEED["queries"] | NEED["w_q"]
_OF_KEYS = NEED["keys"] | NEED["w_k"] | NEED["bias"] | NEED["features"] | NEED["w_f"]


@PlanCache
def attention_backward(steps: Steps, *args: Any) -> tuple[Tensor, ...]:
    """The operator ``attention_backward``; see :mod:`ops.attention`."""
    weights, queries, keys, grad_context, grad_weights, needs, *inputs, _ = args
    call = KernelCall(steps, *inputs)
    sizes = call.batch, call.queries_len, call.keys_len
    call.check("weights", weights, sizes, torch.float32, call.dtype)
    call.check("grad_context", grad_context, (*sizes[:2], call.value_size), call.dtype)
    call.check("grad_weights", grad_weights, sizes, weights.dtype)
    # Where no weight is dropped a library multiplies, in 16 bits.
    by_kernel = call.precise or call.is_step or call.args["seed"] is not None
    by_library = not by_kernel and grad_context is not None and weights.dtype == call.dtype
    by_library &= 0 not in (*sizes, call.value_size)
    grads = _Gradients(call, needs, with_values=not by_library)
    if grads.through_scores:
        call.project(queries, keys)
    if 0 in sizes:
        grads.zero()
    else:
        of_context, of_weights = (
            None if x is None else call.rows(x) for x in (grad_context, grad_weights)
        )
        call.args |= {"weights": call.whole(weights), "grad_weights": of_weights}
        call.args["grad_context"] = of_context if call.value_size else None
        (_of_step if call.is_step else _of_many)(call, grads)
        if by_library and needs & NEED["values"]:
            grads.values = call.steps.make(_of_values, weights, grad_context)
    return grads.results(*inputs[:9])


@PlanCache
def attend_scores_backward(steps: Steps, *args: Any) -> tuple[Tensor, ...]:
    """The operator ``attend_scores_backward``."""
    grad_scores, needs, *inputs = args
    call = KernelCall.of_scores(steps, *inputs)
    sizes = call.batch, call.queries_len, call.keys_len
    call.check("grad_scores", grad_scores, sizes, torch.float32)
    grads = _Gradients(call, needs & ~NEED["values"])
    if 0 in sizes:
        grads.zero()
    elif grads.through_scores:
        call.args["weights"] = None
        (_through_keys if call.is_step else _grad_tanh)(call, grads, grad_scores)
    queries, keys, w_v, features, w_f, *_ = inputs
    results = grads.results(queries, keys, keys, w_v, None, None, None, features, w_f)
    return *results[:2], results[3], *results[7:]


class _Gradients:
    """Where gradients go, of projected queries and keys; None where they are not needed.

    Without ``with_values`` a library computes those, which are then set.
    """

    def __init__(self, call: KernelCall, needs: int, with_values: bool = True) -> None:
        self._call, self._needs = call, needs

        def new(needed: int, *shape: int) -> Tensor | None:
            return call.steps.new(*shape, dtype=call.dtype) if needs & needed else None

        self.queries = new(_OF_QUERIES, call.batch, call.queries_len, call.hidden)
        self.keys = new(_OF_KEYS, call.batch, call.keys_len, call.hidden)
        of_values = NEED["values"] if with_values else 0
        self.values = new(of_values, call.batch, call.keys_len, call.value_size)
        self.w_v = new(NEED["w_v"], *call.w_v.shape)
        self.through_scores = bool(needs & ~NEED["values"])

    def zero(self) -> None:
        for grad in (self.queries, self.keys, self.values, self.w_v):
            if grad is not None:
                self._call.steps.make(Tensor.zero_, grad)

    def results(self, *inputs: Any) -> tuple[Tensor, ...]:
        """All nine; those of what was multiplied as the backward of torch's linear makes them."""
        queries, keys, values, w_v, w_q, w_k, bias, features, w_f = inputs
        of_queries, of_keys, steps = self.queries, self.keys, self._call.steps
        none = steps.none(self._call.dtype)
        ways: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
            ("queries", queries, (of_queries,) if w_q is None else (torch.matmul, of_queries, w_q)),
            ("keys", keys, (of_keys,) if w_k is None else (torch.matmul, of_keys, w_k)),
            ("values", values, (self.values,)),
            ("w_v", w_v, (self.w_v,)),
            ("w_q", w_q, (_of_weight, of_queries, queries)),
            ("w_k", w_k, (_of_weight, of_keys, keys)),
            ("bias", bias, (torch.sum, of_keys, (0, 1))),
            ("features", features, (_of_features, of_keys, w_f)),
            ("w_f", features, (_of_weight, of_keys, features)),
        )

        def grad_of(name: str, source: Any, way: tuple[Any, ...]) -> Tensor:
            if source is None or not self._needs & NEED[name]:
                return none
            first, *rest = way
            return steps.make(first, *rest) if rest else first

        return tuple(grad_of(*way) for way in ways)


def _of_values(weights: Tensor, grad_context: Tensor) -> Tensor:
    return torch.bmm(weights.transpose(1, 2), grad_context)


def _of_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """(H,D) of (B,T,H) gradients and (B,T,D) rows."""
    return grad.flatten(0, 1).t() @ rows.flatten(0, 1)


def _of_features(grad: Tensor, w_f: Tensor) -> Tensor:
    """(B,Tk,C) of (B,Tk,H) gradients of keys, laid out as of any backend."""
    return (w_f.t() @ grad.transpose(1, 2)).transpose(1, 2)


def _plan(call: KernelCall) -> plans.GradPlan:
    return plans.grad_step(
        usual(call.batch), call.queries_len, usual(call.keys_len), call.hidden, call.value_size,
        call.size, call.gpu,
    )  # fmt: skip


def _of_step(call: KernelCall, grads: _Gradients) -> None:
    """The gradients of few queries: a launch over values, one over keys, one to sum."""
    plan, shape, new = _plan(call).values, (call.batch, call.queries_len), call.steps.new
    splits, split_keys = call.split(plan)
    grad_weights, means, masses = None, None, None
    if grads.through_scores:
        grad_weights, means = new(*shape, call.keys_len), new(*shape, splits)
        if call.args["weights"].dtype != torch.float32:
            masses = new(*shape, splits)
    call.launch(
        step_values_kernel, call.batch * splits,
        grad_values=grads.values, grads=grad_weights, means=means, masses=masses, splits=splits,
        split_keys=split_keys, **plan.blocks,
    )  # fmt: skip
    if grad_weights is not None:
        _through_keys(call, grads, grad_weights, means, masses)


def _through_keys(
    call: KernelCall,
    grads: _Gradients,
    grad_scores: Tensor,
    means: Tensor | None = None,
    masses: Tensor | None = None,
) -> None:
    """Gradients of queries, keys and w_v; with weights, from the gradients of those."""
    whole = _plan(call)
    plan, sums, queries = whole.keys, whole.sums, call.batch * call.queries_len
    keys, q_parts, w_parts = call.summed_keys, None, None
    splits, split_keys = call.split(plan, in_tiles=call.queries_len > 1)
    if grads.queries is not None and (type(splits) is not int or splits > 1):
        q_parts = call.steps.new(queries, splits, call.hidden)
    if grads.w_v is not None:
        w_parts = call.steps.new(call.batch * splits, call.hidden)
    g_batch, g_row, g_key = grad_scores.stride()
    hidden_blocks = -(-call.hidden // plan.blocks["BLOCK_H"])
    call.launch(
        step_keys_kernel, call.batch * splits * hidden_blocks,
        keys=keys, grads=grad_scores, means=means, masses=masses, grad_keys=grads.keys,
        q_parts=grads.queries if q_parts is None else q_parts, w_parts=w_parts, g_batch=g_batch,
        g_row=g_row, g_key=g_key, splits=splits, split_keys=split_keys,
        parts=whole.values.splits, **plan.blocks,
    )  # fmt: skip
    programs = 0 if w_parts is None else -(-call.hidden // sums["BLOCK_W"])
    if q_parts is not None:
        programs += queries * -(-call.hidden // sums["BLOCK_H"])
    if q_parts is not None or w_parts is not None:
        call.launch(
            step_sums_kernel, programs,
            q_parts=q_parts, grad_queries=grads.queries, w_parts=w_parts, grad_w=grads.w_v,
            splits=splits, w_rows=call.batch * splits, **sums,
        )  # fmt: skip


def _of_many(call: KernelCall, grads: _Gradients) -> None:
    """The gradients of many queries: products, then two passes over tanh."""
    blocks = plans.grad_products(call.gpu)
    of_keys = call.batch * -(-call.keys_len // blocks["BLOCK_K"])
    if grads.values is not None and call.args["grad_context"] is None:
        call.steps.make(Tensor.zero_, grads.values)
    elif grads.values is not None:
        programs = of_keys * -(-call.value_size // blocks["BLOCK_D"])
        call.launch(grad_values_kernel, programs, out=grads.values, **blocks)
    if not grads.through_scores:
        return
    lens, shape = call.lengths(), (call.batch, call.queries_len, call.keys_len)
    grad_weights = grad_scores = call.steps.new(*shape)
    programs = of_keys * -(-call.queries_len // blocks["BLOCK_Q"])
    call.launch(grad_weights_kernel, programs, out=grad_weights, lens=lens, **blocks)
    by_fourier = call.by_products and not switches.is_off("waves")
    if by_fourier and plans.pays_by_fourier(usual(call.queries_len), usual(call.keys_len)):
        padded = -(-call.keys_len // plans.WHOLE_TILES) * plans.WHOLE_TILES
        grad_scores = call.steps.new(*shape[:2], padded, dtype=call.dtype)
    rows, plan = call.batch * call.queries_len, plans.grad_softmax(usual(call.keys_len))
    call.launch(
        grad_softmax_kernel, rows,
        grads=grad_weights, out=grad_scores, padded=grad_scores.shape[2], lens=lens, **plan,
    )  # fmt: skip
    if lens is not None and lens.dim() > 1:
        lens = call.steps.make(_longest, lens)
    _grad_tanh(call, grads, grad_scores, lens)


def _longest(lens: Tensor) -> Tensor:
    """A length per batch row, of the query that looks at most keys."""
    if lens.is_floating_point():  # a NaN leaves no key
        lens = lens.nan_to_num(0.0, float("inf"), 0.0)
    return lens.amax(1)


def _grad_tanh(
    call: KernelCall, grads: _Gradients, grad_scores: Tensor, longest: Tensor | None = None
) -> None:
    """Fill the gradients of queries, keys and w_v that are needed, from 16 bits by Fourier sums.

    That of w_v comes with the keys: roundings of a query's sinusoids add up to nothing there.
    """
    of_keys, table = grads.keys is not None or grads.w_v is not None, None
    if grad_scores.dtype != torch.float32:
        table = Table(None, None)
    elif of_keys and grads.queries is not None and call.steps.in_place:  # one after the other
        table = call.new_table(max(call.queries_len, call.keys_len))
    of = call, grad_scores, longest, table
    if of_keys:
        _pass(*of, grads.keys, True, grads.w_v)
    if grads.queries is not None:
        _pass(*of, grads.queries, False, None)


def _pass(
    call: KernelCall,
    grad_scores: Tensor,
    longest: Tensor | None,
    table: Table | None,
    out: Tensor | None,
    rows_are_keys: bool,
    grad_w: Tensor | None,
) -> None:
    """One pass: gradients of the rows and of w_v, unless None."""
    rows, others = call.queries, call.summed_keys
    g_batch, g_row, g_other = grad_scores.stride()
    if rows_are_keys:
        rows, others, g_row, g_other = others, rows, g_other, g_row
    table = table or call.new_table(others.shape[1])
    call.make_table(others, table)
    rows_len, others_len, w_parts = rows.shape[1], others.shape[1], None
    if grad_scores.dtype == torch.float32:
        kernel, blocks = (
            grad_tanh_kernel,
            plans.grad_tanh(usual(rows_len), usual(call.hidden), grad_w is not None),
        )
        units = 2 * blocks["BLOCK_H"]
    else:
        lengths_of = usual(rows_len), usual(others_len)
        kernel, blocks = grad_fourier_kernel, plans.grad_fourier(*lengths_of, call.gpu)
        units = blocks["BLOCK_H"]
    row_blocks, hidden_blocks = -(-rows_len // blocks["BLOCK_R"]), -(-call.hidden // units)
    if grad_w is not None:
        w_parts = call.steps.new(call.batch * row_blocks, call.hidden)
    call.launch(
        kernel, call.batch * row_blocks * hidden_blocks,
        rows=rows, others=others, table=table.entries, largest=table.largest,
        second=others.numel(), grad_scores=grad_scores, lens=longest, out=out, w_parts=w_parts,
        R=rows_len, O=others_len, g_batch=g_batch, g_row=g_row, g_other=g_other,
        ROWS_ARE_KEYS=rows_are_keys, **blocks,
    )  # fmt: skip
    if w_parts is not None:
        sums = plans.sum_rows(usual(call.batch * row_blocks))
        call.launch(
            step_sums_kernel, -(-call.hidden // sums["BLOCK_W"]),
            q_parts=None, grad_queries=None, w_parts=w_parts, grad_w=grad_w, splits=1,
            w_rows=call.batch * row_blocks, **sums,
        )  # fmt: skip
