"""Attention modules of others, computed by this package: ``fuse(model)`` and ``unfuse(model)``."""

from __future__ import annotations

import torch
from torch import nn

from bahdanau_fast import checks
from bahdanau_fast.fuse.checking import difference
from bahdanau_fast.fuse.families import FAMILIES, Family
from bahdanau_fast.fuse.replacing import family_of, put_back, replace
from bahdanau_fast.fuse.report import Entry, Report
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.dot_product import DotProductAttention

__all__ = ["Entry", "Report", "fuse", "unfuse"]


def fuse(model: nn.Module) -> Report:
    """Find additive attention modules of others in a model, and compute them here, in place.

    A module is known by its layers and the arguments of its ``forward``, wherever its class comes
    from. Before its ``forward`` is replaced, the new one runs a few steps beside the module's own,
    on a copy and small random inputs, in fp64: unless outputs, kept tensors and all gradients are
    the same, the module is left alone. Parameters, buffers, ``state_dict``, hooks and attributes
    stay what and where they are; the fused modules can be copied, pickled, moved, trained and
    loaded as before.

    A row with nothing to look at gets uniform weights, where the code of others mostly gives NaN.

    Args:
        model: searched with all its submodules; it may be an attention module itself.

    Returns:
        Which modules were fused and how, which were left alone and why; it prints as a table.

    Raises:
        TypeError: ``model`` is not a module.

    >>> class Bahdanau(nn.Module):  # as in the PyTorch tutorial
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.Wa, self.Ua, self.Va = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    ...
    ...     def forward(self, query, keys):
    ...         scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
    ...         weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
    ...         return torch.bmm(weights, keys), weights
    >>> import torch
    >>> attention = Bahdanau()
    >>> [entry.family for entry in fuse(attention).fused]
    ['PyTorch tutorial']
    """
    _check(model)
    entries = []
    for name, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            entries.append(Entry(name, type(module).__name__, family.title, "fused before"))
        elif not isinstance(module, _OWN_OR_COMPILED):
            found = _find(module)
            if isinstance(found, Family):
                replace(module, found)
                entries.append(Entry(name, type(module).__name__, found.title, found.how))
            elif found is not None:
                entries.append(Entry(name, type(module).__name__, None, found))
    return Report(tuple(entries))


def unfuse(model: nn.Module) -> list[str]:
    """Undo :func:`fuse`: every fused module computes its own ``forward`` again.

    Args:
        model: searched with all its submodules.

    Returns:
        Names of the modules.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check(model)
    fused = [(name, each) for name, each in model.named_modules() if family_of(each) is not None]
    for _, module in fused:
        put_back(module)
    return [name for name, _ in fused]


# What has no forward to replace: this package's modules, and code that torch.jit has compiled.
_OWN_OR_COMPILED = (Additive, DotProductAttention, torch.jit.ScriptModule)


def _find(module: nn.Module) -> Family | str | None:
    """The family of a module, or why it has none; None if it does not look like one."""
    reasons = []
    for family in FAMILIES:
        readings = family.readings(module)
        if isinstance(readings, str):
            reasons.append(f"like {family.title}, but {readings}")
            continue
        for reading in readings:
            if "forward" in vars(module):
                return "its forward was replaced on the instance"
            why = difference(module, reading)
            if why is None:
                return reading
            reasons.append(f"like {family.title}, but {why}")
    if reasons:
        return reasons[0]
    kind = type(module)
    if kind.__name__.lower().endswith("attention") and not kind.__module__.startswith("torch."):
        return "no additive attention that is known has its layers"
    return None


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        checks.reject(TypeError, "model", "be a torch.nn.Module", type(model).__name__)
