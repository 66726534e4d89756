"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses.

``projected`` has the operators on projected queries and keys, ``whole`` those from raw ones,
``decode`` those of whole decoders.
"""

from bahdanau_fast.ops.projected import (
    MAX_FP64_ELEMENTS,
    NEED_KEYS,
    NEED_QUERIES,
    NEED_VALUES,
    NEED_W_V,
    TAGS,
    attend,
    exp_keys,
    fingerprint,
    implement,
    library,
    table_for,
    weights_dtype,
)

__all__ = [
    "MAX_FP64_ELEMENTS",
    "NEED_KEYS",
    "NEED_QUERIES",
    "NEED_VALUES",
    "NEED_W_V",
    "TAGS",
    "attend",
    "exp_keys",
    "fingerprint",
    "implement",
    "library",
    "table_for",
    "weights_dtype",
]
