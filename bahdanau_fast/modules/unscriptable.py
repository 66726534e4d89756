"""What ``torch.jit.script`` is told of modules that it cannot compile."""

from __future__ import annotations

from torch import nn

__all__ = ["Unscriptable"]


class Unscriptable(nn.Module):
    """Base of modules that say what to do where they, or what holds them, are to be scripted."""

    _instead = "use torch.export or torch.jit.trace"

    def __prepare_scriptable__(self) -> None:
        kind = type(self).__name__
        raise RuntimeError(f"torch.jit.script cannot compile {kind}: {self._instead}")
