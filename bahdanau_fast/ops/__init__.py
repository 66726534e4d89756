"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses.

``projected`` has the operators on projected queries and keys, ``whole`` those from raw ones,
``decode`` those of whole decoders.
"""

from bahdanau_fast.ops.projected import (
    NEED_KEYS,
    NEED_QUERIES,
    NEED_VALUES,
    NEED_W_V,
    TAGS,
    attend_op,
    attend_recorded,
    exp_keys_now,
    exp_keys_op,
    fingerprint,
    implement,
    implementations,
    library,
    weights_dtype,
)

__all__ = [
    "NEED_KEYS",
    "NEED_QUERIES",
    "NEED_VALUES",
    "NEED_W_V",
    "TAGS",
    "attend_op",
    "attend_recorded",
    "exp_keys_now",
    "exp_keys_op",
    "fingerprint",
    "implement",
    "implementations",
    "library",
    "weights_dtype",
]
