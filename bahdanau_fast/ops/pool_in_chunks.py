"""Scores of pooling without a query, as one operator that goes over the keys in chunks.

    score[b,h,j] = w_v[h] . (tanh(W x[b,j] + b) * sigmoid(W_g x[b,j] + b_g)) + b_v[h]

The gate is optional. A chunk's activations are in a buffer that the next one takes. Of calls with
more of them than REMEMBERED, backward computes up to half again: that product costs time, and what
is saved in memory traffic pays for a part of it. All of it is torch operations, on
any device. Sums, activations and scores have no less than fp32, and products take the dtype of W;
calls of few activations take plain operations in that dtype, as those under a transform do. What
is one operator on the CPU instead says ``backends.decide_pooling``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.ops.attention import gradients_like
from bahdanau_fast.ops.context import without_autocast
from bahdanau_fast.ops.operator import Operator, library
from bahdanau_fast.ops.second_derivatives import differentiate_again

# Activations of a chunk, of those that are always remembered, and of calls that plain operations
# compute. Where fewer are remembered, a step takes less memory and more time.
CHUNK, REMEMBERED, PLAIN = 1 << 19, 1 << 25, 1 << 20
# Rows of a chunk: sums over more would round more often than those of layers that sum by sample.
CHUNK_ROWS = 1 << 10
_INPUTS = (
    "Tensor keys, Tensor w, Tensor? b, Tensor? w_gate, Tensor? b_gate, Tensor w_v, Tensor? b_v"
)


class _Inputs(NamedTuple):
    """Inputs or their gradients: keys (B,Tk,D), W and W_g (H,D), w_v (heads,H), biases."""

    keys: Any
    w: Any
    b: Any
    w_gate: Any
    b_gate: Any
    w_v: Any
    b_v: Any


def plain_scores(
    keys: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_v: Tensor,
    b_v: Tensor | None,
) -> Tensor:
    """The scores (B,heads,Tk) by the formula; they and the activations have the dtype of W."""
    (batch, keys_len, size), heads = keys.shape, w_v.shape[0]
    if keys.dtype is not w.dtype:
        keys = keys.to(w.dtype)
    rows = keys.reshape(-1, size)  # once, where each layer would, and back again
    gate = None if w_gate is None else F.linear(rows, w_gate, b_gate)
    scores = scores_of_sums(F.linear(rows, w, b), gate, w_v, b_v)
    if heads == 1:
        return scores.reshape(batch, 1, keys_len)
    return scores.reshape(batch, keys_len, heads).transpose(1, 2)


def scores_of_sums(inner: Tensor, gate: Tensor | None, w_v: Tensor, b_v: Tensor | None) -> Tensor:
    """The scores (...,heads) of keys that have gone through both layers, (...,H)."""
    hidden = torch.tanh(inner)
    if gate is not None:
        hidden = hidden * torch.sigmoid(gate)
    return F.linear(hidden, w_v, b_v)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Chunks:
    """Rows of keys in chunks, and the buffers of one."""

    def __init__(self, inputs: _Inputs) -> None:
        keys, w, b, w_gate, b_gate, w_v, _ = inputs
        self.rows: Tensor = keys.flatten(0, -2)
        self.hidden, self.gated = w.shape[0], w_gate is not None
        if w_gate is not None:  # one product of both
            if b is not None or b_gate is not None:
                b, b_gate = (w.new_zeros(self.hidden) if x is None else x for x in (b, b_gate))
                b = torch.cat((b, b_gate))
            w = torch.cat((w, w_gate))
        self.w: Tensor = w
        self.b, self.dtype = b, _wide(w.dtype)
        self.w_v = w_v.to(self.dtype)
        self.step = max(1, min(CHUNK // max(1, w.shape[0]), CHUNK_ROWS, self.rows.shape[0]))
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.rows.shape[0], self.step):
            yield slice(start, min(start + self.step, self.rows.shape[0]))

    def _buffer(self, name: str, rows: int, dtype: torch.dtype, width: int = 0) -> Tensor:
        """A tensor (rows,width) that every chunk takes again; by default as wide as W is high."""
        if name not in self._buffers:
            self._buffers[name] = self.rows.new_empty(
                (self.step, width or self.w.shape[0]), dtype=dtype
            )
        return self._buffers[name][:rows]

    def keys(self, chunk: slice) -> Tensor:
        """Rows (n,D) in the dtype of products."""
        return self.rows[chunk].to(self.w.dtype)

    def project(self, keys: Tensor, remember: bool = False) -> Tensor:
        """W x + b (n,H), or (n,2H) with that of the gate; in a buffer, or in memory of its own."""
        out = self._buffer("projected", keys.shape[0], self.w.dtype)
        out = torch.empty_like(out) if remember else out
        if self.b is None:
            return torch.mm(keys, self.w.t(), out=out)
        return torch.addmm(self.b, keys, self.w.t(), out=out)

    def activate(self, projected: Tensor) -> Tensor:
        """The activations, in place where the dtype is wide enough."""
        if self.w.dtype is not self.dtype:
            projected = self._buffer("wide", projected.shape[0], self.dtype).copy_(projected)
        projected[:, : self.hidden].tanh_()
        projected[:, self.hidden :].sigmoid_()
        return projected

    def hidden_units(self, activations: Tensor) -> Tensor:
        """What the scores are sums of: (n,H)."""
        if not self.gated:
            return activations
        out = self._buffer("hidden units", activations.shape[0], self.dtype, self.hidden)
        return torch.mul(*activations.split(self.hidden, 1), out=out)

    def grad_projected(self, grad_scores: Tensor, activations: Tensor) -> Tensor:
        """The gradient of W x + b, from that of the scores (n,heads)."""
        grad, aten = self._buffer("grad", grad_scores.shape[0], self.dtype), torch.ops.aten
        tanh, grad_tanh = activations[:, : self.hidden], grad[:, : self.hidden]
        torch.mm(grad_scores, self.w_v, out=grad_tanh)
        if self.gated:
            gate, grad_gate = activations[:, self.hidden :], grad[:, self.hidden :]
            torch.mul(grad_tanh, tanh, out=grad_gate)
            aten.sigmoid_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
            grad_tanh.mul_(gate)
        aten.tanh_backward.grad_input(grad_tanh, tanh, grad_input=grad_tanh)
        return grad


def _forward(inputs: _Inputs, remember: bool) -> tuple[Tensor, list[Tensor]]:
    """Scores (B,heads,Tk), and of the first chunks what :meth:`_Chunks.activate` leaves."""
    keys, remembered = inputs.keys, []
    with without_autocast(keys.device):
        chunks = _Chunks(inputs)
        w_v_t = chunks.w_v.t()
        scores = keys.new_empty((*keys.shape[:2], w_v_t.shape[1]), dtype=chunks.dtype)
        rows = scores.view(-1, w_v_t.shape[1])
        rows_remembered = max(REMEMBERED // max(1, chunks.w.shape[0]), rows.shape[0] // 2)
        for chunk in chunks:
            is_remembered = remember and chunk.stop <= rows_remembered
            projected = chunks.project(chunks.keys(chunk), is_remembered)
            activations = chunks.activate(projected)
            if is_remembered:
                remembered.append(projected)
            torch.mm(chunks.hidden_units(activations), w_v_t, out=rows[chunk])
        if inputs.b_v is not None:
            scores += inputs.b_v
        return scores.transpose(1, 2).contiguous(), remembered


def _backward(
    grad: Tensor,
    inputs: _Inputs,
    needed: _Inputs,
    remembered: Sequence[Tensor] = (),
    grad_keys: Tensor | None = None,
) -> _Inputs:
    """Gradients as needed, None for others; that of keys is added to ``grad_keys``, in place."""
    with without_autocast(grad.device):
        chunks = _Chunks(inputs)
        grad_scores = grad.transpose(1, 2).reshape(-1, grad.shape[1]).to(chunks.dtype)
        like = chunks.w, chunks.w[:, 0]
        grad_w, grad_b = (torch.zeros_like(x, dtype=chunks.dtype) for x in like)
        grad_w_v = torch.zeros_like(chunks.w_v)
        if needed.keys and (grad_keys is None or not grad_keys.is_contiguous()):
            zeros = torch.zeros(inputs.keys.shape, dtype=inputs.keys.dtype, device=grad.device)
            grad_keys = zeros if grad_keys is None else zeros.add_(grad_keys)
        grad_rows = None if grad_keys is None else grad_keys.view_as(chunks.rows)
        layers_needed = needed.w or needed.b or needed.w_gate or needed.b_gate
        for index, chunk in enumerate(chunks):
            keys = chunks.keys(chunk)
            if index >= len(remembered):
                activations = chunks.activate(chunks.project(keys))
            elif chunks.w.dtype is chunks.dtype:
                activations = remembered[index]
            else:
                activations = chunks.activate(remembered[index])
            if needed.w_v:
                grad_w_v += grad_scores[chunk].t() @ chunks.hidden_units(activations)
            if not (layers_needed or needed.keys):
                continue
            grad_projected = chunks.grad_projected(grad_scores[chunk], activations)
            grad_b += grad_projected.sum(0)
            grad_projected = grad_projected.to(chunks.w.dtype)
            if needed.w or needed.w_gate:
                grad_w += grad_projected.t() @ keys
            if grad_rows is not None:
                grad_rows[chunk] += grad_projected @ chunks.w
    halves = ([half.clone() for half in x.split(chunks.hidden)] for x in (grad_w, grad_b))
    (w, *w_gate), (b, *b_gate) = halves
    gate = (w_gate or [None])[0], (b_gate or [None])[0]
    input_grads = grad_keys, w, b, *gate, grad_w_v, grad_scores.sum(0)
    pairs = zip(input_grads, inputs, needed, strict=True)
    return _Inputs(
        *(x.to(like.dtype) if need and x is not None else None for x, like, need in pairs)
    )


def _backward_fake(grad: Tensor, needs: int, **inputs: Any) -> tuple[Tensor, ...]:
    return gradients_like(_Inputs(**inputs), needs, grad)


def _backward_kernel(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, needs = arguments
    needed = _Inputs(*(bool(needs >> i & 1) for i in range(len(tensors))))
    input_grads = _backward(grad, _Inputs(*tensors), needed)
    empty = (grad if x is None else x for x in tensors)
    pairs = zip(input_grads, empty, strict=True)
    return tuple(like.new_empty((0,)) if x is None else x for x, like in pairs)


def _gradients(
    saved: Sequence[Any], numbers: Any, needed: tuple[bool, ...], grads: Sequence[Any]
) -> list[Tensor | None]:
    """For compiled code, and for what is differentiated again."""
    if torch.is_grad_enabled():
        return differentiate_again(lambda *x: (plain_scores(*x),), saved, needed, grads)
    needs = sum(need << i for i, need in enumerate(needed))
    input_grads = pooling_scores_backward.overload(grads[0], *saved, needs)
    return [x if need else None for x, need in zip(input_grads, needed, strict=True)]


def _fake(keys: Tensor, w: Tensor, w_v: Tensor, **_: Any) -> Tensor:
    shape = keys.shape[0], w_v.shape[0], keys.shape[1]
    return keys.new_empty(shape, dtype=_wide(w.dtype))


#: Scores (B,heads,Tk) of keys (B,Tk,D).
pooling_scores = Operator(f"pooling_scores({_INPUTS}) -> Tensor", _fake)
pooling_scores.differentiate(len(pooling_scores.tensors), _gradients)
# Bits of `needs`: by the order of the inputs.
pooling_scores_backward = Operator(
    f"pooling_scores_backward(Tensor grad, {_INPUTS}, int needs) -> "
    f"({', '.join(['Tensor'] * len(_Inputs._fields))})",
    _backward_fake,
)
for _operator, _kernel in (
    (pooling_scores, lambda *inputs: _forward(_Inputs(*inputs), False)[0]),
    (pooling_scores_backward, _backward_kernel),
):
    library.impl(_operator.name, _kernel, "CompositeExplicitAutograd")


class _Scores(torch.autograd.Function):
    """Of eager calls: the scores, and the keys again, so that both their gradients are one."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(*tensors)
        scores, remembered = _forward(inputs, True)
        ctx.save_for_backward(*inputs, *remembered)
        ctx.set_materialize_grads(False)
        keys = inputs.keys.view_as(inputs.keys)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(keys)
        return scores, keys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        count, (grad, grad_keys) = len(_Inputs._fields), grads
        if grad is None:
            return grad_keys, *[None] * (count - 1)
        saved = ctx.saved_tensors
        again, batched = torch.is_grad_enabled(), torch._C._functorch.is_legacy_batchedtensor
        vectorized = checks.in_transform() or any(x is not None and batched(x) for x in grads)
        if not (again or vectorized):
            # Nobody else has grad_keys: it is of the weighted sum, which takes these keys alone.
            needed = _Inputs(*ctx.needs_input_grad)
            return _backward(grad, _Inputs(*saved[:count]), needed, saved[count:], grad_keys)
        with torch.enable_grad():
            input_grads = _gradients(saved[:count], (), ctx.needs_input_grad, (grad,))
        if not again:
            input_grads = [None if x is None else x.clone() for x in input_grads]  # without a graph
        if grad_keys is not None:
            input_grads[0] = grad_keys if input_grads[0] is None else input_grads[0] + grad_keys
        return tuple(input_grads)


