"""Steps of others' attention modules, before and after ``bf.fuse``, in one process and in turns.

Run ``python -m benchmarks.family [--seconds S] [--json FILE]``. The modules come from the published
wheels (:mod:`.contestants.published`). A loop of steps on one source, as a decoder takes them, is
timed with the module as it is and fused; ``bf.fuse`` has compared the two (and ``tests/fuse``):

no grad     on keys that are projected already
with grad   the same and its backward, to parameters, states, queries and projected keys
source      with the projection of the keys, forward and backward, once in the loop

A ratio is that of the fastest rounds, which a busy machine disturbs least. Two more rows: ReLU at
captioning's shape against the eager formula, and compiled. The last row is a training step of a
whole model, JoeyNMT's recurrent decoder behind a GRU, on dates.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast.ops.attend import attend
from bahdanau_fast.seq2seq.data import dates

from .contestants.published import UnavailableError, load
from .tables import markdown
from .timing.machine import save
from .timing.measure import interleave

STEPS = 20  # of a loop
VOCABULARY = 128  # letters of the whole model; others are the last one
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

    def __init__(self, module: Any, sizes: Sizes, mode: str) -> None:
        self.module, self.mode, self.sizes = module, mode, sizes
        draw = torch.Generator().manual_seed(1)
        shapes = [(sizes.keys, sizes.encoder), (1, sizes.encoder), *[(sizes.decoder,)] * STEPS]
        drawn = [torch.randn(sizes.batch, *shape, generator=draw) for shape in shapes]
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

    def __call__(self) -> None:
        """All steps, and outside of "no grad" the gradients."""
        with torch.set_grad_enabled(self.mode != "no grad"):
            self.begin()
            contexts = torch.stack([self.step(query) for query in self.queries], 1)
            if self.mode == "no grad":
                return
            layer = getattr(self.module, self.key_layer)
            asked = [p for p in self.module.parameters() if p.numel() > 1]
            asked += [layer.keys] if isinstance(layer, Given) else []
            grad = self.grad.detach().expand_as(contexts)
            torch.autograd.grad(contexts, [self.states, *self.queries, *asked], grad)


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


def timed(calls: dict[str, Callable[[], Any]], seconds: float, steps: int = 1) -> dict[str, float]:
    """Name to milliseconds of the fastest round."""
    for call in calls.values():
        call()
    samples = interleave(calls, seconds, min_rounds=7).samples
    return {name: 1e3 * min(times) / steps for name, times in samples.items()}


def others(seconds: float) -> list[dict[str, Any]]:
    """ReLU against eager and compiled code."""
    torch.manual_seed(0)
    q, k, v = torch.randn(32, 1, 512), torch.randn(32, 196, 512), torch.randn(32, 196, 512)
    w = torch.randn(1, 512) / 20

    def eager() -> Tensor:
        weights = torch.softmax(nn.functional.linear(torch.relu(k + q), w).squeeze(2), 1)
        return (v * weights.unsqueeze(2)).sum(1)

    def ours() -> Tensor:
        context: Tensor = attend.now(q, k, v, w, activation=1)[0]
        return context.squeeze(1)

    with torch.no_grad():
        torch.testing.assert_close(ours(), eager())
        return [
            {"who": who, "sizes": [32, 196, 512], "mode": "no grad"}
            | timed({"theirs": theirs, "ours": ours}, seconds)
            for who, theirs in (("ReLU, eager", eager), ("ReLU, compiled", torch.compile(eager)))
        ]


class _Encoder(nn.GRU):
    """A GRU that says how wide its states are, as JoeyNMT's decoder asks."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, batch_first=True)
        self.output_size = size


class Translator(nn.Module):
    """Letters to letters: an embedding, a GRU and JoeyNMT's recurrent decoder.

    Args:
        size: features of embeddings and states.

    Raises:
        UnavailableError: JoeyNMT cannot be downloaded.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=0)
        self.encoder = _Encoder(size)
        self.decoder = load("joeynmt.decoders", "RecurrentDecoder")(
            emb_size=size, hidden_size=size, encoder=self.encoder, vocab_size=VOCABULARY
        )

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of the letters of (B,T) targets, from (B,S) sources."""
        states, last = self.encoder(self.embedding(source))
        given, wanted = self.embedding(target[:, :-1]), target[:, 1:]
        scores, *_ = self.decoder(
            trg_embed=given,
            encoder_output=states,
            encoder_hidden=last[-1],
            src_mask=(source > 0).unsqueeze(1),
            unroll_steps=given.shape[1],
            trg_mask=None,
        )
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0)


def batch_of(texts: Sequence[str]) -> Tensor:
    """(B,T): 1 to begin, letters, 2 to end, then zeros."""
    rows = [torch.tensor([1, *(min(ord(c), VOCABULARY - 1) for c in text), 2]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(
    model: Translator, pairs: Sequence[tuple[str, str]], steps: int, batch: int
) -> list[float]:
    """The losses of some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for step in range(steps):
        at = step * batch % (len(pairs) - batch)
        sources, targets = zip(*pairs[at : at + batch], strict=True)
        optimizer.zero_grad()
        loss = model.loss(batch_of(sources), batch_of(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(seconds: float) -> dict[str, Any]:
    """Milliseconds of a training step of the whole model."""
    torch.manual_seed(0)
    theirs = Translator(SIZE)
    ours = copy.deepcopy(theirs)
    bf.fuse(ours)
    pairs = [(each.text, each.iso) for each in dates.generate(2 * TRAINED * BATCH)]

    def call(model: Translator) -> list[float]:
        return train(copy.deepcopy(model), pairs, TRAINED, BATCH)

    models = {"theirs": theirs, "ours": ours}
    calls = {name: functools.partial(call, model) for name, model in models.items()}
    found = timed(calls, seconds, TRAINED)
    return {"who": "JoeyNMT, a model", "sizes": [BATCH, SIZE], "mode": "training"} | found


def measure(seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of a step of every module, and of the other rows."""
    rows = []
    for sizes, (who, (loop, make)) in itertools.product(SIZES, PEERS.items()):
        torch.manual_seed(0)
        theirs = make(sizes)
        ours = copy.deepcopy(theirs)
        for mode in MODES:
            pair = {"theirs": copy.deepcopy(theirs), "ours": copy.deepcopy(ours)}
            report = bf.fuse(pair["ours"])
            calls = {name: loop(module, sizes, mode) for name, module in pair.items()}
            calls["ours"]()
            if not report.fused:
                raise RuntimeError(f"{who} was not fused:\n{report}")
            found = timed(dict(calls), seconds, STEPS)
            rows.append({"who": who, "sizes": [*sizes], "mode": mode} | found)
    return [*rows, *others(seconds), trained(seconds)]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table, as Markdown."""
    cells = []
    for row in rows:
        theirs, ours = row["theirs"], row["ours"]
        figures = (f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}x")
        cells.append([row["who"], str(tuple(row["sizes"])), row["mode"], *figures])
    head = ["who", "sizes", "mode", "theirs (ms a step)", "fused (ms a step)", "theirs / fused"]
    return markdown(head, cells)


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.family", description="Others' modules, fused."
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing per row")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # ESPnet's, at each source
    try:
        rows = measure(options.seconds)
    except UnavailableError as error:
        raise SystemExit(f"family: nothing to compare with: {error}") from None
    print("\n".join(lines(rows)))
    save(options.json, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
