"""What backends and families of kernels are tried on: calls that plain PyTorch can judge.

A problem is drawn in fp64 and rounded to a dtype; all who compute it get the same numbers. Its
results are outputs and gradients, and the outputs once more without gradients, where other kernels
run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bahdanau_fast import backends, parity
from bahdanau_fast.functional import additive_attention
from bahdanau_fast.modules.attention_rnn import AttentionGRU, AttentionLSTM
from bahdanau_fast.modules.decoder_loop import decode_greedily
from bahdanau_fast.ops.decode_arguments import SpecialTokens

# Draws, the first two of which are computed by ours; eager's error is the largest of all of them.
_DRAWS = 4
# Of a decoder: rows, steps, keys, features of an input, of the values, of everything else; tokens.
_B, _T, _TK, _E, _DV, _H, _V = 3, 6, 20, 16, 32, 64, 48
_MOST = 12  # steps in which tokens are written
_SPECIAL = SpecialTokens(bos=1, eos=2, pad=0)


class Prepared(NamedTuple):
    """A problem on a device, in a dtype; with gradients of outputs behind its lengths or mask."""

    leaves: list[Tensor]  # that have a gradient
    others: list[Tensor]
    call: Callable[[], list[Tensor]]  # the outputs
    explain: Callable[[], str] = str  # how they are computed, of a decoder


class CheckProblem(NamedTuple):
    """Its name, the names of its results, what prepares it, and the terms of its longest sum.

    ``prepare(seed, rounded, dtype, device)``: numbers that ``rounded`` has, in ``dtype``.
    """

    name: str
    labels: tuple[str, ...]
    prepare: Callable[[int, torch.dtype, torch.dtype, str], Prepared]
    terms: int = 0


class Worst(NamedTuple):
    """The largest error as a share of what is allowed, that of eager, and the result it is in."""

    ours: float
    eager: float
    label: str


Cell = type[AttentionGRU] | type[AttentionLSTM]

#: Runs problems that differ in their numbers: gives results, each with the index of its problem.
Way = Callable[[Sequence[Prepared], Callable[[Prepared], list[Tensor]]], list[tuple[int, Any]]]


def once(problems: Sequence[Prepared], run: Any) -> list[tuple[int, Any]]:
    """The way of one call."""
    return [(0, run(problems[0]))]


def in_words(dtype: torch.dtype) -> str:
    """As "float32"."""
    return str(dtype).removeprefix("torch.")


def results(backend: str, problem: Prepared) -> list[Tensor]:
    """Outputs, gradients of the leaves, and outputs without gradients."""
    with backends.use(backend):
        for leaf in problem.leaves:
            leaf.grad = None
        outputs = problem.call()
        torch.autograd.backward(outputs, problem.others[-len(outputs) :])
        with torch.no_grad():
            again = problem.call()
    grads = [leaf.grad for leaf in problem.leaves if leaf.grad is not None]
    return [x.detach() for x in (*outputs, *grads, *again)]


def worst(
    problem: CheckProblem, backend: str, dtype: torch.dtype, device: str, way: Way = once
) -> Worst:
    """By the parity rule; eager's error is that of several draws, since one may be lucky."""
    exact, eager_errors = [], [0.0] * len(problem.labels)
    for seed in range(_DRAWS):
        exact.append(results("reference", problem.prepare(seed, dtype, torch.float64, "cpu")))
        eager = results("reference", problem.prepare(seed, dtype, dtype, device))
        errors = map(parity.error, map(Tensor.cpu, eager), exact[-1])
        eager_errors = [max(pair) for pair in zip(eager_errors, errors, strict=True)]
    if dtype is torch.float64:
        # The exact result is itself a rounded sum, so eager's error is unknown. Two sums of n terms
        # in different orders are at most n roundings apart each.
        rounded = problem.terms * torch.finfo(dtype).eps / 2
        eager_errors = [rounded * float(x.abs().max()) for x in exact[0]]
    prepared = [problem.prepare(seed, dtype, dtype, device) for seed in (0, 1)]
    shares = []
    for index, ours in way(prepared, partial(results, backend)):
        columns = zip(problem.labels, ours, exact[index], eager_errors, strict=True)
        shares += [_share(label, x.cpu(), true, error, dtype) for label, x, true, error in columns]
    return max(shares)


def _share(label: str, x: Tensor, exact: Tensor, eager_error: float, dtype: torch.dtype) -> Worst:
    allowed = parity.allowed(eager_error, float(exact.abs().max()), dtype)
    return Worst(parity.error(x, exact) / allowed, eager_error / allowed, label)


