"""A module's forward as torch's compiler captured it, run eagerly with the operator in it."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import warnings
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, Unsupported, UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from bahdanau_fast.fuse.choice import GraphError
from bahdanau_fast.fuse.compiling import rewrite
from bahdanau_fast.fuse.facts import ModuleFacts
from bahdanau_fast.fuse.look import looked_at
from bahdanau_fast.fuse.report import Record

# Ways of hooks, layers and methods that are remembered, and kinds of calls that are refused.
_WAYS, _REFUSED = 8, 16
# Graphs without additive attention, after which a module is left.
_EMPTY = 3
# Layers that torch leaves out of graphs by default, numbers that a module counts, and what would
# not be as in plain code. A module may have so many graphs.
_OPTIONS = {
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,
    "use_numpy_random_stream": True,
    "optimize_ddp": False,
}
_GRAPHS, _ALWAYS = 12, 32
_TOO_MANY = "its calls are of more kinds than are captured"
# Of what torch captures in parts alone.
_IN_PARTS = Unsupported, UserError, GuardOnDataDependentSymNode
# Who compiles the same code has graphs of his own, in versions of torch that can have both.
_apart = inspect.signature(torch.compile).parameters.keys() & {"isolate_recompiles"}
# That a forward has enough graphs is said in the report.
logging.getLogger("torch._dynamo.convert_frame").addFilter(
    lambda message: __file__ not in message.getMessage()
)


_numbers = itertools.count()


class _Way:
    """A forward that is compiled while some facts hold."""

    def __init__(self, module: Any, record: Record, forward: Any) -> None:
        self.facts, self._record, self._forward = ModuleFacts(module), record, forward
        self.fresh = True  # the next call may compile
        self.graphs = 0
        self.compile(whole=True)

    @property
    def limit(self) -> int:
        """So many graphs it may have."""
        limit = _ALWAYS if self._record.shared.always else _GRAPHS
        return limit if self.whole else 2 * limit

    def compile(self, whole: bool) -> None:
        """As one graph, or in parts, where the whole cannot be captured."""
        self.whole, forward = whole, self._forward

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        # What was compiled is counted by code, and sizes that change by its name.
        rest = run.__globals__, run.__name__, run.__defaults__, run.__closure__
        fresh = FunctionType(run.__code__.replace(co_name=f"run_{next(_numbers)}"), *rest)
        # The compiler keeps its backends for ever.
        by = functools.partial(rewrite, record=weakref.ref(self._record), whole=whole)
        apart: Any = {"isolate_recompiles": True, "recompile_limit": self.limit} if _apart else {}
        self._compiled: Any = torch.compile(fresh, backend=by, fullgraph=whole, **apart)

    def call(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Call a module by what was compiled, or is."""
        if not self.fresh:
            return self._compiled(module, *args, **kwargs)
        options = {**_OPTIONS, "recompile_limit": self.limit}
        with config.patch(options):  # which takes some microseconds
            return self._compiled(module, *args, **kwargs)


class Capture:
    """How a module is called that has additive attention."""

    def __init__(self, record: Record) -> None:
        self.record, self._ways = record, list[_Way]()
        self._refused: set[Any] = set()
        self._calls = 0

    def __call__(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        observed, result = looked_at(self.record, module, forward, args, kwargs)
        if observed:
            return result
        way, record = self._way(module, forward), self.record
        if way is None or (self._refused and _kind(module, args, kwargs) in self._refused):
            return forward(module, *args, **kwargs)
        compiled = record.compiled
        try:
            result = way.call(module, args, kwargs)
        except GraphError as error:
            if not way.whole:
                raise error.__cause__ or error from None
            return forward(module, *args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit, *_IN_PARTS) as error:
            if not way.whole:
                raise
            # While the whole was captured: nothing has run.
            if way.fresh and not (isinstance(error, _IN_PARTS) and _may_warn()):
                return self._refuse(error, module, forward, args, kwargs)
            if way.fresh:
                way.compile(whole=False)
            way.fresh = True
            return self(module, forward, args, kwargs)
        way.fresh = record.compiled > compiled
        way.graphs += record.compiled - compiled
        self._calls += 1
        graphs = record.compiled or self._calls
        if not record.choices and graphs >= _EMPTY:
            record.leave("", "no additive attention in what torch's compiler captured", True)
        elif not way.whole and way.graphs >= way.limit:
            record.leave("", _TOO_MANY, True)
        elif not way.fresh and record.choices and not any(c.pays for c in record.choices):
            record.rest(args)
        return result

    def _way(self, module: Any, forward: Any) -> _Way | None:
        """What was compiled for a module as it is; None where hooks look at its gradients."""
        i = next((i for i, way in enumerate(self._ways) if way.facts.hold()), None)
        if i is None and len(self._ways) >= _WAYS:
            self.record.leave("", "its hooks, layers or methods change again and again", True)
            return None
        if i != 0:
            way = _Way(module, self.record, forward) if i is None else self._ways.pop(i)
            self._ways.insert(0, way)
        return None if self._ways[0].facts.watched else self._ways[0]

    def _refuse(self, error: Exception, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run as written what torch does not capture."""
        self._refused.add(_kind(module, args, kwargs))
        line = str(error).strip().partition("\n")[0]
        why = f"torch's compiler leaves some of its calls: {type(error).__name__}: {line}"
        why = _TOO_MANY if isinstance(error, FailOnRecompileLimitHit) else why
        self.record.leave("", why, len(self._refused) > _REFUSED)
        return forward(module, *args, **kwargs)


def _may_warn() -> bool:
    """Whether torch's compiler may warn of what it leaves out of graphs, and goes on."""
    return not any(
        action == "error" and issubclass(UserWarning, category)
        for action, _, category, *_ in warnings.filters
    )


def _kind(module: Any, args: Any, kwargs: Any) -> Any:
    """A kind of call."""
    mode = module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return mode, *map(_kind_of, (*args, *kwargs.values()))


def _kind_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        return None if x.is_nested else x.shape, x.dtype, x.device, x.requires_grad
    if isinstance(x, (tuple, list)):
        return len(x), *map(_kind_of, x[:8])
    return x if x is None or isinstance(x, (bool, str)) else type(x)
