"""The modules: names, arguments and state_dict keys of the d2l course code."""

from bahdanau_fast.modules.additive import AdditiveAttention
from bahdanau_fast.modules.mlp import MLPAttention

__all__ = ["AdditiveAttention", "MLPAttention"]
