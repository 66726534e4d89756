"""Does a piece compute the same as the operator, and faster? Asked after a call, of what was noted.

Outputs at the sizes of the call, against what the user's code gave; outputs and gradients of both
at small sizes, on detached parts of the inputs; time at no more than some sizes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast.fuse.caches import Caches, NoCaches
from bahdanau_fast.fuse.find import Piece
from bahdanau_fast.fuse.graph import Graph, Sizes, State, need, state
from bahdanau_fast.fuse.plan import Plan, plan

__all__ = ["Times", "apart", "as_before", "prove", "times"]

# Of the largest value of a tensor: what rounding alone may do to fp32, and to fp64.
_SAME = {torch.float32: 2.0**-16, torch.float64: 2.0**-36}
# Elements of the activated sum at which pieces are timed, at most.
_TIMED = 1 << 19
# And below which they are timed thrice: such times are noisy, and cheap to take.
_NOISY = 1 << 17


class Times(NamedTuple):
    """Seconds of a piece, and of it with its backward where gradients were asked for."""

    plain: float
    fused: float
    plain_trained: float
    fused_trained: float


@contextlib.contextmanager
def as_before(then: State) -> Iterator[None]:
    """Gradients and autocast as they were at a call."""
    with contextlib.ExitStack() as stack:
        if then != state():
            stack.enter_context(torch.inference_mode(then.inference))
            stack.enter_context(torch.set_grad_enabled(then.grad))
            on = dict(then.autocast)
            for kind in {*on, *dict(state().autocast)}:
                dtype = on.get(kind, torch.get_autocast_dtype(kind))
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=kind in on))
        yield


class _Trial:
    """A piece at some sizes, plain and fused, on the same leaves."""

    def __init__(self, graph: Graph, piece: Piece, made: Plan, sizes: Sizes) -> None:
        self.graph, self.piece, self.plan, self.sizes = graph, piece, made, sizes
        self.ids = {*piece.late, *piece.before, piece.end}
        self.state = graph.nodes[piece.end].state
        self.wanted = [v for v in (piece.context, piece.weights) if v is not None]
        self.wanted, self.backward = self.wanted or [piece.scores], True
        given = {*made.inputs, *(v for i in self.ids for v in graph.nodes[i].refs())}
        given = {v for v in given if graph.values[v].maker not in self.ids}
        self.leaves = {v: sizes.cut(graph.values[v]) for v in sorted(given)}

    def run(
        self, fused: bool, exact: bool = False, caches: Caches | None = None
    ) -> tuple[list[Tensor | None], tuple[float, float]]:
        """Outputs and gradients, in fp64 or as they are; seconds until there were outputs, all."""
        graph, then, leaves = self.graph, self.state, dict(self.leaves)
        if exact:
            leaves = {v: t.double() if t.is_floating_point() else t for v, t in leaves.items()}
            then = then._replace(autocast=())
        asked = [v for v in leaves if then.grad and graph.values[v].requires_grad]
        leaves |= {v: leaves[v].clone().requires_grad_() for v in asked}
        begin = _now(leaves)
        with as_before(then):
            if fused:
                given = graph.evaluate(self.piece.before, leaves, self.plan.inputs, self.sizes)
                made = self.plan.run(caches or Caches(), lambda w: w, *given)
                outs = [t for t in made if t is not None]
            else:
                outs = graph.evaluate(self.ids, leaves, self.wanted, self.sizes)
        forward = _now(leaves) - begin
        grads: tuple[Tensor | None, ...] = ()
        if asked and self.backward:
            seeds = [
                torch.cos(torch.arange(t.numel(), device=t.device)).to(t).view(t.shape)
                for t in outs
            ]
            grads = torch.autograd.grad(outs, [leaves[v] for v in asked], seeds, allow_unused=True)
        seconds = forward, _now(leaves) - begin
        return [None if t is None else t.detach() for t in (*outs, *grads)], seconds

    def judge(self, plain: list[Tensor | None], fused: list[Tensor | None]) -> None:
        """Raise unless they are the same, or fp64 says that the fused ones are as near to it."""
        exact: list[Tensor | None] = []
        outputs = len(self.wanted)
        for k, (theirs, mine) in enumerate(zip(plain, fused, strict=True)):
            kinds = [None if t is None else (t.shape, t.dtype) for t in (theirs, mine)]
            need(kinds[0] == kinds[1], "gives another kind of tensor, or no gradient")
            if theirs is None or mine is None or not theirs.numel():
                continue
            lost = theirs.isnan()  # gradients of a row with nothing to look at
            ours = torch.where(lost, theirs, mine) if k >= outputs else mine
            need(torch.equal(lost, ours.isnan()), "is NaN elsewhere")
            a, b = (torch.nan_to_num(x.double()) for x in (theirs, ours))
            same = _SAME.get(theirs.dtype, 0.0) * _largest(a)
            if _largest(a - b) <= same and not self.state.autocast:
                continue
            exact = exact or self.run(False, exact=True)[0]
            found: Any = exact[k]
            truth = torch.nan_to_num(torch.where(lost, 0, found.double()))
            error, own = _largest(b - truth), _largest(a - truth)
            kind = exact[outputs:] if k >= outputs else exact[k : k + 1]
            scale = max(_largest(t) for t in kind if t is not None and t.numel())
            low = [dtype for _, dtype in self.state.autocast] or [theirs.dtype]
            fine = error <= 3 * own + 8 * max(torch.finfo(d).eps for d in low) * scale
            need(fine, f"differs by {error:.2g} where its own code does by {own:.2g}")


def _largest(x: Tensor) -> float:
    return float(torch.nan_to_num(x).abs().max())


def _now(leaves: dict[int, Tensor]) -> float:
    """Seconds, once a GPU has done what it was given."""
    if any(t.is_cuda for t in leaves.values()):
        torch.cuda.synchronize()
    return time.perf_counter()


def prove(graph: Graph, piece: Piece, sizes: Sizes, made: Plan | None) -> None:
    """Raise where outputs or gradients differ at small sizes, or outputs of the call itself."""
    with apart(graph, piece.at):
        trial = _Trial(graph, piece, plan(graph, piece, sizes, lambda n: n), sizes)
        trial.judge(trial.run(False)[0], trial.run(True)[0])
        if not sizes.small or made is None:
            return
        whole = _Trial(graph, piece, made, Sizes({}))
        own = [graph.values[v].tensor for v in whole.wanted]
        read = {graph.values[v].storage for v in (*whole.leaves, *whole.wanted)}
        later = (graph.values[v].storage for n in graph.nodes for v, _ in n.writes)
        if all(t is not None for t in own) and not read & set(later):
            whole.state = whole.state._replace(grad=False)
            whole.judge([t if t is None else t.detach() for t in own], whole.run(True)[0])


def times(graph: Graph, piece: Piece, sizes: Sizes, made: Plan) -> Times:
    """How long a piece takes, plain and fused.

    Where it is large, its forward is that of the call, and both are taken of less of its batch.
    """
    part, n = _timed(graph, piece, sizes), graph.values[piece.activated].numel
    less = plan(graph, piece, sizes, lambda n: part.shape([sizes.full(n)])[0])
    with apart(graph, piece.at):
        trial = _Trial(graph, piece, less, part)
        again = 2 if n < _NOISY else 1  # the first run takes memory for the first time
        a, c = map(min, zip(*(trial.run(False)[1] for _ in range(1 + again)), strict=True))
        b, d = _fused(trial, a, again)
        share = n / math.prod(part.shape(graph.values[piece.activated].shape))
        own, ours = a * share, b
        if part.small or n < _NOISY:  # what is made again has more around it
            own = min(own, sum(graph.nodes[i].seconds for i in trial.ids))
        if part.small:
            whole = _Trial(graph, piece, made, Sizes({}))
            whole.backward = False
            # With new keys both may be one product, whose time varies.
            ours, _ = _fused(whole, 1.25 * own, 1)
    return Times(own, ours, own + (c - a) * share, ours + (d - b) * share)


def _fused(trial: _Trial, plain: float, again: int) -> tuple[float, float]:
    """Forward, and all: with keys that came before, unless new ones take longer than plain code."""
    caches = Caches()
    new = [trial.run(True, caches=NoCaches())[1] for _ in range(1 + again)]
    known = [trial.run(True, caches=caches)[1] for _ in range(2)][1]
    forward, both = map(min, zip(*new, strict=True))
    return (forward, both) if forward > plain else (min(forward, known[0]), min(both, known[1]))


def _timed(graph: Graph, piece: Piece, sizes: Sizes) -> Sizes:
    """Less of the batch, or of the keys, where the sum is large."""
    total = graph.values[piece.activated].numel
    for axis in (*piece.sizes[: piece.groups[0]], *piece.sizes[::-1]) if total > _TIMED else ():
        n = sizes.full(axis)
        new = max(2, n * _TIMED // total)
        if n in sizes.small and new < n:
            return Sizes({m: m // n * new for m in sizes.small if m % n == 0})
    return Sizes({})


@contextlib.contextmanager
def apart(graph: Graph, at: int) -> Iterator[None]:
    """No random number, inference mode or hook on what is saved of the user's is in a trial."""
    device = graph.values[graph.nodes[at].out[0]].device
    gpus = [device.index or 0] if device.type == "cuda" else []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.random.fork_rng(gpus), torch.inference_mode(False), hooks:
        yield
