"""The plain module and ours, each with inputs of its own, taken through the same steps; changes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.backends import cpu
from ways.kinds import DK, DQ, DV, KINDS, E

# Batch, keys, hidden: such that the projection of the keys is remembered, and such that projections
# and attention are one operator (test_ways.py asserts both).
REMEMBERED, SMALL = (3, 53, 19), (3, 31, 17)


def remember_small(patch):
    """Make the limits fit REMEMBERED; ``patch`` is a pytest.MonkeyPatch."""
    for name in ("ONE_OPERATOR_WORK", "ONE_OPERATOR_WORK_TO_TRAIN"):
        patch.setattr(cpu, name, 1 << 15)
    patch.setattr(bf.backends, "_routes", {})  # what was decided by others


# Share of a result's largest number: thousands of roundings, by which right results differ.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Side:
    """A module, and the tensors of its calls; changes draw their numbers from ``draw``."""

    def __init__(self, module, tensors, encoder, steps, place=None, seed=5):
        self.module, self.encoder, self._steps = module, encoder, steps
        self.step = None  # compiled code of a call, which takes the module first
        self.place = place  # the layer that is changed, as a path in the module
        self.look = None  # done with the weights of each call that has gradients, of WATCHED
        self.seen = []  # by that, to be compared with the gradients: functions that give it then
        self.source, self.queries, self.keys, self.values, self.lens = tensors
        self.generator = torch.Generator().manual_seed(seed)
        self.pending = []  # results whose backward is still to come
        self.notes = {}  # what a way prepared for its change

    def draw(self, *shape):
        """Normal numbers, the same ones on each side, in the dtype of the keys."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.keys.dtype)

    def encode(self):
        self.keys = torch.tanh(self.encoder(self.source))

    def call(self, queries=None):
        """Context and weights."""
        queries = self.queries if queries is None else queries
        found = []
        for results in self._steps(self, queries, self.keys, self.values, self.lens_for(queries)):
            self.watch(*results)
            found.append(results)
        if len(found) == 1:
            return found[0]
        contexts, weights = zip(*found, strict=True)
        return torch.stack(contexts, 1), torch.stack(weights, 1)

    def apply(self, *inputs):
        """The module's call, or that of compiled code."""
        return self.module(*inputs) if self.step is None else self.step(self.module, *inputs)

    def watch(self, context, weights):
        """Do with the weights what ``look`` says."""
        if self.look is not None and weights.requires_grad:
            self.look(self, context, weights)

    @property
    def layer(self):
        return self.module.get_submodule(self.place)

    def lens_for(self, queries):
        """As many per row as there are queries, where there is one for each."""
        several = self.lens is not None and self.lens.dim() == 2
        return self.lens[:, : queries.shape[1]] if several else self.lens

    def leaves(self):
        """Whatever may have a gradient, by name."""
        own = {name: getattr(self, name) for name in ("source", "queries", "keys", "values")}
        own |= {f"encoder.{name}": p for name, p in self.encoder.named_parameters()}
        own |= dict(self.module.named_parameters())
        return {name: x for name, x in own.items() if x.is_leaf}

    def grads(self):
        found = {name: x.grad for name, x in self.leaves().items()}
        return found | {f"weights {i}": seen() for i, seen in enumerate(self.seen)}

    def forget(self):
        """Gradients and results of before."""
        for leaf in self.leaves().values():
            leaf.grad = None
        self.pending.clear()
        self.seen.clear()


def retained(side, _, weights):
    weights.retain_grad()
    side.seen.append(lambda: weights.grad)


def asked(side, context, weights):
    (grad,) = torch.autograd.grad(context.sum(), weights, retain_graph=True)
    side.seen.append(lambda: grad)


def hooked(_, __, weights):
    weights.register_hook(lambda grad: 3 * grad)


# What is done with attention_weights, for the gradient that they have of the context.
WATCHED = {
    "`retain_grad()`": retained,
    "`autograd.grad(context.sum(), attention_weights)`": asked,
    "a hook that triples the gradient": hooked,
    "nothing": None,
}


