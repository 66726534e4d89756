"""Calls of attention whose launches go to the PTX machine: what ``cases.measured`` asks for."""

from __future__ import annotations

import torch
from cuda_on_host import kind_of
from machine.launch import Machine
from machine.parse import PtxError

__all__ = ["Calls"]


class Calls:
    """The kernels of a backend for an architecture, run on CPU tensors.

    Args:
        arch: as the backend names it.
        change: of the PTX, to plant a mistake.
        options: for every ``Machine.run``.

    Attributes:
        kind: of the numbers of the call that runs.
        launched: (kind of numbers, entry) of all launches.
    """

    def __init__(self, arch, change=str, **options):
        self.arch, self.change, self.options = arch, change, options
        self.kind, self.launched = None, set()
        self._machines = {}

    def attend(self, multiprocessors, queries, keys, values, w_v, valid_lens):
        """Context and weights of projected queries and keys by the kernels, differentiable."""
        self.begin(multiprocessors, queries, keys, w_v)
        return _Attend.apply(queries, keys, values, w_v, valid_lens, self)

    def begin(self, multiprocessors, queries, keys, w_v):
        """A call for a GPU of so many multiprocessors begins."""
        elements = queries.shape[0] * queries.shape[1] * keys.shape[1] * w_v.numel()
        self.kind = kind_of(queries.dtype, elements)

    def machine(self, key, ptx):
        """The machine of a module, whose text is ``ptx()``."""
        if key not in self._machines:
            self._machines[key] = Machine(self.change(ptx()))
        return self._machines[key]

    def run(self, machine, name, *launch, **more):
        """One launch, without races."""
        report = machine.run(name, *launch, **more, **self.options)
        self.launched.add((self.kind, name))
        if report.races:
            raise PtxError("\n".join(race.text for race in report.races))

    def took(self):
        """(kind, entry) of every launch since the last call."""
        launched, self.launched = self.launched, set()
        return launched


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values, w_v, lens, calls):
        context, weights = calls.forward(queries, keys, values, w_v, lens)
        ctx.save_for_backward(queries, keys, values, w_v)
        ctx.lens, ctx.calls, ctx.weights = lens, calls, weights.clone()
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx, grad_context, grad_weights):
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights.dtype)
        given = ctx.weights, grad_context, grad_weights
        return *ctx.calls.backward(*given, *ctx.saved_tensors, ctx.lens), None, None
