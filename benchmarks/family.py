"""Steps of others' attention modules, before and after ``bf.fuse``, in one process and in turns.

Run ``python -m benchmarks.family [--seconds S] [--pairs FILE] [--json FILE]``. The modules come
from the published wheels (:mod:`.contestants.published`). A loop of steps on one source, as a
decoder takes them, is timed with the module as it is and fused, after parity with fp64 is checked:

no grad     on keys that are projected already
with grad   the same and its backward, to parameters, states, queries and projected keys
source      with the projection of the keys, forward and backward, once in the loop

A ratio is that of the fastest rounds, which a busy machine disturbs least.

Three more rows: ReLU at captioning's shape against the eager formula, and compiled; a mask against
the same length. The last row is a training step of a whole model, JoeyNMT's recurrent decoder
behind a GRU, on ``--pairs FILE`` (a source, a tab and a target per line) or on dates; the losses
have to be the same.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast import parity
from bahdanau_fast.ops.attend import attend
from bahdanau_fast.seq2seq.data import dates

from .contestants.published import UnavailableError, load
from .contestants.translator import Translator, train
from .tables import markdown
from .timing.machine import save
from .timing.measure import interleave

STEPS, CHECKED = 20, 3  # of a loop: that is timed, and that is checked
TRAINED, BATCH, SIZE = 50, 32, 256  # steps of the whole model, pairs of each, features
MODES = ("no grad", "with grad", "source")
S, E = "speechbrain.nnet.attention", "espnet.nets.pytorch_backend.rnn.attentions"
C = "TTS.tts.layers.tacotron.attentions"


class Sizes(NamedTuple):
    """Features of keys (and values) and of the decoder; channels and taps of the convolution."""

    batch: int
    keys: int
    encoder: int
    decoder: int
    hidden: int
    channels: int
    taps: int


SIZES = (Sizes(8, 400, 512, 512, 512, 10, 201), Sizes(32, 160, 512, 1024, 128, 32, 31))


class Given(nn.Module):
    """In the place of the layer that projects the keys: they are there."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys.detach().requires_grad_()

    def forward(self, _: Tensor) -> Tensor:
        return self.keys


class Loop:
    """Steps of SpeechBrain's modules on one source."""

    key_layer = "mlp_enc"

    def __init__(
        self, module: Any, sizes: Sizes, mode: str, dtype: torch.dtype, seed: int = 1
    ) -> None:
        self.module, self.mode, self.sizes = module.to(dtype), mode, sizes
        draw = torch.Generator().manual_seed(seed)
        shapes = [(sizes.keys, sizes.encoder), (1, sizes.encoder), *[(sizes.decoder,)] * STEPS]
        drawn = [torch.randn(sizes.batch, *shape, generator=draw).to(dtype) for shape in shapes]
        self.states, self.grad, *self.queries = (x.requires_grad_() for x in drawn)
        if mode != "source":
            setattr(module, self.key_layer, Given(getattr(module, self.key_layer)(self.states)))

    def begin(self) -> None:
        self.module.reset()
        self.lens = self.states.new_full((self.sizes.batch,), self.sizes.keys)

    def step(self, query: Tensor) -> Tensor:
        """The context."""
        context: Tensor = self.module(self.states, self.lens, query)[0]
        return context

    def __call__(self, steps: int = STEPS) -> list[Tensor]:
        """Contexts, and outside of "no grad" the gradients."""
        queries = self.queries[:steps]
        with torch.set_grad_enabled(self.mode != "no grad"):
            self.begin()
            contexts = torch.stack([self.step(query) for query in queries], 1)
            if self.mode == "no grad":
                return [contexts]
            layer = getattr(self.module, self.key_layer)
            asked = [p for p in self.module.parameters() if p.numel() > 1]
            asked += [layer.keys] if isinstance(layer, Given) else []
            grad = self.grad.detach().expand_as(contexts)
            found = torch.autograd.grad(contexts, [self.states, *queries, *asked], grad)
            return [contexts.detach(), *found]


class EspnetLoop(Loop):
    """Steps of ESPnet's modules: the decoder hands the weights on."""

    def begin(self) -> None:
        self.module.reset()
        self.before: Tensor | None = None

    def step(self, query: Tensor) -> Tensor:
        lens = [self.sizes.keys] * self.sizes.batch
        context, self.before = self.module(self.states, lens, query, self.before)
        return context