class Pair:
    """Two sides, or three: with ``exact`` the plain one once more, in float64."""

    def __init__(
        self, *, size=REMEMBERED, dtype=torch.float64, bias=True, cache_keys=True, seed=0,
        exact=False, kind="additive", place=None,
    ):  # fmt: skip
        batch, keys_len, hidden = size
        kind = self._kind = KINDS[kind]
        generator = torch.Generator().manual_seed(seed)
        plain = kind.plain(hidden, bias)
        encoder = nn.Linear(E, DK)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *encoder.parameters()):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        shapes = (batch, keys_len, E), (batch, 2, DQ), (batch, keys_len, DK), (batch, keys_len, DV)
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        ours = copy.deepcopy(plain)
        if kind.ours is not None:
            ours = kind.ours(hidden, bias, cache_keys)
            ours.load_state_dict(plain.state_dict())

        def side(module, dtype):
            own = [x.to(dtype, copy=True) for x in tensors]
            copied = nn.Linear(E, DK)
            copied.load_state_dict(encoder.state_dict())
            lens = torch.tensor([3, keys_len, 0])
            return Side(module.to(dtype), [*own, lens], copied.to(dtype), kind.steps, place)

        self.sides = [side(plain, dtype), side(ours, dtype)]
        if exact:
            self.sides.append(side(copy.deepcopy(plain), torch.float64))
        self.wrong = []  # what differed so far, a line each
        self.eager = 0.0  # the largest error, relative, of the plain side against the exact one

    @property
    def ours(self):
        return self.sides[1]

    def fuse(self):
        """Ours, where it is the plain one as yet; whether it is none any more."""
        return self._kind.ours is not None or bool(bf.fuse(self.ours.module, always=True).entries)

    def do(self, name, function):
        """Take a step on every side and compare; whether the plain side could.

        Where the plain side raises, ours may raise too, or give whatever it finds right.
        """
        results, errors = [], []
        for side in self.sides:
            try:
                results.append(function(side))
                errors.append(None)
            except Exception as error:
                results.append(None)
                error.__context__ = None  # with its frames, which hold what the call had
                errors.append(error.with_traceback(None))
        if errors[0] is not None:
            return False
        if errors[1] is not None:
            self.wrong.append(f"{name}: {type(errors[1]).__name__}: {errors[1]}"[:400])
        else:
            self._compare(name, *results)
        return True

    def _compare(self, name, want, got, exact=None):
        if isinstance(want, dict):
            if want.keys() != got.keys():
                self.wrong.append(f"{name}: {sorted(got)}, plain {sorted(want)}")
                return
            for key in want:
                self._compare(f"{name}, {key}", want[key], got[key], exact and exact[key])
        elif isinstance(want, list | tuple):
            for i, (a, b) in enumerate(zip(want, got, strict=True)):
                self._compare(f"{name}[{i}]", a, b, exact and exact[i])
        elif want is None or got is None:
            if want is not got:
                kinds = ["none" if x is None else "a tensor" for x in (got, want)]
                self.wrong.append(f"{name}: {kinds[0]}, plain {kinds[1]}")
        elif (want.shape, want.dtype) != (got.shape, got.dtype):
            self.wrong.append(f"{name}: {got.shape} {got.dtype}, plain {want.shape} {want.dtype}")
        else:
            self._compare_numbers(name, want, got, exact)

    def _compare_numbers(self, name, want, got, exact):
        want, got = want.detach().double(), got.detach().double()
        size = 1.0 + float(want.abs().max()) if want.numel() else 1.0
        allowed = CLOSE.get(self.ours.keys.dtype)
        if exact is not None:
            # As the parity rule of the suite, with four times eager's own error for its two: in
            # thousands of sequences the ratio of two errors of the same size passes two. And what a
            # gradient sums over all keys differs by in another order: half a rounding for each,
            # which add up as the steps of a random walk.
            exact = exact.detach().double()
            self.eager = max(self.eager, distance(want, exact) / size)
            roundings = 2 + 0.5 * self.ours.keys[..., 0].numel() ** 0.5
            allowed = 4 * self.eager + roundings * torch.finfo(torch.float32).eps
            want = exact
        off = distance(got, want) / size
        if not off <= allowed:
            self.wrong.append(f"{name}: off by {off:.2g} of its size, {allowed:.2g} allowed")

    def backward(self, name, function):
        """A step that leaves gradients, which are compared; plain's errors leave none."""

        def step(side):
            function(side)
            return side.grads()

        done = self.do(name, step)
        if not done:
            for side in self.sides:
                side.forget()
        return done


def distance(a, b):
    return float((a - b).abs().max()) if a.numel() else 0.0


# When the change is made; a module is fused in front of the first call.
AFTER, BEFORE, UNFUSED = "after a call", "before the first call", "before it is fused"


@dataclass(frozen=True)
class Way:
    """A change between two calls, or in front of the first."""

    what: str  # changes: keys, values and so on
    how: str  # unique among those
    change: Callable[[Side], object]  # done to each side, under no_grad unless ``graph``
    prepare: Callable[[Side], object] | None = None  # done to each before its first call
    graph: bool = False  # the change is one of the autograd graph: in the mode of the calls
    moves: bool = True  # results change
    # Results of before may have their backward after it. What they saved of a tensor whose data
    # was replaced is the old data or the new, as it happens.
    pending: bool = True
    without: tuple[str, ...] = ()  # modes that cannot have it, as the plain module cannot
    dtype: torch.dtype = torch.float64
    kinds: tuple[str, ...] = ("additive",)  # of modules it is for, of kinds.KINDS
    layers: tuple[str, ...] = ()  # it is for, of those that a module has: of the side's ``layer``
    whens: tuple[str, ...] = (AFTER,)  # it is made
    # How often in training between two calls, backward passes among them; if more than once, so
    # after the first call too where the first time is before it.
    times: int = 1
