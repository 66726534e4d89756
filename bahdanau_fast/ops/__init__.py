"""What PyTorch is told of the operators: schemas, shapes and gradients. Nothing here chooses."""

from bahdanau_fast.ops import attention, decode, few_rows, location

__all__ = ["attention", "decode", "few_rows", "location"]
