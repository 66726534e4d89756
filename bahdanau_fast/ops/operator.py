"""An operator from one description: its schema, the shapes of its results, and its gradient.

PyTorch is told of each operator once: :class:`Operator` defines the schema and registers the fake
(results without numbers); :class:`Attention`, of operators that attend, the autograd formula of
compiled code and the node of eager calls. Arguments have the names of the schema everywhere.

The kernels live elsewhere, one per dispatch key: csrc/cpu registers the CPU key when its extension
loads, csrc/cuda or ``backends.triton`` the CUDA key.
"""

from __future__ import annotations

import functools
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

__all__ = ["Attention", "Named", "Operator", "Recorded", "apart", "implement", "number_of"]

library = torch.library.Library("bahdanau_fast", "DEF")

#: Arguments and results of a call, by their names in the schema.
Named = dict[str, Any]
#: Gradients of the inputs of an operator: from its tensors and the results behind the first, its
#: numbers, which of them are asked for, and the gradients of its results.
Gradients = Callable[[Any, Any, tuple[bool, ...], Any], Sequence[Tensor | None]]
#: All operators, by name.
operators: dict[str, Operator] = {}


class Operator:
    """An operator of this package, from its schema and its fake, which is given names.

    Attributes:
        name: in ``torch.ops.bahdanau_fast``.
        names: of its arguments, in order.
        tensors: of those that are tensors; numbers come behind them where it is differentiated.
        defaults: of those that have one, by name.
        overload: what compiled code calls.
        now: the same past ``OpOverload.__call__``, for eager calls.
        in_python: kernels of backends written in Python, by the name of the backend; and those of
            the backend that such a one stands in front of.
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
        torch.library.register_fake(
            f"bahdanau_fast::{self.name}",
            lambda *args, **kwargs: fake(**self.named(*args, **kwargs)),
            lib=library,
        )
        operators[self.name] = self

    def named(self, *args: Any, **kwargs: Any) -> Named:
        """All arguments of a call by name; PyTorch leaves out those that are the default."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return {name: given.get(name, self.defaults.get(name)) for name in self.names}

    def kernel(self, backend: str | None) -> Callable[..., Any]:
        """What an eager call runs, from all arguments; None leaves that to the dispatcher."""
        return self.in_python.get(backend, self.now)

    def differentiate(self, count: int, gradients: Gradients) -> None:
        """Register the autograd formula of compiled code, for the first ``count`` arguments."""
        tensors = len(self.tensors)

        def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = tuple(self.named(*inputs).values())
            others = () if isinstance(output, Tensor) else output[1:]
            ctx.save_for_backward(*arguments[:tensors], *others)
            ctx.numbers, ctx.given = arguments[tensors:], len(inputs)
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            asked = (*ctx.needs_input_grad, *[False] * count)[:count]
            found: Sequence[Tensor | None] = [None] * count
            if [grad for grad in grads if grad is not None]:
                found = gradients(ctx.saved_tensors, ctx.numbers, asked, grads)
            return (*found, *[None] * ctx.given)[: ctx.given]

        torch.library.register_autograd(
            f"bahdanau_fast::{self.name}", backward, setup_context=set_up, lib=library
        )