def _is_small(inputs: _Inputs) -> bool:
    activations: int = math.prod(inputs.keys.shape[:2]) * inputs.w.shape[0]
    return activations * (1 if inputs.w_gate is None else 2) < PLAIN


def products_dtype(keys: Tensor) -> torch.dtype:
    """The dtype of products with keys, which is autocast's but for fp64."""
    dtype = checks.autocast_dtype(keys.device)
    return keys.dtype if dtype is None or keys.dtype == torch.float64 else dtype


def scores_and_keys(keys: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores, and the keys for a weighted sum, of keys, W, b, W_g, b_g, w_v and b_v."""
    inputs = _Inputs(keys, *parameters)
    # An export has the operator whatever the sizes: its program may be of many.
    if checks.in_transform() or (not checks.is_exporting() and _is_small(inputs)):
        return plain_scores(*inputs), keys
    dtype = products_dtype(keys)
    tensors = keys, *(None if x is None else x.to(dtype) for x in parameters)
    inputs = _Inputs(*tensors)
    if checks.plain_only() or checks.is_sharded(keys):
        return plain_scores(*inputs), keys
    if torch.compiler.is_compiling() or not checks.needs_gradient(*tensors):
        return pooling_scores.overload(*inputs), keys
    scores: Any = _Scores.apply
    result: tuple[Tensor, Tensor] = scores(*inputs)
    return result
