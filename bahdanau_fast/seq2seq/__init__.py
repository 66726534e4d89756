"""A sequence-to-sequence system around additive attention, with the course's names."""

from bahdanau_fast.seq2seq.cli.plots import show_heatmaps
from bahdanau_fast.seq2seq.data.pairs import Batch, Pairs, Vocab, Vocabs, batches, encode
from bahdanau_fast.seq2seq.model.decoders import (
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    StepDecoder,
)
from bahdanau_fast.seq2seq.model.encoder_decoder import (
    AttentionDecoder,
    Decoder,
    Encoder,
    EncoderDecoder,
    Seq2SeqEncoder,
    init_xavier,
)
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.page import attention_page
from bahdanau_fast.seq2seq.search.beam import Beam, Hypotheses, beam_search
from bahdanau_fast.seq2seq.search.scoring import bleu, corpus_scores
from bahdanau_fast.seq2seq.search.translator import Translation, Translator, greedy, translate
from bahdanau_fast.seq2seq.training.trainer import Trainer, masked_cross_entropy, train

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
    "attention_page",
    "batches",
    "beam_search",
    "bleu",
    "build_model",
    "corpus_scores",
    "encode",
    "greedy",
    "init_xavier",
    "masked_cross_entropy",
    "show_heatmaps",
    "train",
    "translate",
]
