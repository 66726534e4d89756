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

from bahdanau_fast.fuse.caches import Caches
from bahdanau_fast.fuse.find import Piece
from bahdanau_fast.fuse.graph import Graph, Sizes, State, need, state
from bahdanau_fast.fuse.plan import Plan, plan

__all__ = ["Times", "as_before", "prove", "times"]

# Of the largest value of a tensor: what rounding alone may do to fp32, and to fp64.
_SAME = {torch.float32: 2.0**-16, torch.float64: 2.0**-36}
# Elements of the activated sum at which pieces are timed, at most.
_TIMED = 1 << 19


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
        nodes = [graph.nodes[i] for i in self.ids]
        given = {v for node in nodes for v in node.refs()} | {*made.inputs}
        self.inputs = sorted(v for v in given if graph.values[v].maker not in self.ids)
        self.state = graph.nodes[piece.end].state
        self.wanted = [v for v in (piece.context, piece.weights) if v is not None]
        self.wanted = self.wanted or [piece.scores]
        self.backward = True
        self.leaves = {v: sizes.cut(graph.values[v]) for v in self.inputs}

    def run(
        self, fused: bool, dtype: torch.dtype | None = None, caches: Caches | None = None
    ) -> tuple[list[Tensor | None], tuple[float, float]]:
        """Outputs and gradients, and the seconds until there were outputs, and all."""
        leaves = dict(self.leaves)
        if dtype is not None:
            leaves = {v: t.to(dtype) if t.is_floating_point() else t for v, t in leaves.items()}
        asked = [v for v in self.inputs if self.state.grad and self.graph.values[v].requires_grad]
        for v in asked:
            leaves[v] = leaves[v].clone().requires_grad_()
        now = self.state if dtype is None else self.state._replace(autocast=())
        caches = Caches() if caches is None else caches
        _wait(leaves)
        begin = time.perf_counter()
        with as_before(now):
            if fused:
                given = [v for v in self.plan.inputs if v not in leaves]
                before = self.graph.evaluate(self.piece.before, leaves, given, self.sizes)
                leaves.update(zip(given, before, strict=True))
                made = self.plan.run(caches, lambda w: w, *[leaves[v] for v in self.plan.inputs])
                outs = [t for t in made if t is not None]
            else:
                outs = self.graph.evaluate(self.ids, leaves, self.wanted, self.sizes)
        _wait(leaves)
        forward = time.perf_counter() - begin
        grads: tuple[Tensor | None, ...] = ()
        if asked and self.backward:
            seeds = [
                torch.cos(torch.arange(t.numel(), device=t.device)).to(t).view(t.shape)
                for t in outs
            ]
            grads = torch.autograd.grad(outs, [leaves[v] for v in asked], seeds, allow_unused=True)
        _wait(leaves)
        seconds = forward, time.perf_counter() - begin
        return [None if t is None else t.detach() for t in (*outs, *grads)], seconds

    def judge(self, plain: list[Tensor | None], fused: list[Tensor | None]) -> None:
        """Raise unless they are the same, or fp64 says that the fused ones are as near to it."""
        exact: list[Tensor | None] = []
        outputs = len(self.wanted)
        need(len(plain) == len(fused), "gives something else")
        for k, (theirs, mine) in enumerate(zip(plain, fused, strict=True)):
            need((theirs is None) == (mine is None), "a gradient is missing")
            if theirs is None or mine is None:
                continue
            same = theirs.shape == mine.shape and theirs.dtype is mine.dtype
            need(same, "is another kind of tensor")
            if not theirs.numel():
                continue
            lost = theirs.isnan()  # gradients of a row with nothing to look at
            ours = torch.where(lost, theirs, mine) if k >= outputs else mine
            need(torch.equal(lost, ours.isnan()), "is NaN elsewhere")
            a, b = (torch.nan_to_num(x.double()) for x in (theirs, ours))
            largest, gap = float(a.abs().max()), float((a - b).abs().max())
            if gap <= _SAME.get(theirs.dtype, 0.0) * largest and not self.state.autocast:
                continue
            exact = exact or self.run(False, torch.float64)[0]
            found: Any = exact[k]
            truth = torch.nan_to_num(torch.where(lost, 0, found.double()))
            error, own = float((b - truth).abs().max()), float((a - truth).abs().max())
            kind = exact[outputs:] if k >= outputs else exact[k : k + 1]
            scale = max(
                float(torch.nan_to_num(t).abs().max()) for t in kind if t is not None and t.numel()
            )
            low = [dtype for _, dtype in self.state.autocast] or [theirs.dtype]
            eps = max(torch.finfo(d).eps for d in low)
            fine = error <= 3 * own + 8 * eps * scale
            need(fine, f"differs by {error:.2g} where its own code does by {own:.2g}")


