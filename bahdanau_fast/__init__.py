"""Fast additive (Bahdanau) attention, drop-in for the d2l course's.

>>> import torch, bahdanau_fast as bf
>>> attention = bf.AdditiveAttention(16, dropout=0.1).eval()
>>> context = attention(torch.zeros(2, 1, 4), torch.ones(2, 10, 4), torch.ones(2, 10, 3))
>>> tuple(context.shape), tuple(attention.attention_weights.shape)
((2, 1, 3), (2, 1, 10))
"""

from bahdanau_fast import backends, decompositions, reference
from bahdanau_fast.dot_product import DotProductAttention
from bahdanau_fast.functional import additive_attention, masked_softmax
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules import AdditiveAttention, MLPAttention
from bahdanau_fast.recurrent import AttentionGRU, AttentionLSTM

__version__ = "0.1.0"

__all__ = [
    "AdditiveAttention",
    "AttentionGRU",
    "AttentionLSTM",
    "DotProductAttention",
    "MLPAttention",
    "Memory",
    "__version__",
    "additive_attention",
    "backends",
    "decompositions",
    "masked_softmax",
    "reference",
]


def __dir__() -> list[str]:
    """The public names; modules of the package are imported by theirs."""
    return sorted(__all__)
