"""From text to batches: corpora, tokens, vocabularies, padding."""

from bahdanau_fast.seq2seq.data.pairs import (
    BOS,
    EOS,
    PAD,
    UNK,
    Batch,
    Pairs,
    Vocab,
    Vocabs,
    batches,
    encode,
)

__all__ = ["BOS", "EOS", "PAD", "UNK", "Batch", "Pairs", "Vocab", "Vocabs", "batches", "encode"]