def _wait(leaves: dict[int, Tensor]) -> None:
    """Until a GPU has done what it was given."""
    if any(t.is_cuda for t in leaves.values()):
        torch.cuda.synchronize()


def prove(graph: Graph, piece: Piece, sizes: Sizes, made: Plan | None) -> None:
    """Outputs and gradients at small sizes, and, by the plan, outputs of the call itself.

    Raises:
        Left: something differs.
    """
    with torch.random.fork_rng(_gpus(graph, piece)), torch.inference_mode(False):
        small = plan(graph, piece, sizes, lambda n: n)
        trial = _Trial(graph, piece, small, sizes)
        trial.judge(trial.run(False)[0], trial.run(True)[0])
        if sizes.small and made is not None:
            whole = _Trial(graph, piece, made, Sizes({}))
            own = [graph.values[v].tensor for v in whole.wanted]
            read = {graph.values[v].storage for v in (*whole.inputs, *whole.wanted)}
            later = (graph.values[v].storage for n in graph.nodes for v, _ in n.writes)
            if all(t is not None for t in own) and not read & set(later):
                whole.state = whole.state._replace(grad=False)
                theirs = [None if t is None else t.detach() for t in own]
                whole.judge(theirs, whole.run(True)[0])


def times(graph: Graph, piece: Piece, sizes: Sizes, made: Plan) -> Times:
    """How long a piece takes, plain and fused.

    Where it is large, its forward is that of the call, and both are taken of less of its batch.
    """
    part, n = _timed(graph, piece, sizes), graph.values[piece.activated].numel
    less = plan(graph, piece, sizes, lambda n: part.shape([sizes.full(n)])[0])
    trial = _Trial(graph, piece, less, part)
    with torch.random.fork_rng(_gpus(graph, piece)), torch.inference_mode(False):
        plain = [trial.run(False)[1]]
        again = 2 if plain[0][1] < 2e-3 else 0  # short ones are noisy, and cheap
        plain += [trial.run(False)[1] for _ in range(again)]
        a, c = map(min, zip(*plain, strict=True))
        b, d = _fused(trial, a, again)
        if part.small:
            own = sum(graph.nodes[i].seconds for i in trial.ids)
            whole = _Trial(graph, piece, made, Sizes({}))
            whole.backward = False
            ours, _ = _fused(whole, own, 0)
            share = n / math.prod(part.shape(graph.values[piece.activated].shape))
            a, b, c, d = own, ours, own + (c - a) * share, ours + (d - b) * share
    return Times(a, b, c, d)


def _fused(trial: _Trial, plain: float, again: int) -> tuple[float, float]:
    """Forward, and all: with keys that came before, unless new ones take longer than plain code."""
    caches = Caches()
    new = [trial.run(True)[1] for _ in range(1 + again)] + [trial.run(True, caches=caches)[1]]
    known = trial.run(True, caches=caches)[1]
    forward, both = map(min, zip(*new, strict=True))
    return (forward, both) if forward > plain else (min(forward, known[0]), min(both, known[1]))


def _timed(graph: Graph, piece: Piece, sizes: Sizes) -> Sizes:
    """Less of the batch, or of the keys, where the sum is large."""
    total = graph.values[piece.activated].numel
    taken = {n for value in graph.values for n in value.shape}
    for axis in (*piece.sizes[: piece.groups[0]], *piece.sizes[::-1]) if total > _TIMED else ():
        n = sizes.full(axis)
        new = max(2, n * _TIMED // total)
        while new in taken:
            new += 1
        products = {m: m // n * new for m in sizes.small if m % n == 0}
        if n in sizes.small and new < n and not taken.intersection(products.values()):
            return Sizes(products)
    return Sizes({})


def _gpus(graph: Graph, piece: Piece) -> list[int]:
    device = graph.values[piece.activated].device
    return [device.index or 0] if device.type == "cuda" else []
