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
    """A change between two calls, or in front of the first.

    Attributes:
        what: what changes: keys, values and so on.
        how: unique among those.
        change: done to each side, under no_grad unless ``graph``.
        prepare: done to each side before its first call.
        graph: whether the change is one of the autograd graph: it runs in the mode of the calls.
        moves: whether results change.
        pending: whether results of before the change may have their backward after it. What they
            saved of a tensor whose data was replaced is the old data or the new, as it happens.
        without: modes that cannot have it, where the plain module cannot either.
        kinds: the modules it is for, by their names in kinds.KINDS.
        layers: names of the layers it is for, of those that a module has; the change is of the
            side's ``layer``.
        whens: when it is made.
        times: how often in training between two calls, backward passes among them; if more than
            once, so after the first call too where the first time is before it.
    """

    what: str
    how: str
    change: Callable[[Side], object]
    prepare: Callable[[Side], object] | None = None
    graph: bool = False
    moves: bool = True
    pending: bool = True
    without: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    kinds: tuple[str, ...] = ("additive",)
    layers: tuple[str, ...] = ()
    whens: tuple[str, ...] = (AFTER,)
    times: int = 1
