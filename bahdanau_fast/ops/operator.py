"""An operator from one description: its schema, the shapes of its results, and its gradient.

:class:`Operator` defines the schema and registers the fake (results without numbers);
:class:`AttentionOperator`, of operators that attend, the autograd formula of compiled code and the
node of eager calls. Arguments have the names of the schema everywhere.

The kernels live elsewhere, one per dispatch key: csrc/cpu registers the CPU key when its extension
loads, csrc/cuda or ``backends.triton`` the CUDA key.
"""

from __future__ import annotations

import collections
import functools
import operator as builtin
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from bahdanau_fast import checks, reference
from bahdanau_fast.ops.context import Node, gradients_of_context
from bahdanau_fast.ops.saved_tensors import after_backward, save_inputs, saved_inputs
from bahdanau_fast.ops.second_derivatives import differentiate_again

library = torch.library.Library("bahdanau_fast", "DEF")

#: Arguments of a call, by their names in the schema.
Named = dict[str, Any]
#: Gradients of the inputs of an operator: from its tensors and the results behind the first, its
#: numbers, whether an input needs a gradient, and the gradients of its results.
Gradients = Callable[[Any, Any, tuple[bool, ...], Any], Sequence[Tensor | None]]
#: All operators, by name.
operators: dict[str, Operator] = {}


def named_tuple(name: str, fields: Sequence[str], defaults: Named | None = None) -> Any:
    """A NamedTuple of these fields; without a value and a default one is None."""
    make: Any = collections.namedtuple  # type checkers want literal fields
    return make(name, fields, defaults=[(defaults or {}).get(field) for field in fields])


