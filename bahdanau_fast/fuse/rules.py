"""Rules: what becomes of promises in functions of torch. Here are views and activations.

A rule gets the watch and the arguments of the function, and gives its result back. Where it is
:func:`need` that ends it, the function is called with the values of what was promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast.fuse.axes import Layout, Unruled, flat, need, regrouped
from bahdanau_fast.fuse.promise import Promise
from bahdanau_fast.fuse.values import Scores, Sum

__all__ = [
    "RULES",
    "activated",
    "became",
    "dim_of",
    "numbers",
    "plain_sum",
    "rule",
    "state_of",
    "weights_of",
    "writes",
]

#: By function: the rule, and whether it is for calls without a promise, too.
RULES: dict[Any, tuple[Callable[..., Any], bool] | None] = {}


def rule(*functions: Any, plain: bool = False) -> Callable[[Any], Any]:
    """Makes a function the rule of others; ``plain``: for calls without a promise, too."""

    def add(function: Any) -> Any:
        RULES.update(dict.fromkeys(functions, (function, plain)))
        return function

    return add


def state_of(x: Any, kind: type) -> Any:
    """What a promise is of, if it is of that kind and nobody has computed it."""
    if type(x) is not Promise or x.detached:
        return None
    cell = x.cell
    fits = cell.value is None and type(cell.state) is kind and cell.grad == torch.is_grad_enabled()
    return cell.state if fits else None


def plain_sum(x: Any) -> Sum | None:
    """Of what sum without an activation a tensor is a promise."""
    total = state_of(x, Sum)
    return total if total is not None and total.activation is None else None


def activated(x: Any) -> Sum | None:
    """Of what sum with an activation a tensor is a promise."""
    total = state_of(x, Sum)
    return total if total is not None and total.activation is not None else None


def weights_of(x: Any) -> Scores | None:
    """Of what weights a tensor is a promise."""
    scores = state_of(x, Scores)
    return scores if scores is not None and scores.soft else None


def dim_of(dim: Any, dims: int) -> int:
    """A dimension counted from the first."""
    need(isinstance(dim, int) and -dims <= dim < dims)
    return int(dim) % dims


def writes(watch: Any, x: Any) -> None:
    """End the rule of a function that writes to ``x`` where that is no promise."""
    if type(x) is not Promise:
        watch.write(x)
        raise Unruled


def became(watch: Any, x: Any, made: Any) -> Any:
    """A promise after a function that writes to it; what its views are of, too."""
    if type(made) is not Promise or x.cell.value is not None or x.axes != made.axes:
        watch.write(x)
        raise Unruled
    x.cell.state = made.cell.state
    return x


# ---- views: from layout to layout ----


def _view(*functions: Any) -> Callable[[Any], Any]:
    def add(moved: Callable[..., Layout]) -> Any:
        def view(watch: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            need(type(x) is Promise)
            return watch.view(x, moved(x.axes, *args, **kwargs))

        rule(*functions)(view)
        return moved

    return add


@_view(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
def _transpose(axes: Layout, dim0: int, dim1: int) -> Layout:
    moved = list(axes)
    moved[dim0], moved[dim1] = moved[dim1], moved[dim0]
    return tuple(moved)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


@_view(Tensor.t, torch.t, _getter("mT"))
def _t(axes: Layout) -> Layout:
    moved: Layout = _transpose(axes, -1, -2)
    return moved


@_view(torch.permute, Tensor.permute)
def _permute(axes: Layout, *dims: Any) -> Layout:
    return tuple(axes[dim] for dim in numbers(dims))


@_view(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(axes: Layout, dim: int) -> Layout:
    at = dim_of(dim, len(axes) + 1)
    return (*axes[:at], (), *axes[at:])


@_view(torch.squeeze, Tensor.squeeze)
def _squeeze(axes: Layout, dim: Any = None) -> Layout:
    at = None if dim is None else dim_of(dim, len(axes))
    return tuple(group for i, group in enumerate(axes) if group or (at is not None and i != at))


@_view(torch.flatten, Tensor.flatten)
def _flatten(axes: Layout, start_dim: int = 0, end_dim: int = -1) -> Layout:
    begin, end = dim_of(start_dim, len(axes)), dim_of(end_dim, len(axes)) + 1
    return (*axes[:begin], flat(axes[begin:end]), *axes[end:])


@_view(Tensor.__getitem__)
def _getitem(axes: Layout, index: Any) -> Layout:
    """Whole dimensions, new ones, and the only place of one of size one."""
    moved: list[tuple[int, ...]] = []
    left = list(axes)
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            moved.append(())
        elif isinstance(each, slice) and each == slice(None) and left:
            moved.append(left.pop(0))
        else:
            need(type(each) is int and each in (0, -1) and left and not left.pop(0))
    return (*moved, *left)


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(watch: Any, x: Any, *shape: Any) -> Any:
    asked = list(numbers(shape))
    need(type(x) is Promise and not any(isinstance(n, torch.dtype) for n in asked))
    if -1 in asked:
        rest = -math.prod(asked)
        need(rest and x.numel() % rest == 0)
        asked[asked.index(-1)] = x.numel() // rest
    return watch.view(x, regrouped(x.axes, x.cell.state.sizes, asked))


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(watch: Any, x: Any, other: Any) -> Any:
    return _reshape(watch, x, *other.shape)


@rule(_getter("data"), Tensor.detach)
def _detach(watch: Any, x: Any) -> Any:
    return watch.view(x, x.axes, detached=True)


@rule(Tensor.contiguous)
def _contiguous(_: Any, x: Any) -> Any:
    return x


@rule(Tensor.float)
def _float(_: Any, x: Any) -> Any:
    need(x.dtype is torch.float32)
    return x


@rule(F.dropout)
def _dropout(_: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    need(not training or p == 0)
    return x


def numbers(given: Sequence[Any]) -> Sequence[Any]:
    """Of ``*sizes``, which may be one sequence."""
    return given[0] if given and isinstance(given[0], (tuple, list)) else given


def _like(name: str) -> None:
    """A tensor of the dtype and device of a promise needs no values."""
    function = getattr(Tensor, name)

    def made(_: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)

    rule(function)(made)


for _name in ("new_full", "new_zeros", "new_ones", "new_empty", "new_tensor"):
    _like(_name)


# ---- activations ----


def _activate(watch: Any, x: Any, name: str, slope: float = 0.01, inplace: bool = False) -> Any:
    total = plain_sum(x)
    need(total is not None and len(total.addends) > 1)
    assert total is not None
    made = watch.promise(total._replace(activation=name, slope=slope), x.axes, x)
    return became(watch, x, made) if inplace else made


@rule(torch.tanh, Tensor.tanh, F.tanh)
def _tanh(watch: Any, x: Any) -> Any:
    return _activate(watch, x, "tanh")


@rule(torch.tanh_, Tensor.tanh_)
def _tanh_(watch: Any, x: Any) -> Any:
    return _activate(watch, x, "tanh", inplace=True)


@rule(torch.relu, Tensor.relu, F.relu)
def _relu(watch: Any, x: Any, inplace: bool = False) -> Any:
    return _activate(watch, x, "relu", inplace=inplace)


@rule(torch.relu_, Tensor.relu_)
def _relu_(watch: Any, x: Any) -> Any:
    return _activate(watch, x, "relu", inplace=True)


@rule(F.leaky_relu)
def _leaky_relu(watch: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return _activate(watch, x, "leaky_relu", float(negative_slope), inplace)
