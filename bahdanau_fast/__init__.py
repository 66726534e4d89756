"""Fast additive (Bahdanau) attention, drop-in for the d2l course's.

>>> import torch, bahdanau_fast as bf
>>> attention = bf.AdditiveAttention(16, dropout=0.1).eval()
>>> context = attention(torch.zeros(2, 1, 4), torch.ones(2, 10, 4), torch.ones(2, 10, 3))
>>> tuple(context.shape), tuple(attention.attention_weights.shape)
((2, 1, 3), (2, 1, 10))
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import bahdanau_fast.checkout  # noqa: F401  before all others
from bahdanau_fast import backends, losses, reference
from bahdanau_fast.functional import additive_attention, additive_scores, masked_softmax
from bahdanau_fast.fuse import fuse, fuse_graph, unfuse
from bahdanau_fast.memory import Memory
from bahdanau_fast.modules import AdditiveAttention, MLPAttention
from bahdanau_fast.modules.attention_rnn import AttentionGRU, AttentionLSTM
from bahdanau_fast.modules.dot_product import DotProductAttention
from bahdanau_fast.modules.location import LocationAttention
from bahdanau_fast.modules.pooling import AttentionPooling
from bahdanau_fast.ops import decompositions

__version__ = "0.2.0"

__all__ = [
    "AdditiveAttention",
    "AttentionGRU",
    "AttentionLSTM",
    "AttentionPooling",
    "DotProductAttention",
    "LocationAttention",
    "MLPAttention",
    "Memory",
    "__version__",
    "additive_attention",
    "additive_scores",
    "backends",
    "decompositions",
    "fuse",
    "fuse_graph",
    "losses",
    "masked_softmax",
    "reference",
    "seq2seq",
    "unfuse",
]

if TYPE_CHECKING:
    from bahdanau_fast import seq2seq
else:

    def __getattr__(name: str) -> ModuleType:
        """The translator: imported when it is asked for."""
        if name == "seq2seq":
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names; modules of the package are imported by theirs."""
    return sorted(__all__)
