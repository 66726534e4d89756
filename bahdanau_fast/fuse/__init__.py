"""Additive attention in the models of others, computed by this package: ``fuse`` and ``unfuse``.

It is found by what is computed. First calls run as they are and are looked at (:mod:`.look`). Where
they show additive attention, torch's compiler captures the module's forward and guards it
(:mod:`.front`, :mod:`.capture`); in what it captured the pattern is found (:mod:`.find`), made one
operator (:mod:`.plan`) and proved (:mod:`.prove`). The graph then runs as it is, with the operator
where that takes less time (:mod:`.choice`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from bahdanau_fast import checks
from bahdanau_fast.fuse.facts import is_of_torch
from bahdanau_fast.fuse.front import put_back, record_of, watch
from bahdanau_fast.fuse.report import Entry, Record, Report
from bahdanau_fast.modules.base import Additive
from bahdanau_fast.modules.dot_product import DotProductAttention
from bahdanau_fast.modules.pooling import AttentionPooling

__all__ = ["Entry", "Report", "fuse", "fuse_graph", "unfuse"]


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
    compiled = set(filter(_compiles, model.modules()))
    for name, module in model.named_modules():
        record = record_of(module) or _recorded(name, module, compiled, always)
        if record is None:
            continue
        record.shared.always |= always
        record.at_once = record.at_once or example is not None
        records.append(record)
    if example is not None:
        args = example if isinstance(example, tuple) else (example,)
        for _ in range(_CALLS):
            model(*args)
            if all(record.state != "looked" for record in records):
                break
        for record in records:
            record.at_once = record.shared.always
    return Report(records)


def _recorded(
    name: str, module: nn.Module, compiled: set[nn.Module], always: bool
) -> Record | None:
    """A new record of a module, which is watched unless there is a reason against it."""
    record = Record(name, type(module).__name__, always)
    if isinstance(module, (Additive, AttentionPooling, DotProductAttention)):
        record.state = "own"
    elif isinstance(module, torch.jit.ScriptModule) or is_of_torch(type(module)):
        return None
    elif not inspect.isfunction(inspect.getattr_static(type(module), "forward")):
        return None  # it is called without the module, as a static method
    elif any(isinstance(layer, _FAST) for layer in module.modules()):
        record.leave("", "holds layers of torch that have a fast path of their own")
    elif not compiled.isdisjoint(module.modules()):
        record.leave("", "runs compiled code: compile with backend='bahdanau_fast'")
    elif "forward" in vars(module):
        record.leave("", "its forward was replaced on the instance")
    else:
        record.names = {id(p): key for key, p in module.named_parameters()}
        record.methods = _others(type(module))
        watch(module, record)
    return record


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
    fused = [named for named in model.named_modules() if record_of(named[1]) is not None]
    for _, module in fused:
        put_back(module)
    return [name for name, _ in fused]


def fuse_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph with additive attention as the fused operator; the same one where it has none.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise; read where the graph does not say what its inputs are.
    """
    from bahdanau_fast.fuse import compiling

    return compiling.fuse_graph(graph, example_inputs)


# Calls with an example: one is looked at, the next compiled, lazy layers take one before.
_CALLS = 3
# They compute otherwise where a mode of torch's functions is on.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _others(kind: Any) -> list[str]:
    """Methods beside ``forward`` that none of the class calls: who calls them is not watched."""
    users = [vars(cls) for cls in kind.__mro__ if cls is not object and not is_of_torch(cls)]
    methods = {n: f for body in users for n, f in body.items() if inspect.isfunction(f)}
    called = {"forward"}.union(*(function.__code__.co_names for function in methods.values()))
    return [name for name in methods if name not in called and not name.startswith("_")]


def _compiles(module: nn.Module) -> bool:
    """Whether what it calls by name is compiled: a compiler would look into our mode."""
    forward = None if is_of_torch(type(module)) else type(module).forward
    todo: list[Any] = [module._compiled_call_impl, vars(module).get("forward", forward)]
    seen: set[Any] = set()
    for function in todo:
        if inspect.isfunction(function) and function not in seen and not is_of_torch(function):
            seen.add(function)
            with contextlib.suppress(ValueError):  # a cell that is empty yet
                named = inspect.getclosurevars(inspect.unwrap(function))
                todo += [*named.nonlocals.values(), *named.globals.values()]
                todo += [inspect.getattr_static(module, name, None) for name in named.unbound]
    return any(hasattr(function, "_torchdynamo_orig_callable") for function in seen)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        checks.reject(TypeError, "model", "be a torch.nn.Module", type(model).__name__)
