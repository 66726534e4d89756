"""Calls of attention by kernels that run without a GPU."""

import math

import entry_points
import torch

from bahdanau_fast.backends.route import GPU_STEP_QUERIES

__all__ = ["KINDS", "Calls", "CudaCalls"]


#: The names of the kernels that serve a dtype.
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class Calls:
    """The kernels of a backend on CPU tensors, as ``cases.measured`` calls them.

    What is derived from it has ``step``, ``forward(need_weights, *inputs)`` and ``backward(weights,
    grad_context, grad_weights, needs, *inputs)``, where inputs are queries, keys, values, w_v and
    lengths, with a seed and a probability if something is dropped, and ``needs`` has a bit for each
    gradient. Where there is a mask or an activation, ``mask=``, ``activation=`` and
    ``negative_slope=`` are given too, and forward is told by ``narrow=`` whether weights are to
    come in the dtype of the inputs, and by ``counted=`` whether to count what lengths leave.

    Attributes:
        kind: of the numbers of the call that runs.
        multiprocessors: of the GPU that it is cut for.
        most_queries: of a call.
    """

    kind, multiprocessors, most_queries = None, 4, math.inf

    def begin(self, multiprocessors, dtype):
        """A call begins."""
        self.multiprocessors, self.kind = multiprocessors, KINDS[dtype]

    def attend(
        self, multiprocessors, queries, keys, values, w_v, valid_lens, *dropout, mask=None, **inside
    ):
        """Context and weights of projected queries and keys by the kernels, differentiable."""
        inputs = queries, keys, values, w_v, valid_lens
        if mask is not None:
            inside["mask"] = mask.unsqueeze(1) if mask.dim() == 2 else mask
        return _Attend.apply(*inputs, self, multiprocessors, dropout, inside)


class CudaCalls(Calls):
    """The same of csrc/cuda, whose operators are run by ``operator(name, *arguments)``."""

    most_queries = GPU_STEP_QUERIES

    def forward(self, need_weights, *inputs, **masked):
        return entry_points.attend(self.operator, *inputs, need_weights=need_weights, **masked)

    def backward(self, weights, grad_context, grad_weights, needs, *inputs, **masked):
        given = *inputs[:5], weights, grad_context, grad_weights
        dropout = inputs[5:] or (None, 0.0)
        more = {"needs": needs, "dropout": dropout, **masked}
        return entry_points.attend_backward(self.operator, *given, **more)

    def step(
        self, multiprocessors, queries, w_q, keys, values, w_v, valid_lens,
        w_k=None, bias=None, mask=None,
    ):  # fmt: skip
        """The same without gradients, from queries (and keys) that the kernel projects itself."""
        self.begin(multiprocessors, queries.dtype)
        inputs = queries, w_q, keys, w_k, bias, values, w_v, valid_lens, mask
        return entry_points.step(self.operator, *inputs)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values, w_v, lens, calls, multiprocessors, dropout, masked):
        calls.begin(multiprocessors, queries.dtype)
        inputs = queries, keys, values, w_v, lens, *dropout
        # With lengths backward takes narrow weights, without them wide ones.
        given = {**masked, "narrow": lens is not None}
        counted = lens is not None and "mask" not in masked
        context, weights, *counts = calls.forward(True, *inputs, **given, counted=counted)
        if counted:
            seen = torch.arange(keys.shape[1]) < lens.double().unsqueeze(-1)
            assert torch.equal(*counts, seen.sum(-1).int()) or weights.numel() == 0
            lens = counts[0].clone()
        if weights.numel() * w_v.numel() < 100_000:
            alone, _ = calls.forward(False, *inputs, **masked)
            assert torch.equal(_bits(alone), _bits(context)), "the context depends on need_weights"
            _, others = calls.forward(True, *inputs, **masked, narrow=lens is None)
            assert {others.dtype, weights.dtype} == {torch.float32, queries.dtype}
            one, other = (x.to(queries.dtype) for x in (weights, others))
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        ctx.save_for_backward(queries, keys, values, w_v)
        ctx.rest = lens, calls, multiprocessors, dropout, masked
        ctx.weights = weights.clone()
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx, grad_context, grad_weights):
        lens, calls, multiprocessors, dropout, masked = ctx.rest
        queries, keys, values, w_v = ctx.saved_tensors
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights.dtype)
        needs = sum(1 << i for i, need in enumerate(ctx.needs_input_grad[:4]) if need)
        calls.begin(multiprocessors, queries.dtype)
        given = ctx.weights, grad_context, grad_weights, needs
        grads = calls.backward(*given, queries, keys, values, w_v, lens, *dropout, **masked)
        return *(g if needs >> i & 1 else None for i, g in enumerate(grads)), *[None] * 5


def _bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
