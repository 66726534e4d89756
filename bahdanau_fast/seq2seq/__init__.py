"""A small sequence-to-sequence system around additive attention, with the course's names."""

from bahdanau_fast.seq2seq.data import Batch, Pairs, Vocab, batches, encode
from bahdanau_fast.seq2seq.decoders import Seq2SeqAttentionDecoder, Seq2SeqDecoder
from bahdanau_fast.seq2seq.models import (
    AttentionDecoder,
    Decoder,
    Encoder,
    EncoderDecoder,
    Seq2SeqEncoder,
    init_xavier,
)
from bahdanau_fast.seq2seq.settings import Settings, build_model
from bahdanau_fast.seq2seq.training import Trainer, masked_cross_entropy, train
from bahdanau_fast.seq2seq.translating import Translation, greedy, translate

__all__ = [
    "AttentionDecoder",
    "Batch",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Pairs",
    "Seq2SeqAttentionDecoder",
    "Seq2SeqDecoder",
    "Seq2SeqEncoder",
    "Settings",
    "Trainer",
    "Translation",
    "Vocab",
    "batches",
    "build_model",
    "encode",
    "greedy",
    "init_xavier",
    "masked_cross_entropy",
    "train",
    "translate",
]
