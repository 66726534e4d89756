"""Steps of others' attention modules, before and after ``bf.fuse``, in one process and in turns.

Run ``python -m benchmarks.family [--seconds S] [--json FILE]``. The modules come from the published
wheels (:mod:`.contestants.published`). A loop of steps on one source, as a decoder takes them, is
timed with the module as it is and fused; ``bf.fuse`` has compared the two (and ``tests/fuse``):

no grad     on keys that are projected already
with grad   the same and its backward, to parameters, states, queries and projected keys
source      with the projection of the keys, forward and backward, once in the loop

A ratio is that of the fastest rounds, which a busy machine disturbs least. The last row is a
training step of a whole model, JoeyNMT's recurrent decoder behind a GRU, on dates.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast.seq2seq.data import dates

from .contestants.published import UnavailableError, load
from .tables import markdown
from .timing.machine import save
from .timing.measure import interleave

STEPS = 20  # of a loop
VOCABULARY = 128  # letters of the whole model; others are the last one
TRAINED, BATCH, SIZE = 50, 32, 256  # steps of the whole model, pairs of each, features
MODES = ("no grad", "with grad", "source")


# Features of keys (and values) and of the decoder; channels and taps of the convolution.
Sizes = namedtuple("Sizes", "batch keys encoder decoder hidden channels taps")
SIZES = (Sizes(8, 400, 512, 512, 512, 10, 201), Sizes(32, 160, 512, 1024, 128, 32, 31))


class Given(nn.Module):
    """In the place of the layer that projects the keys: they are there."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys.detach().requires_grad_()

    def forward(self, _: Tensor) -> Tensor:
        return self.keys


def _speechbrain(module: Any, s: Sizes, states: Tensor, queries: Sequence[Tensor]) -> list[Tensor]:
    module.reset()
    lens = states.new_full((s.batch,), s.keys)
    return [module(states, lens, query)[0] for query in queries]


def _espnet(module: Any, s: Sizes, states: Tensor, queries: Sequence[Tensor]) -> list[Tensor]:
    module.reset()
    contexts, before = [], None
    for query in queries:  # the decoder hands the weights on
        context, before = module(states, [s.keys] * s.batch, query, before)
        contexts.append(context)
    return contexts


def _coqui(module: Any, s: Sizes, states: Tensor, queries: Sequence[Tensor]) -> list[Tensor]:
    module.init_states(states)
    keys = module.preprocess_inputs(states)
    mask = torch.ones(s.batch, s.keys, dtype=torch.bool)
    return [module(query, states, keys, mask) for query in queries]


class Peer(NamedTuple):
    """A module of others: its file and class, what it takes, its steps, its key layer."""

    file: str
    name: str
    options: Callable[[Sizes], tuple[Any, ...]]
    steps: Callable[..., list[Tensor]]
    key_layer: str = "mlp_enc"


def _original(location: bool, s: Sizes) -> tuple[Any, ...]:
    usual = (False, "softmax", False, False, False)
    return (s.decoder, s.encoder, s.hidden, location, s.channels, s.taps, *usual)


