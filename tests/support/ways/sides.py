"""The plain module and ours, each with inputs of its own, taken through the same steps."""

import torch
from course import CourseAttention
from torch import nn

import bahdanau_fast as bf

E, DK, DQ, DV = 6, 17, 5, 7
# Batch, keys, hidden: such that the projection of the keys is remembered, and such that projections
# and attention are one operator (test_ways.py asserts both).
REMEMBERED, SMALL = (3, 53, 19), (3, 31, 17)
# Share of a result's largest number: thousands of roundings, by which right results differ.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Side:
    """A module, and the tensors of its calls; changes draw their numbers from ``draw``.

    Attributes:
        step: what a call goes by: the module, or compiled code that takes the module first.
        pending: results whose backward is still to come.
        notes: what a way prepared for its change.
    """

    def __init__(self, module, tensors, encoder, seed=5):
        self.module, self.encoder, self.step = module, encoder, None
        self.source, self.queries, self.keys, self.values, self.lens = tensors
        self.generator = torch.Generator().manual_seed(seed)
        self.pending, self.notes = [], {}

    def draw(self, *shape):
        """Normal numbers, the same ones on each side, in the dtype of the keys."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.keys.dtype)

    def encode(self):
        self.keys = torch.tanh(self.encoder(self.source))

    def call(self, queries=None):
        """Context and weights."""
        queries = self.queries if queries is None else queries
        inputs = queries, self.keys, self.values, self.lens_for(queries)
        context = self.module(*inputs) if self.step is None else self.step(self.module, *inputs)
        return context, self.module.attention_weights

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
        return {name: x.grad for name, x in self.leaves().items()}

    def forget(self):
        """Gradients and results of before."""
        for leaf in self.leaves().values():
            leaf.grad = None
        self.pending.clear()


class Pair:
    """Two sides, or three: with ``exact`` the plain one once more, in float64.

    Attributes:
        wrong: what differed so far, a line each.
        eager: the largest error, relative, that the plain side made against the exact one.
    """

    def __init__(
        self,
        *,
        size=REMEMBERED,
        dtype=torch.float64,
        bias=True,
        cache_keys=True,
        seed=0,
        exact=False,
    ):
        batch, keys_len, hidden = size
        generator = torch.Generator().manual_seed(seed)
        plain = CourseAttention(DK, DQ, hidden, bias=bias)
        encoder = nn.Linear(E, DK)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *encoder.parameters()):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        shapes = (batch, keys_len, E), (batch, 2, DQ), (batch, keys_len, DK), (batch, keys_len, DV)
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        ours = bf.AdditiveAttention(DK, DQ, hidden, bias=bias, cache_keys=cache_keys)
        ours.load_state_dict(plain.state_dict())

        def side(module, dtype):
            own = [x.to(dtype, copy=True) for x in tensors]
            copied = nn.Linear(E, DK)
            copied.load_state_dict(encoder.state_dict())
            lens = torch.tensor([3, keys_len, 0])
            return Side(module.to(dtype), [*own, lens], copied.to(dtype))

        self.sides = [side(plain, dtype), side(ours, dtype)]
        if exact:
            again = CourseAttention(DK, DQ, hidden, bias=bias)
            again.load_state_dict(plain.state_dict())
            self.sides.append(side(again, torch.float64))
        self.wrong, self.eager = [], 0.0

    @property
    def ours(self):
        return self.sides[1]

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
                errors.append(error)
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
            # thousands of sequences the ratio of two errors of the same size passes two.
            exact = exact.detach().double()
            self.eager = max(self.eager, distance(want, exact) / size)
            allowed, want = 4 * self.eager + 2 * torch.finfo(torch.float32).eps, exact
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
