"""What the families of GPU kernels are tried on: calls whose results plain PyTorch can judge.

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
from bahdanau_fast.check.calls import Case
from bahdanau_fast.functional import additive_attention
from bahdanau_fast.modules.attention_rnn import AttentionGRU, AttentionLSTM
from bahdanau_fast.modules.decoder_loop import SpecialTokens, decode_greedily

__all__ = ["Prepared", "Problem", "Way", "Worst", "attention", "decoder", "judged", "judged_tokens"]

# Draws, the first two of which are computed by ours; eager's error is the largest of all of them.
_DRAWS = 4
# Of a decoder: rows, steps, keys, features of an input, of the values, of everything else; tokens.
_B, _T, _TK, _E, _DV, _H, _V = 3, 6, 20, 16, 32, 64, 48
_MOST = 12  # steps in which tokens are written
_SPECIAL = SpecialTokens(bos=1, eos=2, pad=0)


class Prepared(NamedTuple):
    """A problem on a device, in a dtype; with gradients of outputs behind its lengths or mask."""

    leaves: list[Tensor]  # that want a gradient
    others: list[Tensor]
    call: Callable[[], list[Tensor]]  # the outputs
    explain: Callable[[], str] = str  # how they are computed, of a decoder


class Problem(NamedTuple):
    """Its name, the names of its results, and what prepares it.

    ``prepare(seed, rounded, dtype, device)``: numbers that ``rounded`` has, in ``dtype``.
    """

    name: str
    labels: tuple[str, ...]
    prepare: Callable[[int, torch.dtype, torch.dtype, str], Prepared]


class Worst(NamedTuple):
    """The largest error as a share of what is allowed, that of eager, and the result it is in."""

    ours: float
    eager: float
    label: str


Cell = type[AttentionGRU] | type[AttentionLSTM]

#: Runs problems that differ in their numbers: gives results, each with the place of its problem.
Way = Callable[[Sequence[Prepared], Callable[[Prepared], list[Tensor]]], list[tuple[int, Any]]]


def results(backend: str, of: Prepared) -> list[Tensor]:
    """Outputs, gradients of the leaves, and outputs without gradients."""
    with backends.use(backend):
        for leaf in of.leaves:
            leaf.grad = None
        outputs = of.call()
        torch.autograd.backward(outputs, of.others[-len(outputs) :])
        with torch.no_grad():
            again = of.call()
    grads = [leaf.grad for leaf in of.leaves if leaf.grad is not None]
    return [x.detach() for x in (*outputs, *grads, *again)]


def judged(problem: Problem, backend: str, way: Way, dtype: torch.dtype, device: str) -> Worst:
    """By the parity rule; eager's error is that of several draws, since one may be lucky."""
    exact, eager_errors = [], [0.0] * len(problem.labels)
    for seed in range(_DRAWS):
        exact.append(results("reference", problem.prepare(seed, dtype, torch.float64, "cpu")))
        eager = results("reference", problem.prepare(seed, dtype, dtype, device))
        found = map(parity.error, map(Tensor.cpu, eager), exact[-1])
        eager_errors = [max(pair) for pair in zip(eager_errors, found, strict=True)]
    ours = [problem.prepare(seed, dtype, dtype, device) for seed in (0, 1)]
    worst = []
    for place, found in way(ours, partial(results, backend)):
        got = [x.cpu() for x in found]
        for label, x, true, error in zip(
            problem.labels, got, exact[place], eager_errors, strict=True
        ):
            allowed = parity.allowed(error, float(true.abs().max()), dtype)
            worst.append(Worst(parity.error(x, true) / allowed, error / allowed, label))
    return max(worst)


def _labels(outputs: Sequence[str], leaves: Sequence[str]) -> tuple[str, ...]:
    without = (f"{name} without gradients" for name in outputs)
    return (*outputs, *(f"d {name}" for name in leaves), *without)


