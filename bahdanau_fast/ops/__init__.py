"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses.

``operator`` says what an operator is; ``attention`` has those of a call, ``location`` the one that
looks where earlier steps looked, ``decode_operators`` those of whole decoders, ``few_rows`` a
projection by itself.
"""

from bahdanau_fast.ops import attention, decode, few_rows, location

__all__ = ["attention", "decode", "few_rows", "location"]