class CoquiLoop(Loop):
    """Steps of coqui's module: projected keys are an argument."""

    key_layer = "inputs_layer"

    def begin(self) -> None:
        self.module.init_states(self.states)
        for name in ("attention_weights", "attention_weights_cum"):
            if hasattr(self.module, name):
                setattr(self.module, name, getattr(self.module, name).to(self.states.dtype))
        self.keys = self.module.preprocess_inputs(self.states)
        self.mask = torch.ones(self.sizes.batch, self.sizes.keys, dtype=torch.bool)

    def step(self, query: Tensor) -> Tensor:
        context: Tensor = self.module(query, self.states, self.keys, self.mask)
        return context


def _coqui(s: Sizes, location: bool) -> Any:
    options = (location, s.channels, s.taps, False, "softmax", False, False, False)
    return load(C, "OriginalAttention")(s.decoder, s.encoder, s.hidden, *options)


def _plain(s: Sizes) -> tuple[int, int, int]:
    return s.encoder, s.decoder, s.hidden


PEERS: dict[str, tuple[type[Loop], Callable[[Sizes], Any]]] = {
    "SpeechBrain content": (
        Loop,
        lambda s: load(S, "ContentBasedAttention")(*_plain(s), s.encoder),
    ),
    "SpeechBrain location": (
        Loop,
        lambda s: load(S, "LocationAwareAttention")(*_plain(s), s.encoder, s.channels, s.taps // 2),
    ),
    "ESPnet AttAdd": (EspnetLoop, lambda s: load(E, "AttAdd")(*_plain(s))),
    "ESPnet AttLoc": (
        EspnetLoop,
        lambda s: load(E, "AttLoc")(*_plain(s), s.channels, s.taps // 2),
    ),
    "coqui content": (CoquiLoop, functools.partial(_coqui, location=False)),
    "coqui location": (CoquiLoop, functools.partial(_coqui, location=True)),
}

# What docs/family.md says of them stands in the line of its first table that has these words.
GAINS = {
    "SpeechBrain `ContentBasedAttention`": ("SpeechBrain content", "ESPnet AttAdd"),
    "SpeechBrain `LocationAwareAttention`": ("SpeechBrain location", "ESPnet AttLoc"),
    "coqui `OriginalAttention`": ("coqui location",),
    "Show, Attend and Tell": ("ReLU, eager", "ReLU, compiled"),
}


def off(theirs: Any, ours: Any, loop: type[Loop], sizes: Sizes, mode: str, seed: int) -> float:
    """The largest error of the fused module, as a multiple of what the parity rule allows."""
    exact, eager, found = (
        loop(copy.deepcopy(module), sizes, mode, dtype, seed)(CHECKED)
        for module, dtype in (
            (theirs, torch.float64),
            (theirs, torch.float32),
            (ours, torch.float32),
        )
    )
    return max(
        parity.error(c, a) / parity.allowed(parity.error(b, a), float(a.abs().max()), torch.float32)
        for a, b, c in zip(exact, eager, found, strict=True)
    )


def check(theirs: Any, ours: Any, loop: type[Loop], sizes: Sizes, mode: str) -> None:
    """Raise RuntimeError where the fused module breaks the parity rule.

    A draw that breaks it is followed by two more, which both have to keep it: gradients of a key
    with nearly all of the weight hang on a few roundings, theirs and ours, and one draw in some
    tens is worse by chance.
    """
    if off(theirs, ours, loop, sizes, mode, 1) <= 1:
        return
    again = [off(theirs, ours, loop, sizes, mode, seed) for seed in (2, 3)]
    if not max(again) <= 1:
        raise RuntimeError(f"parity fails: {again} times what is allowed")


def timed(calls: dict[str, Callable[[], Any]], seconds: float, steps: int = 1) -> dict[str, float]:
    """Name to milliseconds of the fastest round."""
    for call in calls.values():
        call()
    samples = interleave(calls, seconds, min_rounds=7).samples
    return {name: 1e3 * min(times) / steps for name, times in samples.items()}


def others(seconds: float) -> list[dict[str, Any]]:
    """ReLU against eager and compiled code, and a mask against a length."""
    torch.manual_seed(0)
    q, k, v = torch.randn(32, 1, 512), torch.randn(32, 196, 512), torch.randn(32, 196, 512)
    w = torch.randn(1, 512) / 20

    def eager() -> Tensor:
        weights = torch.softmax(nn.functional.linear(torch.relu(k + q), w).squeeze(2), 1)
        return (v * weights.unsqueeze(2)).sum(1)

    def ours() -> Tensor:
        context: Tensor = attend.now(q, k, v, w, activation=1)[0]
        return context.squeeze(1)

    attention, lens = bf.AdditiveAttention(512, 512, 512).eval(), torch.arange(1, 33) * 6
    seen = torch.arange(196) < lens.unsqueeze(1)
    compiled = torch.compile(eager)
    with torch.no_grad():
        torch.testing.assert_close(ours(), eager())
        lengths, masked = attention.memory(k, v, lens), attention.memory(k, v, mask=seen)
        torch.testing.assert_close(attention.attend(q, masked), attention.attend(q, lengths))
        pairs = {
            ("ReLU, eager", "no grad"): (eager, ours),
            ("ReLU, compiled", "no grad"): (compiled, ours),
            ("length, then mask", "no grad"): (
                lambda: attention.attend(q, lengths),
                lambda: attention.attend(q, masked),
            ),
        }
        return [
            {"who": who, "sizes": [32, 196, 512], "mode": mode}
            | timed({"theirs": theirs, "ours": mine}, seconds)
            for (who, mode), (theirs, mine) in pairs.items()
        ]


def trained(pairs: list[tuple[str, str]], seconds: float) -> dict[str, Any]:
    """Milliseconds of a training step of the whole model; RuntimeError where losses differ."""
    torch.manual_seed(0)
    theirs = Translator(SIZE)
    ours = copy.deepcopy(theirs)
    bf.fuse(ours)
    losses = {}

    def call(name: str, model: Translator) -> None:
        losses[name] = train(copy.deepcopy(model), pairs, TRAINED, BATCH)

    models = {"theirs": theirs, "ours": ours}
    found = timed({n: functools.partial(call, n, m) for n, m in models.items()}, seconds, TRAINED)
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if apart > 1e-4:
        raise RuntimeError(f"the losses of {TRAINED} steps are {apart} apart")
    return {"who": "JoeyNMT, a model", "sizes": [BATCH, SIZE], "mode": "training"} | found


def pairs_of(file: Path | None) -> list[tuple[str, str]]:
    """Pairs of a file, in any order, or dates in words and in digits."""
    if file is None:
        return [(each.text, each.iso) for each in dates.generate(2 * TRAINED * BATCH)]
    rows = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines())
    pairs = [(source, target) for source, target, *_ in rows]
    return random.Random(0).sample(pairs, min(len(pairs), 2 * TRAINED * BATCH))


def measure(seconds: float, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Milliseconds of a step of every module, and of the other rows."""
    rows = []
    for sizes, (who, (loop, make)) in itertools.product(SIZES, PEERS.items()):
        torch.manual_seed(0)
        theirs = make(sizes)
        ours = copy.deepcopy(theirs)
        bf.fuse(ours)
        for mode in MODES:
            check(theirs, ours, loop, sizes, mode)
            pair = {"theirs": copy.deepcopy(theirs), "ours": copy.deepcopy(ours)}
            calls = {n: loop(m, sizes, mode, torch.float32) for n, m in pair.items()}
            found = timed(dict(calls), seconds, STEPS)
            rows.append({"who": who, "sizes": [*sizes], "mode": mode} | found)
    return [*rows, *others(seconds), trained(pairs, seconds)]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table, as Markdown."""
    cells = []
    for row in rows:
        theirs, ours = row["theirs"], row["ours"]
        figures = (f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}x")
        cells.append([row["who"], str(tuple(row["sizes"])), row["mode"], *figures])
    head = ["who", "sizes", "mode", "theirs (ms a step)", "fused (ms a step)", "theirs / fused"]
    return markdown(head, cells)


def gains(rows: list[dict[str, Any]], whose: tuple[str, ...]) -> str:
    """The smallest and the largest ratio of theirs to fused, of all sizes and modes."""
    ratios = [row["theirs"] / row["ours"] for row in rows if row["who"] in whose]
    return f"{min(ratios):.1f} to {max(ratios):.1f}x"


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.family", description="Others' modules, fused."
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing per row")
    parser.add_argument("--pairs", type=Path, help="sentences to train on: source, tab, target")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # ESPnet's, at each source
    try:
        rows = measure(options.seconds, pairs_of(options.pairs))
    except UnavailableError as error:
        raise SystemExit(f"family: nothing to compare with: {error}") from None
    print("\n".join(lines(rows)))
    save(options.json, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
