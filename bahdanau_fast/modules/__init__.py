"""The modules: names, arguments and state_dict keys of the d2l course code."""

from bahdanau_fast.modules.additive import AdditiveAttention, MLPAttention

__all__ = ["AdditiveAttention", "MLPAttention"]
