"""Several processes that train one model: what ``torchrun`` starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bahdanau_fast.seq2seq.data.pairs import Batch

__all__ = ["ALONE", "World", "join", "shard", "total"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """Rank and number of the processes that train together, and the device of this one.

    Rank 0 prints and writes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU


ALONE = World()
"""One process, on the CPU."""


@contextmanager
def join(device: str) -> Iterator[World]:
    """Join the processes of ``torchrun``, if any: gloo on the CPU, NCCL on GPUs.

    Under torchrun, "cuda" is the GPU of the process's local rank.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=torch.device(device))
        return
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield World(dist.get_rank(), size, torch.device(device))
    finally:
        dist.destroy_process_group()


def shard(batch: Batch, world: World) -> Batch:
    """The rows of one process, every ``size``-th, as wide as the whole batch.

    If there are fewer rows than processes, the remaining processes get a row with target length 0,
    which adds nothing to a loss.
    """
    if world.size == 1:
        return batch
    if world.rank < len(batch.source):
        return Batch(*(tensor[world.rank :: world.size] for tensor in batch))
    source, source_lens, target, target_lens = (tensor[:1] for tensor in batch)
    return Batch(source, source_lens, target, torch.zeros_like(target_lens))


def total(values: Tensor, world: World) -> Tensor:
    """The sum over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values
