"""The settings of a training, and the model that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bahdanau_fast.seq2seq import options
from bahdanau_fast.seq2seq.data.pairs import Pairs, Vocabs
from bahdanau_fast.seq2seq.model.decoders import (
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    StepDecoder,
)
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder, Seq2SeqEncoder, init_xavier

METRICS = {"loss": "loss", "bleu": "BLEU", "chrf": "chrF"}
"""Metrics of the validation set, and their names in print."""


@dataclass(frozen=True)
class Settings(options.Checked):
    """Everything a training depends on besides its data.

    ``python -m bahdanau_fast train --help`` says what each field means. Where "bleu" or "chrf"
    chooses the best epoch, the lowest loss decides between equal scores; the weights stay fp32
    with ``bf16``, which is autocast.

    Raises:
        TypeError, ValueError: a setting out of its range.
    """

    embed_size: int = options.count(32, "size of an embedding")
    num_hiddens: int = options.count(128, "size of a hidden state")
    num_layers: int = options.count(1, "recurrent layers of the encoder, and of the decoder")
    dropout: float = options.share(0.0, "dropout on attention weights and between layers")
    embed_dropout: float = options.share(0.0, "dropout on embeddings and before the output layer")
    cell: str = options.choice("gru", "kind of recurrent network", ("gru", "lstm"))
    attention: str = options.choice(
        "additive", "kind of attention; none: one fixed context", ("additive", "dot", "none")
    )
    bidirectional: bool = options.switch(False, "read the source from both ends")
    epochs: int = options.count(3, "passes over the data")
    batch_size: int = options.count(128, "pairs in a step (of each process)")
    lr: float = options.amount(3e-3, "highest learning rate of Adam")
    schedule: str = options.choice(
        "cosine", "of the learning rate; cosine: down to a twentieth", ("cosine", "constant")
    )
    clip: float = options.amount(1.0, "a gradient with a larger norm is scaled down to it")
    label_smoothing: float = options.share(0.0, "probability spread over all tokens")
    bf16: bool = options.switch(False, "compute in bfloat16")
    seed: int = options.other(
        0,
        "random seed of weights, splits, batches and dropout",
        type=options.at_least(0, int),
        metavar="N",
    )
    best_metric: str = options.choice(
        "loss", "how best.pt is chosen: lowest loss, or highest BLEU or chrF", tuple(METRICS)
    )


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


def build_model(vocabs: Vocabs | Pairs, settings: Settings) -> EncoderDecoder:
    """A new model for these vocabularies, with weights drawn from ``settings.seed``."""
    sizes = (settings.embed_size, settings.num_hiddens, settings.num_layers)
    args = (*sizes, settings.dropout, settings.cell)
    both: dict[str, Any] = {"embed_dropout": settings.embed_dropout}
    decoder: StepDecoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed % 2**64)
        bidirectional, source = settings.bidirectional, len(vocabs.source_vocab)
        encoder = Seq2SeqEncoder(source, *args, bidirectional=bidirectional, packed=True, **both)
        if settings.attention == "none":
            decoder = Seq2SeqDecoder(len(vocabs.target_vocab), *args, **both)
        else:
            both |= {"attention": settings.attention, "key_size": encoder.output_size}
            decoder = Seq2SeqAttentionDecoder(len(vocabs.target_vocab), *args, **both)
        return EncoderDecoder(encoder, decoder).apply(init_xavier)
