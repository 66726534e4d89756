"""Rules for what is added up: tensors that broadcast, concatenations, products, convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast.fuse.axes import Layout, broadcast_shape, layout_of, need, place
from bahdanau_fast.fuse.promise import Promise, now, version
from bahdanau_fast.fuse.rules import (
    activated,
    became,
    dim_of,
    numbers,
    plain_sum,
    rule,
    state_of,
    writes,
)
from bahdanau_fast.fuse.scores import MOST_VECTORS, contract, followed
from bahdanau_fast.fuse.values import (
    FEATURES,
    Addend,
    Concatenation,
    Convolution,
    Product,
    Scores,
    Sum,
)
from bahdanau_fast.modules.layers import keeps_places

__all__ = ["add"]


def _addends(x: Any, by: int) -> list[Addend]:
    """What a tensor adds to a sum whose axes are its dimensions, moved by so many."""
    total = plain_sum(x)
    if total is not None and all(len(group) < 2 for group in x.axes):
        moved: dict[Any, int] = {group[0]: i + by for i, group in enumerate(x.axes) if group}
        return [Addend(x, tuple(map(moved.get, axes)), v) for x, axes, v in total.addends]
    x = now(x)
    axes = tuple([None if n == 1 else i + by for i, n in enumerate(x.shape)])
    return [Addend(x, axes, version(x))]


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, plain=True)
def add(watch: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Scores and a term; or tensors that broadcast."""
    scores = state_of(a, Scores)
    if scores is not None:
        need(alpha == 1)
        return followed(watch, a, scores, "+", b)
    need(isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is b.dtype)
    plain = type(a) is not Promise is not type(b)
    dims = max(a.dim(), b.dim())
    need(dims > 1 and a.is_floating_point() and not (plain and a.shape == b.shape))
    need(not (plain and b.dim() < 2 and isinstance(b, nn.Parameter)))
    shape = broadcast_shape(a.shape, b.shape)
    b = b if alpha == 1 else now(b) * alpha
    # Dimensions that merge axes are taken apart.
    sizes = [[n] for n in shape]
    for x in (a, b):
        if plain_sum(x) is not None:
            for i, group in enumerate(x.axes, dims - x.dim()):
                if len(group) > 1 and len(sizes[i]) == 1:
                    sizes[i] = [x.cell.state.sizes[axis] for axis in group]
    if all(len(parts) == 1 for parts in sizes):
        addends = (*_addends(a, dims - a.dim()), *_addends(b, dims - b.dim()))
        return watch.promise(Sum(tuple(shape), addends), layout_of(shape), a)
    full = tuple([n for parts in sizes for n in parts])
    found: list[Addend] = []
    for x in (_split(watch, a, sizes), _split(watch, b, sizes)):
        found += _addends(x, len(full) - x.dim())
    return watch.promise(Sum(full, tuple(found)), _merged(sizes), a)


def _merged(sizes: Sequence[Sequence[int]]) -> Layout:
    """A dimension for several axes of these sizes each."""
    layout, axis = [], 0
    for parts in sizes:
        layout.append(tuple([axis + i for i, n in enumerate(parts) if n != 1]))
        axis += len(parts)
    return tuple(layout)


def _split(watch: Any, x: Any, sizes: list[list[int]]) -> Any:
    """A tensor with a dimension for each of several axes that its dimensions merge."""
    sizes = sizes[len(sizes) - x.dim() :]
    if type(x) is Promise:
        layout: list[tuple[int, ...]] = []
        for group, n, parts in zip(x.axes, x.shape, sizes, strict=True):
            own = [x.cell.state.sizes[axis] for axis in group]
            if len(parts) > 1 and n != 1 and own != parts:
                return _split(watch, now(x), sizes)
            layout += [(axis,) for axis in group] if n != 1 else [()] * len(parts)
        return watch.view(x, tuple(layout))
    pairs = zip(x.shape, sizes, strict=True)
    return x.reshape([m for n, parts in pairs for m in (parts if n != 1 else [1] * len(parts))])