def _drawn(generator: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


# ---- attention ----

_INPUTS = ("queries", "keys", "values", "W_q", "W_k", "w_v")


def attention(case: Case) -> Problem:
    """A call of ``additive_attention``."""

    def prepare(seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str) -> Prepared:
        tensors, seen = case.draw(seed)
        leaves = [x.to(rounded).to(device, dtype).requires_grad_() for x in tensors]
        seen = {name: x.to(device) for name, x in seen.items()}
        shape = case.batch, case.queries
        generator = torch.Generator().manual_seed(seed)
        grads = _drawn(generator, (*shape, case.features[2]), (*shape, case.keys))
        upstream = [x.to(rounded).to(device, dtype) for x in grads]
        given, attend = {**seen, "activation": case.activation}, cast(Any, additive_attention)
        return Prepared(leaves, [*seen.values(), *upstream], lambda: list(attend(*leaves, **given)))

    return Problem(case.name, _labels(("context", "weights"), _INPUTS), prepare)


# ---- decoders ----


def _module(cls: Cell, seed: int) -> Any:
    """An ``nn.ModuleDict``: a decoder, embeddings and an output layer, in fp64."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        made = {
            "decoder": cls(_E, _H, value_size=_DV),
            "embedding": nn.Embedding(_V, _E),
            "dense": nn.Linear(_H, _V),
        }
    return nn.ModuleDict(made).double()


def _numbers(
    cls: Cell, seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """What a decoder of ``cls`` is given, and the gradients of its outputs."""
    shapes = {"inputs": (_T, _B, _E), "hidden": (1, _B, _H), "cell": (1, _B, _H)}
    shapes |= {"keys": (_B, _TK, _H), "values": (_B, _TK, _DV)}
    shapes |= {"d outputs": (_T, _B, _H), "d hidden": (1, _B, _H), "d cell": (1, _B, _H)}
    shapes |= {"d weights": (_B, _T, _TK)}
    drawn = _drawn(torch.Generator().manual_seed(seed), *shapes.values())
    named = zip(shapes, (x.to(rounded).to(device, dtype) for x in drawn), strict=True)
    return {name: x for name, x in named if "cell" not in name or cls is AttentionLSTM}


@functools.cache
def decoder(cls: Cell) -> Problem:
    """All steps of a decoder, of given inputs."""
    state = ("hidden", "cell") if cls is AttentionLSTM else ("hidden",)
    given = ("inputs", *state, "keys", "values")
    parameters = tuple(name for name, _ in _module(cls, 0)["decoder"].named_parameters())

    def prepare(seed: int, rounded: torch.dtype, dtype: torch.dtype, device: str) -> Prepared:
        module = _module(cls, seed)["decoder"].to(rounded).to(device, dtype)
        named = _numbers(cls, seed, rounded, dtype, device)
        lens = torch.tensor([_TK, 3, 7 + seed], device=device)
        inputs, *last, keys, values = leaves = [named[name].requires_grad_() for name in given]
        hidden = tuple(last) if len(last) > 1 else last[0]

        def call() -> list[Tensor]:
            outputs, after = module(inputs, hidden, keys, values, lens)
            after = after if isinstance(after, tuple) else (after,)
            return [outputs, *after, module.attention_weights]

        upstream = [x for name, x in named.items() if name.startswith("d ")]
        explain = partial(module.explain, inputs, hidden, keys, values, lens)
        return Prepared([*leaves, *module.parameters()], [lens, *upstream], call, explain)

    outputs = ("outputs", *state, "weights")
    return Problem(cls.__name__, _labels(outputs, (*given, *parameters)), prepare)


def judged_tokens(cls: Cell, backend: str, dtype: torch.dtype, device: str) -> Worst:
    """Of greedy decoding: plain PyTorch takes the tokens that came out as given inputs.

    Each has to be the likeliest after those before it, but for what the parity rule allows both its
    logit and the likeliest one to be off; what follows the end of a row has to be padding.
    """
    worst = [_tokens(cls, seed, backend, dtype, device) for seed in range(2)]
    return max(each for pair in worst for each in pair)


def _tokens(
    cls: Cell,
    seed: int, backend: str, dtype: torch.dtype, device: str,
) -> tuple[Worst, Worst]:  # fmt: skip
    first, last, blank = _SPECIAL

    def drawn(dtype_of: torch.dtype, place: str) -> tuple[Any, ...]:
        layers: Any = _module(cls, seed)
        layers["dense"].weight.data *= 4
        layers["dense"].bias.data[last] += 2.5  # rows end at several steps
        layers = layers.to(dtype).to(place, dtype_of)
        named = _numbers(cls, seed, dtype, dtype_of, place)
        hidden = named["hidden"]
        state = (hidden, named["cell"]) if "cell" in named else hidden
        lens = torch.tensor([_TK, 3, 7 + seed], device=place)
        return layers, state, (named["keys"], named["values"], lens)

    def by_plain(dtype_of: torch.dtype, place: str) -> tuple[Tensor, Tensor]:
        """Logits (B,T,V) and weights (B,T,Tk), in fp64 on the CPU."""
        layers, state, of_memory = drawn(dtype_of, place)
        with backends.use("reference"):
            embedded = layers["embedding"](before.t().to(place))
            outputs, _ = layers["decoder"](embedded, state, *of_memory)
        logits = layers["dense"](outputs).transpose(0, 1)
        weights = layers["decoder"].attention_weights
        return logits.cpu().double(), weights.cpu().double()

    with torch.no_grad():
        layers, state, of_memory = drawn(dtype, device)
        attention, rnn = layers["decoder"].attention, layers["decoder"].rnn
        with backends.use(backend):
            memory = attention.memory(*of_memory)
            written = decode_greedily(
                (attention, rnn, layers["embedding"], layers["dense"]),
                *(state, memory, _SPECIAL, [], _MOST),
            )
        assert written is not None
        tokens, weights = (x.cpu() for x in written)
        before = torch.cat([torch.full((_B, 1), first), tokens[:, :-1]], 1)
        (logits, exact), (eager_logits, eager) = (
            by_plain(*where) for where in ((torch.float64, "cpu"), (dtype, device))
        )
    ended = (before == last).cumsum(1) > 0
    all_ended = (ended | (tokens == last)).all(0)
    padded = bool((tokens[ended] == blank).all())
    stopped = not all_ended[:-1].any() and (bool(all_ended[-1]) or tokens.shape[1] == _MOST)
    error = parity.error(eager_logits, logits)
    allowed = 2 * parity.allowed(error, float(logits.abs().max()), dtype)
    behind = logits.max(-1).values - logits.gather(2, tokens.unsqueeze(2)).squeeze(2)
    off = float(behind[~ended].max()) if padded and stopped else math.inf
    of_weights = parity.error(eager, exact)
    limit = parity.allowed(of_weights, float(exact.abs().max()), dtype)
    return (
        Worst(off / allowed, error / allowed, "tokens"),
        Worst(parity.error(weights, exact) / limit, of_weights / limit, "weights"),
    )
