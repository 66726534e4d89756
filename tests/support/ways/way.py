"""A way to change what a call depends on, and the modes it is run in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ways.sides import Side

MODES = ("eager", "trained", "encoder", "compiled", "inference", "born in inference")
# When the change is made; a module is fused in front of the first call.
AFTER, BEFORE, UNFUSED = "after a call", "before the first call", "before it is fused"


@dataclass(frozen=True)
class Way:
    """A change between two calls, or in front of the first."""

    what: str  # changes: keys, values and so on
    how: str  # unique among those
    change: Callable[[Side], object]  # done to each side, under no_grad unless ``graph``
    prepare: Callable[[Side], object] | None = None  # done to each before its first call
    graph: bool = False  # the change is one of the autograd graph: in the mode of the calls
    moves: bool = True  # results change
    # Results of before may have their backward after it. What they saved of a tensor whose data
    # was replaced is the old data or the new, as it happens.
    pending: bool = True
    without: tuple[str, ...] = ()  # modes that cannot have it, as the plain module cannot
    dtype: torch.dtype = torch.float64
    kinds: tuple[str, ...] = ("additive",)  # of modules it is for, of kinds.KINDS
    layers: tuple[str, ...] = ()  # it is for, of those that a module has: of the side's ``layer``
    whens: tuple[str, ...] = (AFTER,)  # it is made
    # How often in training between two calls, backward passes among them; if more than once, so
    # after the first call too where the first time is before it.
    times: int = 1