class Attention(Operator):
    """An operator that gives context, weights and maybe more, and is differentiated.

    Its schema has the differentiated inputs first, the values as the third of them; then the other
    tensors: lengths and mask first, the seed of the dropout last; then ``dropout_p`` and other
    numbers.

    Args:
        inputs: names of those that are differentiated.
        needing: the inputs whose gradients need the value of one of them; of its name and
            :data:`Named`.
        scores: by the reference, from :data:`Named`: the scores, and what the operator gives beside
            context and weights.
        gradients: not differentiable again, in the order of ``inputs``: from what a backward
            has saved, numbers, bits of `needs`, the gradients of the results, the backend, and the
            shared node of the call or None.
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
        asked: tuple[bool, ...],
        grads: Sequence[Tensor | None],
        backend: str | None = None,
        shared: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of the inputs that are asked for, in their order.

        ``saved`` are tensors, then results from the weights on, without counts; the gradients of
        results at the end may be left out; those of a shared node's results are left to it.
        """
        if grads[0] is None:  # the values reach the context alone
            asked = (*asked[:2], False, *asked[3:])
        weights = saved[len(self.tensors)]
        assert weights is not None
        if not (weights.numel() or self.by_name(saved, numbers).get("need_weights", True)):
            need = "be called with need_weights=True where a gradient is due"
            checks.reject(RuntimeError, self.name, need, "False")
        if torch.is_grad_enabled():
            return self._differentiable_again(self.by_name(saved, numbers), asked, grads)
        found = self._gradients(saved, numbers, _bits(asked), grads, backend, shared)
        return [grad if need else None for grad, need in zip(found, asked, strict=True)]

    def by_name(self, saved: Sequence[Tensor | None], numbers: Sequence[Any]) -> Named:
        """What a backward has, by the names of the schema."""
        count = len(self.tensors)
        named = dict(zip(self.names, (*saved[:count], *numbers), strict=True))
        return named | {"weights": saved[count]}

    def _differentiable_again(
        self, named: Named, asked: tuple[bool, ...], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        def scores(*tensors: Tensor | None) -> Sequence[Tensor]:
            return self._scores({**named, **dict(zip(self.inputs, tensors, strict=True))})

        grad_context, grad_weights, *others = grads
        weights, grad_values, grad_scores = named["weights"], None, None
        if grad_context is not None:
            dropout, needed = (named["seed"], named["dropout_p"]), (True, asked[2])
            looked, grad_values = gradients_of_context(
                grad_context, weights, named["values"], *dropout, needed
            )
            assert looked is not None
            grad_weights = looked if grad_weights is None else looked + grad_weights
        if grad_weights is not None:
            seen = reference.visible(named["valid_lens"], named["mask"], weights.shape[2])
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            grad_weights = grad_weights.to(weights.dtype)
            grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
            if seen is not None:  # where a query sees nothing the weights are constants
                grad_scores = grad_scores.masked_fill(~seen, 0.0)
        inputs = [named[name] for name in self.inputs]
        asked = (*asked[:2], False, *asked[3:])
        found = differentiate_again(scores, inputs, asked, (grad_scores, *others))
        found[2] = grad_values
        return found


@functools.cache
def _bits(asked: tuple[bool, ...]) -> int:
    return sum(need << place for place, need in enumerate(asked))


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
        made: Tensor = weights
        return made

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the call, which is none, and of the inputs."""
        operator, backend, numbers, link, shared = ctx.call
        nodes = None
        if shared is not None:  # behind it are the nodes that its gradients are for
            of_queries, *others = ctx.next_functions
            nodes = (of_queries, *shared.node().next_functions, *others[3:])
        saved = saved_inputs(ctx, operator, nodes)
        grads = link.take(), grad_weights
        found = operator.gradients(saved, numbers, ctx.needs_input_grad[1:], grads, backend, shared)
        after_backward(ctx)
        if ctx.token is not None and ctx.token.after_backward():
            ctx.call = operator, backend, numbers, link, None
        return (None, *found)


#: Numbers that operators take as their argument ``backend``; 0 is what the dispatch key has.
NUMBERS = {"triton": 1}
# Backends written in Python whose dispatch key has other kernels, too.
_beside_others: set[str] = set()


def number_of(backend: str, traced: bool) -> int:
    """The argument ``backend``; traced code may run where the key has other kernels."""
    return 0 if traced and backend not in _beside_others else NUMBERS.get(backend, 0)


def implement(
    backend: str, dispatch_key: str, decomposed: bool = False, **kernels: Callable[..., Any]
) -> None:
    """Take in a backend written in Python, for a dispatch key that may have kernels already.

    Eager calls run its kernels directly. Compiled code calls an operator, whose argument
    ``backend`` then chooses between it and what was there; or, ``decomposed``, what the kernels are
    made of, as their method ``traced`` has it.
    """
    for name, function in kernels.items():
        operators[name].in_python[backend] = function
        if "backend" in operators[name].names:
            _put_behind(dispatch_key, operators[name], backend, function, decomposed)


def apart(results: Any) -> Any:
    """The dispatcher wants tensors of their own where an empty one stands for several results."""
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
        # Eager calls of the others go past the choice, which is Python.
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        operator.in_python[key.lower()] = functools.partial(before.call_boxed, keys)

    def is_chosen(named: Named) -> bool:
        return before is None or named["backend"] == NUMBERS[backend]

    def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
        named = operator.named(*args, **kwargs)
        if is_chosen(named):
            return apart(function(*named.values()))
        return before.call_boxed(keys, *named.values())

    with warnings.catch_warnings():  # that a kernel is registered in the place of another
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
