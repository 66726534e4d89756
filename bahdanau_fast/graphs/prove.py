"""Does a piece compute the same as the operator? By the rule of parity, on drawn inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import parity
from bahdanau_fast.graphs.attend import NotServed
from bahdanau_fast.graphs.caches import Caches, Shared
from bahdanau_fast.graphs.graph import Graph, SmallSizes, State, require, state
from bahdanau_fast.graphs.piece import Piece
from bahdanau_fast.graphs.plan import FusedPlan, plan

# Elements of the largest sum that is tried in its full sizes, too.
_SMALL = 1 << 16
# The number of draws of inputs: errors of a few elements are small by chance.
_DRAWS = 4
# In fp64 there is no exact result to compare with: sums of some hundred terms in another order.
_ROUNDINGS = 256


@contextlib.contextmanager
def in_state(then: State) -> Iterator[None]:
    """Gradients, autocast and inference mode as they were at a call."""
    with contextlib.ExitStack() as stack:
        if then != state():
            stack.enter_context(torch.inference_mode(then.inference))
            stack.enter_context(torch.set_grad_enabled(then.grad))
            on = dict(then.autocast)
            for kind in {*on, *dict(state().autocast)}:
                dtype = on.get(kind, torch.get_autocast_dtype(kind))
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=kind in on))
        yield


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """A trial draws no random number of the user's, and is in none of his modes and hooks."""
    gpus = [device.index or 0] if device.type == "cuda" else []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.random.fork_rng(gpus), torch.inference_mode(False), hooks:
        yield


class _Trial:
    """A piece at some sizes, as it was written and by the operator, on the same inputs."""

    def __init__(self, graph: Graph, piece: Piece, plan: FusedPlan, sizes: SmallSizes) -> None:
        self.graph, self.piece, self.plan, self.sizes = graph, piece, plan, sizes
        self.before = piece.immediate | piece.mask_calls - piece.deferred
        self.ids = {*piece.deferred, *self.before, piece.end}
        self.state = graph.nodes[piece.end].state._replace(inference=False)
        self.outputs = piece.outputs
        read = {*plan.inputs, *(v for i in self.ids for v in graph.nodes[i].refs)}
        self.read = sorted(v for v in read if graph.values[v].maker not in self.ids)
        # By output or gradient: errors of both, plain first, and the largest exact element.
        self.errors: dict[int, tuple[float, float, float]] = {}

    def leaves(self, tries: int = 100) -> dict[int, Tensor]:
        """Drawn inputs that the operator serves: binary where it assumes that."""
        require(tries, "its mask hides all that is drawn")
        leaves = {v: self.sizes.cut(self.graph.values[v]) for v in self.read}
        for v in leaves.keys() & self.piece.assumed_binary:
            leaves[v] = (leaves[v] > 0).to(leaves[v].dtype)
        try:
            self.run(leaves, True)
        except NotServed:
            return self.leaves(tries - 1)
        return leaves

    def run(self, leaves: dict[int, Tensor], fused: bool, exact: bool = False) -> list[Any]:
        """Outputs and gradients, in fp64 or as they are."""
        graph, then = self.graph, self.state
        if exact:
            leaves = {v: t.double() if t.is_floating_point() else t for v, t in leaves.items()}
            then = then._replace(autocast=())
        learnt = [v for v in leaves if then.grad and graph.values[v].requires_grad]
        leaves = {**leaves, **{v: leaves[v].clone().requires_grad_() for v in learnt}}
        with in_state(then):
            if fused:
                inputs = graph.evaluate(self.before, leaves, self.plan.inputs, self.sizes)
                outs = [t for t in self.plan.run(*inputs) if t is not None]
            else:
                outs = graph.evaluate(self.ids, leaves, self.outputs, self.sizes, exact)
        seeds = [
            torch.cos(torch.arange(t.numel(), device=t.device)).to(t).view(t.shape) for t in outs
        ]
        grads: Any = ()
        if learnt:
            inputs = [leaves[v] for v in learnt]
            grads = torch.autograd.grad(outs, inputs, seeds, allow_unused=True)
        return [None if t is None else t.detach() for t in (*outs, *grads)]

    def judge(self, leaves: dict[int, Tensor]) -> bool:
        """Whether they are the same in all draws up to now; raises where they are another kind."""
        plain, fused = self.run(leaves, False), self.run(leaves, True)
        exact = self.run(leaves, False, exact=True)
        same, outputs = True, len(self.outputs)
        scales = [
            0.0 if t is None or not t.numel() else float(t.nan_to_num().abs().max()) for t in exact
        ]
        for k, (eager, ours, truth) in enumerate(zip(plain, fused, exact, strict=True)):
            kinds = [None if t is None else (t.shape, t.dtype) for t in (eager, ours)]
            require(kinds[0] == kinds[1], "gives another kind of tensor, or no gradient")
            if eager is None or not eager.numel():
                continue
            lost = eager.isnan()  # gradients of a row that is hidden
            require(k >= outputs or torch.equal(lost, ours.isnan()), "is NaN elsewhere")
            a, b, x = (torch.where(lost, 0.0, t.double()) for t in (eager, ours, truth))
            errors = parity.error(a, x), parity.error(b, x), float(x.abs().max())
            before = self.errors.get(k, (0.0, 0.0, 0.0))
            of_eager, of_ours, largest = self.errors[k] = tuple(map(max, errors, before))  # type: ignore[assignment]
            low = [dtype for _, dtype in self.state.autocast] or [eager.dtype]
            if low == [torch.float64]:
                group = scales[outputs:] if k >= outputs else scales[k : k + 1]
                of_eager = max(of_eager, _ROUNDINGS * torch.finfo(torch.float64).eps * max(group))
            coarsest = max(low, key=lambda d: torch.finfo(d).eps)
            same &= of_ours <= parity.allowed(of_eager, largest, coarsest)
        return same


def prove(graph: Graph, piece: Piece, sizes: SmallSizes) -> None:
    """Raise where outputs or gradients differ at small sizes, or at those of the call."""
    shared = Shared(Caches())  # not the module's: another thread may be in a call
    trials = [_Trial(graph, piece, plan(graph, piece, sizes, lambda n: n, shared), sizes)]
    if graph.values[piece.activated].numel <= _SMALL and sizes.small and not graph.symbols:
        full = plan(graph, piece, sizes, sizes.full, shared)
        trials.append(_Trial(graph, piece, full, SmallSizes({})))
    with isolated(graph.values[piece.activated].device):
        for trial in trials:
            same = any(trial.judge(trial.leaves()) for _ in range(_DRAWS))
            worst = max(error for _, error, _ in trial.errors.values())
            require(same, f"differs from its own code, by {worst:.2g}")
