"""What attention adds to a training step and to inference of a recurrent decoder.

``python -m benchmarks.training`` runs five decoders on the same batches and weights, in turns: the
course's with attention and without, the latter with our loss (the course's keeps the vocabulary in
the middle, which takes longer), and ours step by step in Python and as one operator. A step is
forward, loss, backward, clipping and Adam, encoder and output layer included; inference is the
forward with given targets. Losses are compared first. ``--bf16`` has the forward under autocast;
``--json OUT`` keeps the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bahdanau_fast.seq2seq import (
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    Seq2SeqEncoder,
    masked_cross_entropy,
)

from .contestants.baselines import CourseAttention
from .tables import markdown, spread_text
from .timing.machine import save
from .timing.measure import allocated_growth, interleave

COURSE, NONE, STEPS, OURS = "course", "no attention", "ours, step by step", "ours"
OUR_LOSS = "no attention, our loss"
PARITY = {False: 1e-4, True: 2.0**-7}  # relative difference of the losses; a bf16 has 8 bits


@dataclass(frozen=True)
class Setting:
    """One model and batch."""

    name: str
    batch: int
    source: int
    target: int
    embed: int
    hidden: int
    layers: int
    vocab: int
    bf16: bool = False


SETTINGS = (
    Setting("hidden 512", 64, 50, 50, 256, 512, 1, 5000),
    Setting("hidden 256", 64, 30, 30, 256, 256, 2, 5000),
    Setting("hidden 32", 64, 10, 10, 32, 32, 2, 200),
)


class _CourseDecoder(Seq2SeqAttentionDecoder):
    """The course's loop: calls its attention, which projects the keys, at each step."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        hidden = self.attention.W_k.out_features
        self.course = CourseAttention(hidden, hidden, hidden)
        del self.attention

    def forward(self, X: Tensor, state: Any) -> tuple[Tensor, Any]:
        enc_outputs, hidden, lens = state
        outputs = []
        for embedded in self.embedding(X).permute(1, 0, 2):
            query = hidden[-1].unsqueeze(1)
            context = self.course(query, enc_outputs, enc_outputs, lens)
            inputs = torch.cat((context, embedded.unsqueeze(1)), dim=-1)
            out, hidden = self.rnn(inputs.permute(1, 0, 2), hidden)
            outputs.append(out)
        logits = self.dense(torch.cat(outputs, dim=0))
        return logits.permute(1, 0, 2), [enc_outputs, hidden, lens]


class _SteppedDecoder(Seq2SeqAttentionDecoder):
    """Ours step by step: a decoder that overrides ``step`` does not take the operator."""

    def step(self, embedded: Tensor, hidden: Any, memory: Any) -> Any:
        return super().step(embedded, hidden, memory)


DECODERS: dict[str, Callable[..., nn.Module]] = {
    COURSE: _CourseDecoder,
    NONE: Seq2SeqDecoder,
    OUR_LOSS: Seq2SeqDecoder,
    STEPS: _SteppedDecoder,
    OURS: Seq2SeqAttentionDecoder,
}


def _course_loss(logits: Tensor, labels: Tensor, valid_lens: Tensor) -> Tensor:
    """The course's masked cross-entropy (B,)."""
    weights = (torch.arange(labels.shape[1]) < valid_lens[:, None]).float()
    unweighted = F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")
    return (unweighted * weights).mean(dim=1)


class _Work:
    """One of the decoders behind an encoder, with a batch."""

    def __init__(self, name: str, setting: Setting, *batch: Tensor) -> None:
        torch.manual_seed(0)
        sizes = (setting.vocab, setting.embed, setting.hidden, setting.layers)
        self.model = EncoderDecoder(Seq2SeqEncoder(*sizes), DECODERS[name](*sizes))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.measure = _course_loss if name in (COURSE, NONE) else masked_cross_entropy
        self.source, self.target, self.source_lens, self.target_lens = batch
        self.bf16 = setting.bf16

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits: Tensor = self.model(self.source, self.target, self.source_lens)[0]
        return logits.float()

    def train(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.measure(self.forward(), self.target, self.target_lens).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def infer(self) -> Tensor:
        with torch.no_grad():
            return self.forward()


def _works(setting: Setting) -> dict[str, _Work]:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch = (
        draw(4, setting.vocab, setting.batch, setting.source),
        draw(4, setting.vocab, setting.batch, setting.target),
        draw(setting.source // 2, setting.source + 1, setting.batch),
        draw(setting.target // 2, setting.target + 1, setting.batch),
    )
    works = {name: _Work(name, setting, *batch) for name in DECODERS}
    drawn = works[COURSE].model.state_dict()
    weights = {name.replace(".course.", ".attention."): x for name, x in drawn.items()}
    for name in (OURS, STEPS):
        works[name].model.load_state_dict(weights)
    return works


def compare(setting: Setting, seconds: float, min_rounds: int = 5) -> dict[str, Any]:
    """Time and memory of one setting.

    Raises:
        RuntimeError: the losses of the three decoders with attention differ.
    """
    works = _works(setting)
    losses = {name: [work.train() for _ in range(3)] for name, work in works.items()}
    for name in (STEPS, OURS):
        for a, b in zip(losses[name], losses[COURSE], strict=True):
            if not abs(a - b) <= PARITY[setting.bf16] * abs(b):
                raise RuntimeError(f"{setting.name}: losses of {name!r} are {losses[name]}, "
                                   f"of the course {losses[COURSE]}")  # fmt: skip
    trained = interleave({n: w.train for n, w in works.items()}, seconds, min_rounds)
    inferred = interleave({n: w.infer for n, w in works.items()}, seconds / 2, min_rounds)
    peaks = {name: allocated_growth(work.train) for name, work in works.items()}
    return {
        "setting": asdict(setting),
        "train": trained.packed(),
        "infer": inferred.packed(),
        "peak_bytes": peaks,
    }


def times(figures: list[dict[str, Any]]) -> list[str]:
    """Time and memory of every decoder, as Markdown."""
    cells = []
    for row in figures:
        for name in row["train"]:
            spreads = (spread_text(row[task][name]) for task in ("train", "infer"))
            peak = f"{row['peak_bytes'][name] / 1e6:.0f}"
            cells.append([row["setting"]["name"], name, *spreads, peak])
    heads = ["setting", "decoder", "training step (ms)", "inference (ms)", "peak memory (MB)"]
    return markdown(heads, cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of training per setting")
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--bf16", action="store_true", help="forward under autocast")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    chosen = [replace(s, bf16=options.bf16) for s in SETTINGS if options.only in s.name]
    figures = [compare(setting, options.seconds) for setting in chosen]
    print("\n".join(times(figures)))
    save(options.json, {"settings": figures})


if __name__ == "__main__":
    main()
