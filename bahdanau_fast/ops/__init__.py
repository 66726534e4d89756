"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses.

``projected`` has the operators on projected queries and keys, ``whole`` those from raw ones,
``decode`` those of whole decoders, ``few_rows`` a projection by itself.
"""

from bahdanau_fast.ops.projected import *  # noqa: F403
from bahdanau_fast.ops.projected import __all__ as __all__
