"""The settings and the history of a training, and the model that settings describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.pairs import Pairs, Vocabs
from bahdanau_fast.seq2seq.model.decoders import (
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    StepDecoder,
)
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder, Seq2SeqEncoder, init_xavier

__all__ = ["CHOICES", "METRICS", "TRAINING", "History", "Settings", "build_model"]

METRICS = {"loss": "loss", "bleu": "BLEU", "chrf": "chrF"}
"""Metrics of the validation set, and their names in print."""

CHOICES = {
    "cell": ("gru", "lstm"),
    "attention": ("additive", "dot", "none"),
    "schedule": ("cosine", "constant"),
    "best_metric": tuple(METRICS),
}
"""Settings with a fixed set of values."""


@dataclass(frozen=True)
class Settings:
    """Everything a training depends on besides its data.

    Attributes:
        embed_size: E.
        num_hiddens: H.
        num_layers: L.
        dropout: on the attention weights and between layers.
        embed_dropout: on embeddings and on the inputs of the output layer.
        cell: "gru" or "lstm".
        attention: "additive", "dot", or "none" for one fixed context.
        bidirectional: whether the encoder reads the source from both ends.
        epochs: passes over the data.
        batch_size: B, of each process.
        lr: learning rate of Adam at its highest.
        schedule: "cosine" lowers the learning rate to a twentieth, "constant" keeps it.
        clip: largest norm of the gradient.
        label_smoothing: probability spread evenly over all tokens.
        bf16: compute in bfloat16 under autocast; the weights stay fp32.
        seed: of weights, batches and dropout.
        best_metric: metric of the validation set that chooses the best epoch: "loss" (lowest),
            "bleu" or "chrf" (highest; the lowest loss decides between equal scores).

    Raises:
        TypeError, ValueError: a setting out of its range.
    """

    embed_size: int = 32
    num_hiddens: int = 128
    num_layers: int = 1
    dropout: float = 0.0
    embed_dropout: float = 0.0
    cell: str = "gru"
    attention: str = "additive"
    bidirectional: bool = False
    epochs: int = 3
    batch_size: int = 128
    lr: float = 3e-3
    schedule: str = "cosine"
    clip: float = 1.0
    label_smoothing: float = 0.0
    bf16: bool = False
    seed: int = 0
    best_metric: str = "loss"

    def __post_init__(self) -> None:
        for name in ("embed_size", "num_hiddens", "num_layers", "epochs", "batch_size"):
            checks.positive_int(name, getattr(self, name))
        for name in ("dropout", "embed_dropout", "label_smoothing"):
            checks.probability(name, getattr(self, name))
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                checks.reject(ValueError, name, "be above 0", getattr(self, name))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                need = f"be one of {', '.join(map(repr, known))}"
                checks.reject(ValueError, name, need, repr(getattr(self, name)))


TRAINING = Settings(
    embed_size=256,
    num_hiddens=256,
    dropout=0.1,
    embed_dropout=0.3,
    bidirectional=True,
    epochs=20,
    batch_size=64,
    lr=2e-3,
    label_smoothing=0.1,
)
"""The defaults of the command ``train``."""


@dataclass
class History:
    """Losses, times and validations of a training.

    Attributes:
        losses: per step, cross-entropy per target token, smoothing included.
        seconds: per step, wall time.
        tokens: per step, target tokens of all processes.
        validations: per epoch, ``{"epoch", "loss", "bleu", "chrf"}`` on the validation part.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over all steps; 0 before the first."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0


def build_model(vocabs: Vocabs | Pairs, settings: Settings) -> EncoderDecoder:
    """A new model for these vocabularies, with weights drawn from ``settings.seed``."""
    sizes = (settings.embed_size, settings.num_hiddens, settings.num_layers)
    options = (settings.dropout, settings.cell)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        encoder = Seq2SeqEncoder(
            len(vocabs.source_vocab),
            *sizes,
            *options,
            bidirectional=settings.bidirectional,
            embed_dropout=settings.embed_dropout,
            packed=True,
        )
        decoder: StepDecoder
        if settings.attention == "none":
            decoder = Seq2SeqDecoder(
                len(vocabs.target_vocab), *sizes, *options, embed_dropout=settings.embed_dropout
            )
        else:
            decoder = Seq2SeqAttentionDecoder(
                len(vocabs.target_vocab),
                *sizes,
                *options,
                embed_dropout=settings.embed_dropout,
                attention=settings.attention,
                key_size=encoder.output_size,
            )
        return EncoderDecoder(encoder, decoder).apply(init_xavier)
