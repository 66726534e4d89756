"""Training: one batch, a whole run, several processes, and the comparison with eager attention."""

from bahdanau_fast.seq2seq.training.trainer import Trainer, masked_cross_entropy, train

__all__ = ["Trainer", "masked_cross_entropy", "train"]