@rule(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, plain=True)
def _sub(watch: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    need(isinstance(a, Tensor) and isinstance(b, Tensor) and state_of(a, Scores) is None)
    need(a.shape != b.shape and b.is_floating_point())
    return add(watch, a, b, alpha=-alpha)


@rule(Tensor.add_, Tensor.__iadd__)
def _add_(watch: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    writes(watch, a)
    return became(watch, a, add(watch, a, b, alpha=alpha))


# ---- tensors repeated along an axis ----


def _repeated(watch: Any, x: Any, times: Sequence[int], each: bool = False) -> Any:
    """``x`` so many times along its dimensions; ``each``: each place by itself."""
    lead = len(times) - x.dim()
    need(lead >= 0 and 0 not in x.shape and x.is_floating_point() and math.prod(times) > 1)
    own, sizes = [], []
    for n, t in zip((1,) * lead + tuple(x.shape), times, strict=True):
        twice = n != 1 and t != 1
        own.append([n] if not twice else [n, 1] if each else [1, n])
        sizes.append([max(n, t)] if not twice else [n, t] if each else [t, n])
    if any(len(parts) > 1 for parts in sizes):
        x = now(x).reshape([n for parts in own[lead:] for n in parts])
    full = tuple([n for parts in sizes for n in parts])
    return watch.promise(Sum(full, tuple(_addends(x, len(full) - x.dim()))), _merged(sizes), x)


def _along(x: Any, dim: Any, times: int) -> list[int]:
    return [times if i == dim_of(dim, x.dim()) else 1 for i in range(x.dim())]


@rule(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, plain=True)
def _expand(watch: Any, x: Any, *sizes: Any) -> Any:
    asked = list(numbers(sizes))
    own = [1] * (len(asked) - x.dim()) + list(x.shape)
    need(len(own) == len(asked))
    pairs = list(zip(own, asked, strict=True))
    need(all(n == 1 or m in (-1, n) for n, m in pairs))
    return _repeated(watch, x, [m if n == 1 and m != -1 else 1 for n, m in pairs])


@rule(Tensor.expand_as, plain=True)
def _expand_as(watch: Any, x: Any, other: Any) -> Any:
    return _expand(watch, x, *other.shape)


@rule(torch.broadcast_tensors, plain=True)
def _broadcast_tensors(watch: Any, *tensors: Any) -> Any:
    given = numbers(tensors)
    shape = functools.reduce(broadcast_shape, [list(x.shape) for x in given])
    return tuple([x if list(x.shape) == shape else _expand(watch, x, shape) for x in given])


@rule(Tensor.repeat, plain=True)
def _repeat(watch: Any, x: Any, *sizes: Any) -> Any:
    return _repeated(watch, x, numbers(sizes))


@rule(torch.repeat_interleave, Tensor.repeat_interleave, plain=True)
def _repeat_interleave(watch: Any, x: Any, repeats: Any, dim: Any = None) -> Any:
    need(isinstance(repeats, int))
    return _repeated(watch, x, _along(x, dim, repeats), True)


@rule(torch.stack, plain=True)
def _stack(watch: Any, tensors: Any, dim: int = 0) -> Any:
    need(all(x is tensors[0] for x in tensors))
    x = now(tensors[0]).unsqueeze(dim)
    return _repeated(watch, x, _along(x, dim, len(tensors)))


@rule(torch.cat, torch.concat, torch.concatenate, plain=True)
def _cat(watch: Any, tensors: Any, dim: int = 0) -> Any:
    first, dims = tensors[0], tensors[0].dim()
    at = dim_of(dim, dims)
    if all(x is first for x in tensors) and first.shape[at] == 1:
        return _repeated(watch, first, _along(first, dim, len(tensors)))
    need(at == dims - 1 and any(plain_sum(x) is not None for x in tensors))
    lead, parts = tuple(first.shape[:-1]), []
    need(all(x.shape[:-1] == lead and x.dtype is first.dtype for x in tensors))
    for x in tensors:
        addends = _addends(x, 0)
        part = addends[0] if len(addends) == 1 else _addends(now(x), 0)[0]
        if part.axes[-1] != at:  # one feature, or none that it has of its own
            value = place(part.now, part.axes, tuple(range(dims)))
            value = value.expand(*value.shape[:-1], x.shape[-1])
            axes = [axis if axis in part.axes else None for axis in range(at)]
            part = Addend(value, (*axes, at), version(value))
        parts.append(part)
    sizes = (*lead, sum([x.shape[-1] for x in tensors]))
    return watch.promise(Concatenation(sizes, tuple(parts)), layout_of(sizes), first)


# ---- products ----


@rule(F.linear, plain=True)
def _linear(watch: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if activated(x) is not None and weight.shape[0] <= MOST_VECTORS:
        layout = (*x.axes[:-1], (), x.axes[-1])
        return _plus(watch, contract(watch, watch.view(x, layout), weight, -1), bias)
    need(weight.shape[0] > 1 and x.dtype is weight.dtype and not watch.autocast)
    if type(x) is not Promise or state_of(x, Convolution) is not None:
        need(x.dim() == 3 and x.shape[-1] == weight.shape[1] and x.shape[1] > 1)
        sizes = (*x.shape[:-1], weight.shape[0])
        axes = tuple([None if n == 1 else i for i, n in enumerate(sizes)])
        addend = Addend(Product(x, weight, bias, []), axes, version(x))
        return watch.promise(Sum(sizes, (addend,)), layout_of(sizes), x)
    joined = state_of(x, Concatenation)
    need(joined is not None and x.axes[-1] == (len(joined.sizes) - 1,))
    addends, begin, hidden = [], 0, len(joined.sizes) - 1
    for part in joined.parts:
        tensor = part.now
        product = Product(tensor, weight.narrow(1, begin, tensor.shape[-1]), None, [])
        begin += tensor.shape[-1]
        addends.append(Addend(product, (*part.axes[:-1], hidden), version(tensor)))
    if bias is not None:
        addends.append(Addend(bias, (hidden,), version(bias)))
    sizes = (*joined.sizes[:-1], weight.shape[0])
    return watch.promise(Sum(sizes, tuple(addends)), x.axes, x)


def _plus(watch: Any, x: Any, bias: Any) -> Any:
    """Scores and the bias of their layer."""
    if bias is None:
        return x
    scores = state_of(x, Scores)
    return x + bias if scores is None else followed(watch, x, scores, "+", bias)


@rule(torch.conv1d, torch.conv2d, plain=True)
def _convolution(watch: Any, x: Any, weight: Any, bias: Any = None, *how: Any, **named: Any) -> Any:
    """Of an activated sum, with one tap, scores; else features of the keys, where they looked."""
    taps = list(weight.shape[2:])
    need(x.dim() == weight.dim() and x.dtype is weight.dtype)
    need(not watch.autocast and keeps_places(taps, *how, **named))
    if activated(x) is not None:
        need(weight.shape[0] == 1 == math.prod(taps))
        return _plus(watch, contract(watch, x, weight[0], 1, keep=True), bias)
    rows = x.shape[2:-1]
    need(type(x) is not Promise and x.shape[1] == weight.shape[1] and taps[-1] > 1)
    need(1 < weight.shape[0] <= FEATURES and all(n == 1 for n in (*rows, *taps[:-1])))
    sizes = (x.shape[0], weight.shape[0], x.shape[-1])
    batch, channels, keys = layout_of(sizes)
    layout = (batch, channels, *(() for _ in rows), keys)
    return watch.promise(Convolution(sizes, x, weight, bias), layout, x)