class Operator:
    """An operator of this package, from its schema and its fake, which takes keywords.

    Attributes:
        name: in ``torch.ops.bahdanau_fast``.
        names: of its arguments, in order.
        tensors: names of the tensors; numbers come behind them in a differentiable operator.
        defaults: default values, by the name of the argument.
        arguments: a NamedTuple of the arguments, as :func:`named_tuple`.
        overload: what compiled code calls.
        now: the same past ``OpOverload.__call__``, for eager calls.
        in_python: kernels by the name of the backend: of backends written in Python, and those
            that such a backend stands in front of.
    """

    def __init__(self, schema: str, fake: Callable[..., Any]) -> None:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.name = schema.partition("(")[0]
        packet, _, overload = self.name.partition(".")
        self.overload: Any = getattr(
            getattr(torch.ops.bahdanau_fast, packet), overload or "default"
        )
        self.now: Callable[..., Any] = self.overload._op
        self.in_python: dict[str | None, Callable[..., Any]] = {}
        arguments = self.overload._schema.arguments
        self.names = tuple(argument.name for argument in arguments)
        self.tensors = tuple(a.name for a in arguments if "Tensor" in str(a.type))
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.arguments = named_tuple("Arguments", self.names, self.defaults)
        torch.library.register_fake(
            f"bahdanau_fast::{self.name}",
            lambda *args, **kwargs: fake(**self.named(*args, **kwargs)),
            lib=library,
        )
        operators[self.name] = self

    def named(self, *args: Any, **kwargs: Any) -> Named:
        """All arguments of a call by name; PyTorch leaves out default values."""
        named: Named = self.arguments(*args, **kwargs)._asdict()
        return named

    def in_order(
        self, names: Sequence[str], after: str | None = None
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Puts values with these names into the order of the arguments, all or those behind one."""
        first = 0 if after is None else self.names.index(after) + 1
        return builtin.itemgetter(*map(names.index, self.names[first:]))

    def kernel(self, backend: str | None) -> Callable[..., Any]:
        """What an eager call runs, from all arguments; None leaves the choice to the dispatcher."""
        return self.in_python.get(backend, self.now)

    def differentiate(self, count: int, gradients: Gradients) -> None:
        """Register the autograd formula of compiled code, for the first ``count`` arguments."""
        tensors = len(self.tensors)

        def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = tuple(self.named(*inputs).values())
            others = () if isinstance(output, Tensor) else output[1:]
            ctx.save_for_backward(*arguments[:tensors], *others)
            ctx.numbers, ctx.inputs_count = arguments[tensors:], len(inputs)
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = (*ctx.needs_input_grad, *[False] * count)[:count]
            input_grads: Sequence[Tensor | None] = [None] * count
            if [grad for grad in grads if grad is not None]:
                input_grads = gradients(ctx.saved_tensors, ctx.numbers, needed, grads)
            return (*input_grads, *[None] * ctx.inputs_count)[: ctx.inputs_count]

        torch.library.register_autograd(
            f"bahdanau_fast::{self.name}", backward, setup_context=set_up, lib=library
        )


class AttentionOperator(Operator):
    """A differentiable operator that gives context, weights and maybe more.

    Its schema has the differentiable inputs first; then the other tensors: lengths and mask first,
    the seed of the dropout last; then ``dropout_p`` and other numbers.

    Args:
        inputs: names of the differentiable inputs.
        needing: the inputs whose gradients need the value of one of them; of its name and
            :data:`Named`.
        scores: by the reference, from :data:`Named`: the scores, and what the operator gives beside
            context and weights.
        gradients: not differentiable again, in the order of ``inputs``: from ``arguments``, the
            results from the weights on, bits of `needs`, the gradients of the results, the backend,
            and the shared node of the call or None.
        recorded: schema and fake of the operator of recorded calls, unless it is this one: the same
            arguments, with ``counts`` and other results behind the weights that backward takes.
    """

    def __init__(
        self,
        schema: str,
        fake: Callable[..., Any],
        inputs: tuple[str, ...],
        needing: Callable[[str, Named], Sequence[str]],
        scores: Callable[[Named], Sequence[Tensor]],
        gradients: Callable[..., Sequence[Tensor | None]],
        recorded: tuple[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(schema, fake)
        self.inputs, self.needing = inputs, needing
        self._scores, self._gradients = scores, gradients
        # After this one, which a call of the name without an overload finds first.
        self.recorded = Operator(*recorded) if recorded else self
        self.differentiate(len(inputs), self.gradients)

    def gradients(
        self,
        saved: Sequence[Tensor | None],
        numbers: Sequence[Any],
        needed: tuple[bool, ...],
        grads: Sequence[Tensor | None],
        backend: str | None = None,
        shared: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of the inputs that need one, in their order; None for the others.

        ``saved`` are tensors, then results from the weights on, without counts; the gradients of
        results at the end may be left out. What a shared node adds up is None, too.
        """
        if grads[0] is None:  # the values reach the context alone
            needed = self._without_values(needed)
        count = len(self.tensors)
        arguments, results = self.arguments._make((*saved[:count], *numbers)), saved[count:]
        weights = results[0]
        assert weights is not None
        if not (weights.numel() or getattr(arguments, "need_weights", True)):
            need = "be called with need_weights=True where a gradient is due"
            checks.reject(RuntimeError, self.name, need, "False")
        if torch.is_grad_enabled():
            return self._differentiable_again(arguments, weights, needed, grads)
        input_grads = self._gradients(arguments, results, _bits(needed), grads, backend, shared)
        return [grad if need else None for grad, need in zip(input_grads, needed, strict=True)]

    def _without_values(self, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        by_name = zip(self.inputs, needed, strict=True)
        return tuple(need and name != "values" for name, need in by_name)

    def _differentiable_again(
        self,
        arguments: Any,
        weights: Tensor,
        needed: tuple[bool, ...],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        named: Named = arguments._asdict()

        def scores(*tensors: Tensor | None) -> Sequence[Tensor]:
            return self._scores({**named, **dict(zip(self.inputs, tensors, strict=True))})

        grad_context, grad_weights, *others = grads
        grad_values = grad_scores = None
        without_values = self._without_values(needed)
        if grad_context is not None:
            dropout, both = (arguments.seed, arguments.dropout_p), (True, needed != without_values)
            through_context, grad_values = gradients_of_context(
                grad_context, weights, arguments.values, *dropout, both
            )
            assert through_context is not None
            if grad_weights is not None:
                through_context = through_context + grad_weights
            grad_weights = through_context
        if grad_weights is not None:
            visible = reference.visible(arguments.valid_lens, arguments.mask, weights.shape[2])
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            grad_weights = grad_weights.to(weights.dtype)
            grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
            if visible is not None:  # where a query sees nothing the weights are constants
                grad_scores = grad_scores.masked_fill(~visible, 0.0)
        inputs = [named[name] for name in self.inputs]
        input_grads = differentiate_again(scores, inputs, without_values, (grad_scores, *others))
        by_name = dict(zip(self.inputs, input_grads, strict=True))
        return [*(by_name | {"values": grad_values}).values()]


@functools.cache
def _bits(needed: tuple[bool, ...]) -> int:
    return sum(need << index for index, need in enumerate(needed))


class Recorded(Node):
    """The node of an eager call; the context gets a node behind it, by the link."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *inputs: Tensor | None) -> Tensor:
        """The weights; the context is left in the link of the call (:func:`run._called`)."""
        operator, backend, others, numbers, link, shared, backwards = call
        with torch._C._AutoDispatchBelowAutograd():
            kernel = operator.recorded.kernel(backend)
            link.context, weights, *more = kernel(*inputs, *others, *numbers)
        counts = None if operator.recorded is operator else more.pop(0)
        lens, mask, *rest = others
        # Plain code makes a mask of lengths at once: the caller may change them.
        if lens is not None and mask is None and counts is not None:
            lens = counts
        elif lens is not None or mask is not None:
            lens, mask = (None if x is None else x.clone() for x in (lens, mask))
        if shared is not None:
            lens, mask = shared.same(lens, mask)
        save_inputs(ctx, inputs, (lens, mask, *rest, weights, *more))
        ctx.set_materialize_grads(False)
        ctx.call = operator, backend, numbers, link, shared
        ctx.token = None if backwards is None else backwards.begin()
        result: Tensor = weights
        return result

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the call, which is none, and of the inputs."""
        operator, backend, numbers, link, shared = ctx.call
        nodes = None
        if shared is not None:  # its gradients are for the nodes behind it
            of_queries, *others = ctx.next_functions
            nodes = (of_queries, *shared.node().next_functions, *others[3:])
        saved = saved_inputs(ctx, operator, nodes)
        grads = link.take(), grad_weights
        needed = ctx.needs_input_grad[1:]
        input_grads = operator.gradients(saved, numbers, needed, grads, backend, shared)
        after_backward(ctx)
        if ctx.token is not None and ctx.token.after_backward():
            ctx.call = operator, backend, numbers, link, None
        return (None, *input_grads)


#: Numbers that operators take as their argument ``backend``; 0 are the kernels of the dispatch key.
NUMBERS = {"triton": 1}
# Backends written in Python whose dispatch key has other kernels, too.
_beside_others: set[str] = set()


def number_of(backend: str, traced: bool) -> int:
    """The argument ``backend``; traced code may run where the key has other kernels, number 0."""
    return 0 if traced and backend not in _beside_others else NUMBERS.get(backend, 0)


def implement(
    backend: str, dispatch_key: str, decomposed: bool = False, **kernels: Callable[..., Any]
) -> None:
    """Register a backend written in Python, for a dispatch key that may have kernels already.

    Eager calls run its kernels directly. Compiled code calls an operator, whose argument
    ``backend`` then chooses between it and the earlier kernels; or, ``decomposed``, the kernels'
    method ``traced``.
    """
    for name, function in kernels.items():
        operators[name].in_python[backend] = function
        if "backend" in operators[name].names:
            _put_behind(dispatch_key, operators[name], backend, function, decomposed)


def apart(results: Any) -> Any:
    """Distinct tensors, as the dispatcher wants them, where one empty one stands for several."""
    if isinstance(results, Tensor):
        return results
    ids = [id(x) for x in results]
    return tuple(x.clone() if ids[i] in ids[:i] else x for i, x in enumerate(results))


def _put_behind(
    key: str, operator: Operator, backend: str, function: Any, decomposed: bool
) -> None:
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    name = f"bahdanau_fast::{operator.name}"
    before: Any = torch.library.get_kernel(name, key) if has_kernel(name, key) else None
    if before is not None:
        _beside_others.add(backend)
        # Eager calls of the earlier kernels go past the choice, which is Python.
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        operator.in_python[key.lower()] = functools.partial(before.call_boxed, keys)

    def is_chosen(named: Named) -> bool:
        return before is None or named["backend"] == NUMBERS[backend]

    def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
        named = operator.named(*args, **kwargs)
        if is_chosen(named):
            return apart(function(*named.values()))
        return before.call_boxed(keys, *named.values())

    with warnings.catch_warnings():  # that a kernel replaces another
        warnings.simplefilter("ignore")
        library.impl(operator.name, choose, key, with_keyset=True)

    def decompose(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        named = operator.named(*args, **kwargs)
        if mode.export or not is_chosen(named) or args[0].device.type != key.lower():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if not {*types} <= {Tensor, FakeTensor, FunctionalTensor}:
            return NotImplemented
        with mode:
            return function.traced(*named.values())

    if decomposed:  # as torch.library.triton_op does it; an export has the operator
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, decompose, lib=library)
