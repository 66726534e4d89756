"""A sequence-to-sequence system around additive attention, with the course's names."""

from bahdanau_fast.seq2seq.beam import Beam, Hypotheses
from bahdanau_fast.seq2seq.data import Batch, Pairs, Vocab, Vocabs, batches, encode
from bahdanau_fast.seq2seq.decoders import Seq2SeqAttentionDecoder, Seq2SeqDecoder, StepDecoder
from bahdanau_fast.seq2seq.models import (
    AttentionDecoder,
    Decoder,
    Encoder,
    EncoderDecoder,
    Seq2SeqEncoder,
    init_xavier,
)
from bahdanau_fast.seq2seq.scoring import bleu, corpus_scores
from bahdanau_fast.seq2seq.settings import Settings, build_model
from bahdanau_fast.seq2seq.training import Trainer, masked_cross_entropy, train
from bahdanau_fast.seq2seq.translating import Translation, beam_search, greedy, translate
from bahdanau_fast.seq2seq.translator import Translator

__all__ = [
    "AttentionDecoder",
    "Batch",
    "Beam",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Hypotheses",
    "Pairs",
    "Seq2SeqAttentionDecoder",
    "Seq2SeqDecoder",
    "Seq2SeqEncoder",
    "Settings",
    "StepDecoder",
    "Trainer",
    "Translation",
    "Translator",
    "Vocab",
    "Vocabs",
    "batches",
    "beam_search",
    "bleu",
    "build_model",
    "corpus_scores",
    "encode",
    "greedy",
    "init_xavier",
    "masked_cross_entropy",
    "train",
    "translate",
]
