"""Additive attention in the models of others, computed by this package: ``fuse`` and ``unfuse``.

It is found by what is computed. First calls run as they are and are noted (:mod:`.graph`); the
pattern is found in the notes (:mod:`.find`), made one operator (:mod:`.plan`), proved and timed
(:mod:`.prove`). Later calls are compared with the notes (:mod:`.tape`): those of the piece are put
off (:mod:`.late`) until the operator runs, and anything else runs as the user wrote it.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn

from bahdanau_fast import checks
from bahdanau_fast.fuse.report import Entry, Record, Report
from bahdanau_fast.fuse.watched import put_back, record_of, watch
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.dot_product import DotProductAttention

__all__ = ["Entry", "Report", "fuse", "unfuse"]


def fuse(model: nn.Module, example: Any = None, *, always: bool = False) -> Report:
    """Find additive attention in a model of others, and compute it here, in place.

    Every module is watched in its first calls, which run as they are, once. What they show is
    proved afterwards, outputs and gradients, and timed: it is fused from then on where that takes
    at most 0.8 of its own code's time. Modules without additive attention cost nothing after that.
    Parameters, buffers, ``state_dict``, hooks and attributes stay what and where they are; the
    modules can be copied, pickled, moved, trained and loaded as before. ``torch.compile``, export
    and tracing see the module's own formula.

    Args:
        model: searched with all its submodules; it may be an attention module itself.
        example: arguments of ``model``, a tuple or one tensor: it is called once, so that the
            report is complete at once.
        always: fuse also where that is slower, for the memory that it saves.

    Returns:
        Where additive attention is computed, by what formula, and what computes it now, or why it
        was left alone. It prints as a table, and is complete once the model was called.

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
    >>> example = torch.ones(2, 1, 8), torch.ones(2, 5, 8)
    >>> report = fuse(Bahdanau(), example, always=True)
    >>> [entry.formula for entry in report.fused]
    ['softmax(Va . tanh(Wa q + Wa.bias + Ua k + Ua.bias) + Va.bias) v']
    """
    _check(model)
    records = []
    compiled = {each for each in model.modules() if _compiles(each)}
    for name, module in model.named_modules():
        record = record_of(module)
        if record is None:
            record = Record(name, type(module).__name__, always)
            if isinstance(module, (Additive, DotProductAttention)):
                record.state = "own"
            elif isinstance(module, torch.jit.ScriptModule) or _is_torchs(type(module)):
                continue
            elif any(isinstance(each, _FAST) for each in module.modules()):
                record.leave("", "holds layers of torch that have a fast path of their own")
            elif not compiled.isdisjoint(module.modules()):
                record.leave("", "runs compiled code: compile with backend='bahdanau_fast'")
            elif "forward" in vars(module):
                record.leave("", "its forward was replaced on the instance")
            else:
                record.names = {id(p): key for key, p in module.named_parameters()}
                record.methods = _others(type(module))
                watch(module, record)
        record.always = record.always or always
        record.at_once = record.at_once or example is not None
        records.append(record)
    if example is not None:
        model(*(example if isinstance(example, tuple) else (example,)))
        for record in records:
            record.at_once = record.always
    return Report(records)


def unfuse(model: nn.Module) -> list[str]:
    """Undo :func:`fuse`: every module computes its own ``forward`` again.

    Args:
        model: searched with all its submodules.

    Returns:
        Names of the modules.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check(model)
    found = [(name, each) for name, each in model.named_modules() if record_of(each) is not None]
    for _, module in found:
        put_back(module)
    return [name for name, _ in found]


# They compute otherwise where a mode of torch's functions is on.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _is_torchs(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "torch"


def _others(kind: Any) -> list[str]:
    """Methods beside ``forward`` that none of the class calls: who calls them is not watched."""
    users = [vars(each) for each in kind.__mro__ if each is not object and not _is_torchs(each)]
    own = {n: f for each in users for n, f in each.items() if inspect.isfunction(f)}
    called = {"forward"}.union(*(function.__code__.co_names for function in own.values()))
    return [name for name in own if name not in called and not name.startswith("_")]


def _compiles(module: nn.Module) -> bool:
    """Whether what it calls by name is compiled: a compiler would look into our mode."""
    own = None if _is_torchs(type(module)) else type(module).forward
    todo: list[Any] = [module._compiled_call_impl, vars(module).get("forward", own)]
    seen: set[Any] = set()
    for each in todo:
        if inspect.isfunction(each) and each not in seen and not _is_torchs(each):
            seen.add(each)
            with contextlib.suppress(ValueError):  # a cell that is empty yet
                named = inspect.getclosurevars(inspect.unwrap(each))
                todo += [*named.nonlocals.values(), *named.globals.values()]
                todo += [inspect.getattr_static(module, name, None) for name in named.unbound]
    return any(hasattr(each, "_torchdynamo_orig_callable") for each in seen)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        checks.reject(TypeError, "model", "be a torch.nn.Module", type(model).__name__)
