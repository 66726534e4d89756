"""Additive attention in the models of others, computed by this package: ``fuse`` and ``unfuse``.

It is found by what is computed: while a module runs, sums that broadcast are promised rather than
computed (:mod:`.promise`), and what becomes of a promise is ruled function by function (``rules``,
``sums``, ``scores``). A promise that ends as a score, weights or a context is one operator; any
other is computed as it was written.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bahdanau_fast import checks
from bahdanau_fast.fuse import scores, sums  # noqa: F401  they add their rules
from bahdanau_fast.fuse.replacing import put_back, record_of, replace
from bahdanau_fast.fuse.report import Entry, Record, Report
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.dot_product import DotProductAttention

__all__ = ["Entry", "Report", "fuse", "unfuse"]


def fuse(model: nn.Module, example: Any = None) -> Report:
    """Find additive attention in a model of others, and compute it here, in place.

    A module is watched if its code has an activation and something to sum against. Its first calls
    run on copies, watched and not: where outputs, what the module keeps or gradients differ, or
    where there is no additive attention, it gets its own ``forward`` back. Later calls are fused,
    unless they are so small that the original is faster. Parameters, buffers, ``state_dict``, hooks
    and attributes stay what and where they are; the modules can be copied, pickled, moved, trained
    and loaded as before. ``torch.compile``, export and tracing see the module's own formula.

    A row with nothing to look at gets uniform weights, where the code of others mostly gives NaN.

    Args:
        model: searched with all its submodules; it may be an attention module itself.
        example: arguments of ``model``, a tuple or one tensor: it is called once, so that the
            report is complete at once.

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
    >>> report = fuse(Bahdanau(), (torch.ones(2, 1, 8), torch.ones(2, 5, 8)))
    >>> [entry.formula for entry in report.fused]
    ['softmax(Va . tanh(q + Ua k) + Va.bias)']
    """
    _check(model)
    records = []
    for name, module in model.named_modules():
        record = record_of(module)
        kind = type(module).__name__
        if record is not None:
            records.append(record)
        elif isinstance(module, (Additive, DotProductAttention)):
            records.append(Record(name, kind, "own", "already this package's"))
        elif (record := _record(name, module)) is not None:
            if record.state == "waiting":
                replace(module, record)
            records.append(record)
    if example is not None:
        model(*(example if isinstance(example, tuple) else (example,)))
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


_ACTIVATIONS = {"tanh", "tanh_", "relu", "relu_", "leaky_relu", "Tanh", "ReLU", "LeakyReLU"}
_SOFTMAXES = {"softmax", "Softmax", "log_softmax", "LogSoftmax"}
# Scores that a layer makes of one pair, at most; and with a softmax.
FEW, SEVERAL = 1, 16


def _record(name: str, module: nn.Module) -> Record | None:
    """Of a module whose own code may compute scores; None where it cannot.

    It has an activation and a softmax or a layer with one output.
    """
    kind: Any = type(module)
    if isinstance(module, torch.jit.ScriptModule) or _is_torchs(kind):
        return None
    words = {*_words(kind), *(type(layer).__name__ for layer in _layers(module))}
    kept = vars(module).values()  # functions of torch, or their names
    words |= {x if isinstance(x, str) else str(getattr(x, "__name__", "")) for x in kept}
    soft = bool(_SOFTMAXES & words)
    if not _ACTIVATIONS & words or not _has_vector(module, SEVERAL if soft else FEW):
        return None
    record = Record(name, kind.__name__)
    record.expected = 2 if soft else 0
    if "forward" in vars(module):
        record.leave("its forward was replaced on the instance")
    return record


def _is_torchs(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] == "torch"


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers of torch that a module calls, alone or in containers of torch."""
    for layer in module.children():
        if _is_torchs(type(layer)):
            yield layer
            yield from _layers(layer)


def _has_vector(module: nn.Module, most: int) -> bool:
    """Whether a module has something that a sum can be summed against."""
    for layer in module.modules():
        outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if isinstance(outputs, int):
            if outputs <= most:
                return True
        elif not _is_torchs(type(layer)) and layer._parameters:
            return True
    return False


@functools.cache
def _words(kind: Any) -> frozenset[str]:
    """Names in the code of a class, and of the functions beside it that it calls."""
    own = [base for base in kind.__mro__ if not _is_torchs(base) and base is not object]
    todo = [each for base in own for each in vars(base).values()]
    seen: set[Any] = set()
    words: set[str] = set()
    while todo and len(seen) < 500:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
        names = {name for each in (code, *inner) for name in each.co_names}
        words |= names
        around = getattr(function, "__globals__", {})
        beside = (around.get(name) for name in names)
        todo += [f for f in beside if inspect.isfunction(f) and not _is_torchs(f)]
    return frozenset(words)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        checks.reject(TypeError, "model", "be a torch.nn.Module", type(model).__name__)