def _labels(outputs: Sequence[str], leaves: Sequence[str]) -> tuple[str, ...]:
    without = (f"{name} without gradients" for name in outputs)
    return (*outputs, *(f"d {name}" for name in leaves), *without)


def _drawn(generator: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


# ---- attention ----

_INPUTS = ("queries", "keys", "values", "W_q", "W_k", "w_v")


class Case(NamedTuple):
    """Sizes of one call."""

    name: str
    batch: int
    queries: int
    keys: int
    hidden: int
    features: tuple[int, int, int]
    seen: str = "all"
    activation: str = "tanh"

    def draw(self, seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Inputs in fp64: queries, keys, values, W_q, W_k, w_v; and lengths or a mask, by name."""
        generator = torch.Generator().manual_seed(self.batch * 7919 + self.keys + 104729 * seed)
        query_size, key_size, value_size = self.features
        rows, of_keys = (self.batch, self.queries), (self.batch, self.keys)
        shapes = (*rows, query_size), (*of_keys, key_size), (*of_keys, value_size)
        weights = (self.hidden, query_size), (self.hidden, key_size), (1, self.hidden)
        tensors = _, _, _, w_q, w_k, _ = _drawn(generator, *shapes, *weights)
        w_q *= query_size**-0.5
        w_k *= key_size**-0.5
        if self.seen == "all":
            return tensors, {}
        if self.seen == "mask":
            return tensors, {"mask": torch.rand(of_keys, generator=generator) < 0.7}
        size = rows[:1] if self.seen == "per row" else rows
        lens = torch.randint(0, self.keys + 1, size, generator=generator)
        return tensors, {"valid_lens": lens}


#: What each backend that serves the CPU is tried on.
CASES = (
    Case("decoder step", 16, 1, 50, 64, (64, 64, 64), "per row"),
    Case("long source", 1, 1, 1000, 128, (96, 128, 80)),
    Case("many queries", 4, 33, 34, 96, (64, 48, 40), "per query"),
    Case("small primes", 3, 5, 7, 11, (2, 13, 3), "per query"),
    Case("one of each", 1, 1, 1, 1, (1, 1, 1)),
)


def attention(case: Case) -> CheckProblem:
    """A call of ``additive_attention``."""

    def prepare(seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str) -> Prepared:
        tensors, masks = case.draw(seed)
        leaves = [x.to(rounded).to(device, dtype).requires_grad_() for x in tensors]
        masks = {name: x.to(device) for name, x in masks.items()}
        shape = case.batch, case.queries
        generator = torch.Generator().manual_seed(seed)
        grads = _drawn(generator, (*shape, case.features[2]), (*shape, case.keys))
        upstream = [x.to(rounded).to(device, dtype) for x in grads]
        options, attend = {**masks, "activation": case.activation}, cast(Any, additive_attention)
        return Prepared(
            leaves, [*masks.values(), *upstream], lambda: list(attend(*leaves, **options))
        )

    # The longest sum is that of a weight's gradient.
    terms = case.batch * case.queries * case.keys + case.hidden + max(case.features)
    return CheckProblem(case.name, _labels(("context", "weights"), _INPUTS), prepare, terms)


# ---- decoders ----


def _module(cls: Cell, seed: int) -> Any:
    """An ``nn.ModuleDict``: a decoder, embeddings and an output layer, in fp64."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        layers = {
            "decoder": cls(_E, _H, value_size=_DV),
            "embedding": nn.Embedding(_V, _E),
            "dense": nn.Linear(_H, _V),
        }
    return nn.ModuleDict(layers).double()


def _inputs(
    cls: Cell, seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """The inputs of a decoder of ``cls``, its lengths, and the gradients of its outputs."""
    shapes = {"inputs": (_T, _B, _E), "hidden": (1, _B, _H), "cell": (1, _B, _H)}
    shapes |= {"keys": (_B, _TK, _H), "values": (_B, _TK, _DV)}
    shapes |= {"d outputs": (_T, _B, _H), "d hidden": (1, _B, _H), "d cell": (1, _B, _H)}
    shapes |= {"d weights": (_B, _T, _TK)}
    drawn = _drawn(torch.Generator().manual_seed(seed), *shapes.values())
    named = zip(shapes, (x.to(rounded).to(device, dtype) for x in drawn), strict=True)
    inputs = {name: x for name, x in named if "cell" not in name or cls is AttentionLSTM}
    return {"lens": torch.tensor([_TK, 3, 7 + seed], device=device), **inputs}


@functools.cache
def decoder(cls: Cell) -> CheckProblem:
    """All steps of a decoder, of given inputs."""
    state = ("hidden", "cell") if cls is AttentionLSTM else ("hidden",)
    names = ("inputs", *state, "keys", "values")
    parameters = tuple(name for name, _ in _module(cls, 0)["decoder"].named_parameters())

    def prepare(seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str) -> Prepared:
        module = _module(cls, seed)["decoder"].to(rounded).to(device, dtype)
        named = _inputs(cls, seed, rounded, dtype, device)
        inputs, *last, keys, values = leaves = [named[name].requires_grad_() for name in names]
        args = inputs, tuple(last) if len(last) > 1 else last[0], keys, values, named["lens"]

        def call() -> list[Tensor]:
            outputs, after = module(*args)
            after = after if isinstance(after, tuple) else (after,)
            return [outputs, *after, module.attention_weights]

        upstream = [x for name, x in named.items() if name.startswith("d ")]
        others = [named["lens"], *upstream]
        explain = partial(module.explain, *args)
        return Prepared([*leaves, *module.parameters()], others, call, explain)

    outputs = ("outputs", *state, "weights")
    return CheckProblem(cls.__name__, _labels(outputs, (*names, *parameters)), prepare)


def worst_token(cls: Cell, backend: str, dtype: torch.dtype, device: str) -> Worst:
    """Of greedy decoding: plain PyTorch takes the tokens that came out as given inputs.

    Each has to be the likeliest after those before it, but for what the parity rule allows both its
    logit and the likeliest one to be off; what follows the end of a row has to be padding.
    """
    return max(_tokens(cls, seed, backend, dtype, device) for seed in range(2))


def _tokens(cls: Cell, seed: int, backend: str, dtype: torch.dtype, device: str) -> Worst:
    first, last, blank = _SPECIAL

    def drawn(dtype_of: torch.dtype, on: str) -> tuple[Any, ...]:
        layers: Any = _module(cls, seed)
        layers["dense"].weight.data *= 4
        layers["dense"].bias.data[last] += 2.5  # rows end at several steps
        layers = layers.to(dtype).to(on, dtype_of)
        named = _inputs(cls, seed, dtype, dtype_of, on)
        hidden = named["hidden"]
        state = (hidden, named["cell"]) if "cell" in named else hidden
        return layers, state, (named["keys"], named["values"], named["lens"])

    def by_plain(dtype_of: torch.dtype, on: str) -> tuple[Tensor, Tensor]:
        """Logits (B,T,V) and weights (B,T,Tk), in fp64 on the CPU."""
        layers, state, memory = drawn(dtype_of, on)
        with backends.use("reference"):
            embedded = layers["embedding"](before.t().to(on))
            outputs, _ = layers["decoder"](embedded, state, *memory)
        logits = layers["dense"](outputs).transpose(0, 1)
        weights = layers["decoder"].attention_weights
        return logits.cpu().double(), weights.cpu().double()

    with torch.no_grad():
        layers, state, memory = drawn(dtype, device)
        attention, rnn = layers["decoder"].attention, layers["decoder"].rnn
        with backends.use(backend):
            written = decode_greedily(
                (attention, rnn, layers["embedding"], layers["dense"]),
                *(state, attention.memory(*memory), _SPECIAL, [], _MOST),
            )
        assert written is not None
        tokens, weights = (x.cpu() for x in written)
        before = torch.cat([torch.full((_B, 1), first), tokens[:, :-1]], 1)
        logits, exact = by_plain(torch.float64, "cpu")
        eager_logits, eager = by_plain(dtype, device)
    ended = (before == last).cumsum(1) > 0
    all_ended = (ended | (tokens == last)).all(0)
    padded = bool((tokens[ended] == blank).all())
    stopped = not all_ended[:-1].any() and (bool(all_ended[-1]) or tokens.shape[1] == _MOST)
    # How far each token is behind the likeliest one is twice a logit's error at most.
    chosen = logits.gather(2, tokens.unsqueeze(2)).squeeze(2)
    behind = (logits.max(-1).values - chosen)[~ended]
    error = parity.error(eager_logits, logits)
    allowed = 2 * parity.allowed(error, float(logits.abs().max()), dtype)
    off = float(behind.max()) if padded and stopped else math.inf
    return max(
        Worst(off / allowed, error / allowed, "tokens"),
        _share("weights", weights, exact, parity.error(eager, exact), dtype),
    )
