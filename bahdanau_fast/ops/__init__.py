"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses.

``operator`` says what an operator is; ``attend`` has those on projected queries and keys,
``location`` the one that looks where earlier steps looked, ``whole`` those from raw inputs,
``decode`` those of whole decoders, ``few_rows`` a projection by itself.
"""

from bahdanau_fast.ops import attend, decode, few_rows, location, whole

__all__ = ["attend", "decode", "few_rows", "location", "whole"]