_S = partial(Peer, "speechbrain.nnet.attention", steps=_speechbrain)
_E = partial(Peer, "espnet.nets.pytorch_backend.rnn.attentions", steps=_espnet)
_C = partial(Peer, "TTS.tts.layers.tacotron.attentions", "OriginalAttention", steps=_coqui)
PEERS = {
    "SpeechBrain content": _S("ContentBasedAttention", lambda s: (*s[2:5], s.encoder)),
    "SpeechBrain location": _S(
        "LocationAwareAttention", lambda s: (*s[2:5], s.encoder, s.channels, s.taps // 2)
    ),
    "ESPnet AttAdd": _E("AttAdd", lambda s: s[2:5]),
    "ESPnet AttLoc": _E("AttLoc", lambda s: (*s[2:5], s.channels, s.taps // 2)),
    "coqui content": _C(partial(_original, False), key_layer="inputs_layer"),
    "coqui location": _C(partial(_original, True), key_layer="inputs_layer"),
}


class Loop:
    """Steps of a module on one source, outside of "no grad" with the gradients."""

    def __init__(self, peer: Peer, module: nn.Module, sizes: Sizes, mode: str) -> None:
        draw = torch.Generator().manual_seed(1)
        shapes = [(sizes.keys, sizes.encoder), (1, sizes.encoder), *[(sizes.decoder,)] * STEPS]
        drawn = [torch.randn(sizes.batch, *shape, generator=draw) for shape in shapes]
        self.states, self.grad, *self.queries = (x.requires_grad_() for x in drawn)
        self.asked = [self.states, *self.queries]
        if mode != "source":
            given = Given(getattr(module, peer.key_layer)(self.states))
            setattr(module, peer.key_layer, given)
            self.asked.append(given.keys)
        self.asked += [p for p in module.parameters() if p.numel() > 1]
        self.steps = partial(peer.steps, module, sizes, self.states, self.queries)
        self.mode = mode

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.mode != "no grad"):
            contexts = torch.stack(self.steps(), 1)
            if self.mode != "no grad":
                grad = self.grad.detach().expand_as(contexts)
                torch.autograd.grad(contexts, self.asked, grad)


def timed(calls: dict[str, Callable[[], Any]], seconds: float, steps: int = 1) -> dict[str, float]:
    """Name to milliseconds of the fastest round."""
    for call in calls.values():
        call()
    samples = interleave(calls, seconds, min_rounds=7).samples
    return {name: 1e3 * min(times) / steps for name, times in samples.items()}


class Translator(nn.Module):
    """Letters to letters: an embedding, a GRU and JoeyNMT's decoder, all of so many features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=0)
        self.encoder: Any = nn.GRU(size, size, batch_first=True)
        self.encoder.output_size = size  # JoeyNMT's decoder asks for it
        self.decoder = load("joeynmt.decoders", "RecurrentDecoder")(
            emb_size=size, hidden_size=size, encoder=self.encoder, vocab_size=VOCABULARY
        )

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of the letters of (B,T) targets, from (B,S) sources."""
        states, last = self.encoder(self.embedding(source))
        given, wanted = self.embedding(target[:, :-1]), target[:, 1:]
        mask, steps = (source > 0).unsqueeze(1), given.shape[1]
        scores, *_ = self.decoder(given, states, last[-1], mask, steps, trg_mask=None)
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0)


def batch_of(texts: Sequence[str]) -> Tensor:
    """(B,T): 1 to begin, letters, 2 to end, then zeros."""
    rows = [torch.tensor([1, *(min(ord(c), VOCABULARY - 1) for c in text), 2]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(model: Translator, pairs: Sequence[Any], steps: int, batch: int) -> list[float]:
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
    models = {"theirs": theirs, "ours": copy.deepcopy(theirs)}
    bf.fuse(models["ours"])
    pairs = [(each.text, each.iso) for each in dates.generate(2 * TRAINED * BATCH)]
    calls = {
        name: lambda model=model: train(copy.deepcopy(model), pairs, TRAINED, BATCH)
        for name, model in models.items()
    }
    found = timed(calls, seconds, TRAINED)
    return {"who": "JoeyNMT, a model", "sizes": [BATCH, SIZE], "mode": "training"} | found


def measure(seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of a step of every module, and of the model."""
    rows = []
    for sizes, (who, peer) in itertools.product(SIZES, PEERS.items()):
        torch.manual_seed(0)
        theirs = load(peer.file, peer.name)(*peer.options(sizes))
        for mode in MODES:
            pair = {name: copy.deepcopy(theirs) for name in ("theirs", "ours")}
            report = bf.fuse(pair["ours"])
            calls = {name: Loop(peer, module, sizes, mode) for name, module in pair.items()}
            calls["ours"]()
            if not report.fused:
                raise RuntimeError(f"{who} was not fused:\n{report}")
            row = {"who": who, "sizes": [*sizes], "mode": mode}
            rows.append(row | timed(dict(calls), seconds, STEPS))
    return [*rows, trained(seconds)]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table, as Markdown."""
    cells = []
    for who, sizes, mode, theirs, ours in map(dict.values, rows):
        figures = (f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}x")
        cells.append([who, str(tuple(sizes)), mode, *figures])
    head = ["who", "sizes", "mode", "theirs (ms a step)", "fused (ms a step)", "theirs / fused"]
    return markdown(head, cells)


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.family", description=__doc__)
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
