"""A machine that runs PTX without a GPU, for tests: README.md says what it judges, and how."""

from .built import built, needs_compiler
from .launch import Buffer, Machine, Order
from .parse import Module, PtxError
from .planted import changed

__all__ = [
    "Buffer",
    "Machine",
    "Module",
    "Order",
    "PtxError",
    "built",
    "changed",
    "needs_compiler",
]
