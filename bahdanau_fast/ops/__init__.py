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
    attend,
    exp_keys,
    fingerprint,
    implement,
    library,
    table_for,
    weights_dtype,
)

__all__ = [
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
