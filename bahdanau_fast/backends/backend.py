"""What a backend says of itself, and what it is asked about a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bahdanau_fast.checks import TorchState


class Sizes(NamedTuple):
    """The sizes of a call; 0 while code is traced, where none may decide."""

    batch: int
    queries_len: int
    keys_len: int
    query_size: int  # H where the queries are projected
    key_size: int  # H where the keys are projected
    value_size: int
    hidden: int


class Facts(NamedTuple):
    """What decides about a call."""

    device: str  # "cpu", "cuda", ...
    dtype: torch.dtype  # of the queries
    sizes: Sizes
    state: TorchState
    sharded: bool  # DTensors, where the scores are the result or depend on a location
    general: bool  # scores are the result, or have features or not tanh inside
    requested: str | None  # a backend by name
    available: tuple[Backend, ...]  # that serve such a device in this process, fastest first
    # Scores are the result or depend on a location: the operators take projected queries and keys.
    projected_only: bool
    queries_projected: bool
    keys_projected: bool
    called: bool  # w_v is a layer that has to be called
    drops: bool  # weights are dropped


class Backend:
    """An implementation of the operators. The defaults are those of kernels for a GPU.

    Attributes:
        name: by which it can be requested, and by which ``ops.operator`` knows its kernels.
        device: type of the tensors that it serves; None for any.
        serves: what it serves, in words, for :func:`backends.explain`.
        takes_fp64: its kernels serve float64, too.
        fused: it has kernels; else calls take plain PyTorch operations.
        convolves: one operator computes features that depend on a location.
        remembers_keys: a module's calls may share what was computed of keys that have not changed.
        trains_on_fp32_weights: its backward takes the weights in no less than fp32.
    """

    name: str
    device: str | None = "cuda"
    serves: str
    takes_fp64 = False
    fused = True
    convolves = False
    remembers_keys = False
    trains_on_fp32_weights = False

    def __repr__(self) -> str:
        return self.name

    def problem(self) -> str | None:
        """What keeps it from being available in this process, or None."""
        return None

    def refuses(self, dtype: torch.dtype, step: bool) -> str | None:
        """What it would have to do for such a call, or None; ``step``: :func:`route.is_step`."""
        return None if self.takes_fp64 or dtype != torch.float64 else f"serve {dtype} tensors"

    def form(self, facts: Facts) -> tuple[str, str]:
        """The form of a call that :func:`route.route` leaves to it, and why."""
        if facts.general:
            return "projected", "other scores than those of tanh take projected queries and keys"
        return "one operator", "its products are launches like the others"

    def keeps_table(self, elements: int, queries_len: int) -> bool:
        """Whether so many elements of projected keys get a table of exponentials."""
        return False
