"""The tensors of one shape: drawn once, given to every provider and to the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import Shape

__all__ = ["Inputs", "draw", "nbytes"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of all tasks; ``values`` is ``keys`` where the sizes allow it, as in d2l."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    valid_lens: Tensor | None
    projected_queries: Tensor
    projected_keys: Tensor
    grad_context: Tensor

    def leaves(self, task: str) -> tuple[Tensor, ...]:
        """The tensors whose gradients a training step of this task computes."""
        if task in ("projected", "scan"):
            return (self.projected_queries, self.projected_keys, self.values, self.w_v)
        sources = (self.keys,) if self.values is self.keys else (self.keys, self.values)
        return (self.queries, *sources, self.w_q, self.w_k, self.w_v)

    def require_grad(self, required: bool) -> None:
        """Turn gradients of all floating inputs on or off."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None and tensor.is_floating_point() and field.name != "grad_context":
                tensor.requires_grad_(required)


def draw(shape: Shape, seed: int = 0) -> Inputs:
    """Normal inputs and weights of the size that nn.Linear starts from, fp32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def linear(rows: int, columns: int) -> Tensor:
        return (torch.rand(rows, columns, generator=generator) * 2 - 1) / math.sqrt(columns)

    queries = normal(shape.batch, shape.queries, shape.query_size)
    keys = normal(shape.batch, shape.keys, shape.key_size)
    shared = shape.key_size == shape.value_size
    values = keys if shared else normal(shape.batch, shape.keys, shape.value_size)
    w_q = linear(shape.hidden, shape.query_size)
    w_k = linear(shape.hidden, shape.key_size)
    lens = None
    if shape.lens == "full":
        lens = torch.full((shape.batch,), shape.keys)
    elif shape.lens == "drawn":
        lens = torch.randint(1, shape.keys + 1, (shape.batch,), generator=generator)
    return Inputs(
        queries,
        keys,
        values,
        w_q,
        w_k,
        linear(1, shape.hidden),
        lens,
        F.linear(queries, w_q),
        F.linear(keys, w_k),
        normal(shape.batch, shape.queries, shape.value_size),
    )


def nbytes(*tensors: Tensor) -> int:
    """Bytes of tensors that do not share storage."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
