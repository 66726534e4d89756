"""Rules for what makes scores of a sum, weights of scores, and a context of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast.fuse.axes import (
    Layout,
    Parts,
    broadcast_shape,
    flat,
    layout_of,
    need,
    parts_of,
    place,
    remembered,
    shape_of,
)
from bahdanau_fast.fuse.promise import Promise, now, version
from bahdanau_fast.fuse.rules import activated, became, dim_of, rule, state_of, weights_of, writes
from bahdanau_fast.fuse.values import Addend, Scores, Sum, Weighed

__all__ = ["MOST_VECTORS", "contract", "followed"]

# What a mask has to put for no weight to be left there.
HIDDEN = -1e4
# Vectors that one sum is summed against, each by a call of its own.
MOST_VECTORS = 16


def contract(
    watch: Any, x: Any, other: Any, dim: int, keep: bool = False, given: Any = None
) -> Any:
    """``(x * other).sum(dim)``: of an activated sum scores, of weights a context.

    Args:
        watch: the watch.
        x: a promise.
        other: has at most as many dimensions.
        dim: of ``x``.
        keep: as in ``sum``.
        given: what ``other`` is a view of, to be taken itself where it is the same.
    """
    given = other if given is None else given
    other = _reduced(other, x.dim())
    need(other.dim() == x.dim() and other.dtype is x.dtype)
    dim = dim_of(dim, x.dim())
    if weights_of(x) is not None:
        need(not watch.autocast)
        return _context(x, other, dim, keep, given)
    total, group = activated(x), x.axes[dim]
    need(total is not None and len(group) == 1 and other.shape[dim] == x.shape[dim])
    assert total is not None
    more = [i for i, n in enumerate(other.shape) if n != 1 and i != dim]
    if not more:
        layout = (*x.axes[:dim], *([()] if keep else []), *x.axes[dim + 1 :])
        return _scores(watch, x, total, group[0], other.reshape(-1), layout)
    # Several vectors: of several scores, or of heads, which are an axis of the sum.
    need(len(more) == 1 and other.shape[more[0]] <= MOST_VECTORS)
    (extra,) = more
    axis = x.axes[extra]
    need(len(axis) < 2 and (not axis or other.shape[extra] == total.sizes[axis[0]]))
    alone = tuple([() if i == extra else group for i, group in enumerate(x.axes)])
    layout = (*alone[:dim], *([()] if keep else []), *alone[dim + 1 :])
    found = []
    for i in range(other.shape[extra]):
        one = _at(total, axis[0], i) if axis else total
        vector = other.select(extra, i).reshape(-1)
        found.append(now(_scores(watch, x, one, group[0], vector, layout)))
    return torch.cat(found, extra if keep or extra < dim else extra - 1)


def _reduced(x: Any, dims: int) -> Any:
    """A tensor without the axes along which it is constant, and with so many dimensions."""
    total = state_of(x, Sum)
    if total is not None and len(total.addends) == 1 and all(len(group) < 2 for group in x.axes):
        (addend,) = total.addends
        new = len(total.sizes)  # numbers of axes that it has not
        order = tuple([group[0] if group else new + i for i, group in enumerate(x.axes)])
        x = place(addend.now, addend.axes, order)
    need(type(x) is not Promise)
    if 0 in x.stride():
        for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            x = x.narrow(i, 0, 1) if size > 1 and stride == 0 else x
    return x.reshape((1,) * (dims - x.dim()) + tuple(x.shape)) if x.dim() < dims else x


def _at(total: Sum, axis: int, i: int) -> Sum:
    """A sum at one place of an axis."""
    addends = []
    for each in total.addends:
        addend = each
        if axis in each.axes:
            value = each.now.narrow(each.axes.index(axis), i, 1)
            axes = tuple([None if other == axis else other for other in each.axes])
            addend = Addend(value, axes, version(value))
        addends.append(addend)
    sizes = (*total.sizes[:axis], 1, *total.sizes[axis + 1 :])
    return total._replace(sizes=sizes, addends=tuple(addends))


def _scores(watch: Any, x: Any, total: Sum, hidden: int, vector: Tensor, layout: Layout) -> Any:
    present = tuple(
        [
            frozenset([axis for axis in addend.axes if axis is not None and axis != hidden])
            for addend in total.addends
        ]
    )
    lead = frozenset([i for i, n in enumerate(total.sizes) if n != 1 and i != hidden])
    parts = parts_of(present, lead)
    queries = [total.addends[i].value for i in parts.of_queries]
    need(not all(isinstance(q, nn.Parameter) and q.dim() < 2 for q in queries))  # that is a bias
    need(watch.pays(math.prod(total.sizes), x.is_cpu))
    scores = Scores(total, parts, hidden, _whole(vector), watch.caches)
    made = watch.promise(scores, layout, x)
    watch.found(scores)
    return now(made).to(torch.get_autocast_dtype(x.device.type)) if watch.autocast else made


def _whole(vector: Tensor) -> Tensor:
    """What a vector is a view of, if it is all of it: the same tensor at every step."""
    base = vector._base
    if base is not None and base.shape in ((vector.numel(),), (1, vector.numel())):
        return base if base.requires_grad == vector.requires_grad else vector
    return vector


def followed(watch: Any, x: Any, scores: Scores, how: str, by: Any) -> Any:
    """Scores times, divided by or plus one number."""
    if isinstance(by, Tensor):
        need(type(by) is not Promise and by.numel() == 1 and by.dim() < 2 and by.dtype is x.dtype)
        need(scores.mask is None)
    else:
        need(type(by) in (int, float))
    fill = scores.fill
    if scores.mask is not None:
        need(how != "+" and by > 0)
        fill = fill * by if how == "*" else fill / by
    need(not scores.soft and fill <= HIDDEN)
    return watch.promise(scores._replace(after=(*scores.after, (how, by)), fill=fill), x.axes, x)


@rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
def _mul(watch: Any, a: Any, b: Any) -> Any:
    a, b = (a, b) if state_of(a, Scores) or activated(a) else (b, a)
    scores = state_of(a, Scores)
    if scores is not None and not scores.soft:
        return followed(watch, a, scores, "*", b)
    need((scores or activated(a)) and isinstance(b, Tensor) and b.dtype is a.dtype)
    need(type(b) is not Promise or state_of(b, Sum) is not None)
    shape = broadcast_shape(a.shape, b.shape)
    return watch.promise(Weighed(tuple(shape), a, b), layout_of(shape), a)


@rule(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide)
def _div(watch: Any, a: Any, b: Any) -> Any:
    scores = state_of(a, Scores)
    need(scores is not None)
    return followed(watch, a, scores, "/", b)


@rule(torch.sum, Tensor.sum)
def _sum(watch: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    weighed = state_of(x, Weighed)
    (dim,) = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else (dim,)
    need(weighed is not None and flat(x.axes) == tuple(i for i, n in enumerate(x.shape) if n != 1))
    promise = weighed.promise
    layout = ((),) * (x.dim() - promise.dim()) + promise.axes
    promise = watch.view(promise, layout) if x.dim() > promise.dim() else promise
    return contract(watch, promise, weighed.other, dim_of(dim, x.dim()), keepdim)


@rule(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    *(torch.mv, Tensor.mv, torch.mm, Tensor.mm, torch.inner, Tensor.inner),
)
def _matmul(watch: Any, a: Any, b: Any) -> Any:
    """Both become factors with an axis for each of theirs, of which one is summed over."""
    if weights_of(a) or activated(a):
        if b.dim() == 1:
            return contract(watch, a, b, -1)
        need(a.dim() > 1 and b.shape[-2] == a.shape[-1] and b.dim() <= a.dim())
        other = _reduced(b, b.dim()).transpose(-1, -2).unsqueeze(-3)
        layout = (*a.axes[:-1], (), a.axes[-1])
        return contract(watch, watch.view(a, layout), other, -1, given=b)
    need((weights_of(b) or activated(b)) and b.dim() > 1 and a.dim() <= b.dim())
    need(a.shape[-1] == b.shape[-2])
    other = _reduced(a, a.dim()).unsqueeze(-1)
    if a.dim() == 1:
        return contract(watch, b, other, -2)
    layout = (*b.axes[:-2], (), *b.axes[-2:])
    return contract(watch, watch.view(b, layout), other, -2, given=a)


@rule(torch.tensordot)
def _tensordot(watch: Any, a: Any, b: Any, dims: Any = 2) -> Any:
    """Over the last dimension of one and the first of the other, a product like others."""
    if isinstance(dims, (tuple, list)):
        (of_a,), (of_b,) = ([i] if isinstance(i, int) else i for i in dims)
        need(dim_of(of_a, a.dim()) == a.dim() - 1 and dim_of(of_b, b.dim()) == 0)
    need((isinstance(dims, (tuple, list)) or dims == 1) and b.dim() < 3)
    return _matmul(watch, a, b)


@rule(torch.einsum)
def _einsum(watch: Any, equation: Any, *operands: Any) -> Any:
    given, arrow, out = equation.replace(" ", "").partition("->")
    names = given.split(",")
    need(arrow and "." not in given and len(names) == len(operands) == 2)
    need(all(len(set(each)) == len(each) for each in names))
    (x, other), (of_x, of_other) = operands, names
    if not (weights_of(x) or activated(x)):
        x, other, of_x, of_other = other, x, of_other, of_x
    summed = [name for name in of_x if name not in out]
    need((weights_of(x) or activated(x)) and len(summed) == 1 and summed[0] in of_other)
    need(set(of_other) <= {*out, *summed})
    letters = (*out, *summed)
    layout = tuple([x.axes[of_x.index(name)] if name in of_x else () for name in letters])
    reduced = _reduced(other, len(of_other))
    order = [of_other.index(name) for name in letters if name in of_other]
    shape = [reduced.shape[of_other.index(n)] if n in of_other else 1 for n in letters]
    turned = reduced.permute(order).reshape(shape)
    return contract(watch, watch.view(x, layout), turned, -1, given=other)


# ---- masks, softmax, context ----


@rule(torch.masked_fill, Tensor.masked_fill)
def _masked_fill(watch: Any, x: Any, mask: Any, value: Any) -> Any:
    need(not x.detached)
    return _masked(watch, x, mask, value)


@rule(Tensor.masked_fill_)
def _masked_fill_(watch: Any, x: Any, mask: Any, value: Any) -> Any:
    writes(watch, x)
    return became(watch, x, _masked(watch, x, mask, value))


@rule(torch.where)
def _where(watch: Any, condition: Any, a: Any, b: Any) -> Any:
    x, fill = (a, b) if type(a) is Promise else (b, a)
    need(type(x) is Promise and not x.detached and condition.dtype is torch.bool)
    if isinstance(fill, Tensor):
        need(fill.numel() == 1 and fill.is_cpu and not fill.requires_grad)
        fill = float(fill)
    return _masked(watch, x, ~condition if x is a else condition, fill)


def _masked(watch: Any, x: Any, mask: Any, fill: Any) -> Any:
    need(x.cell.value is None and x.cell.grad == torch.is_grad_enabled())
    scores = x.cell.state
    need(type(scores) is Scores and not scores.soft)
    need(type(mask) is Tensor and mask.dtype is torch.bool and mask.dim() <= x.dim())
    need(type(fill) in (int, float) and fill <= HIDDEN)
    more = x.dim() - mask.dim()
    pairs = list(zip(mask.shape, x.axes[more:], x.shape[more:], strict=True))
    need(all(n == 1 or (len(group) == 1 and n == size) for n, group, size in pairs))
    axes = tuple([None if n == 1 else group[0] for n, group, _ in pairs])
    if scores.mask is not None:
        need(scores.fill == fill)
        order = scores.order
        mask = place(mask, axes, order) | place(scores.mask[0], scores.mask[1], order)
        axes = tuple(None if n == 1 else axis for n, axis in zip(mask.shape, order, strict=True))
    return watch.promise(scores._replace(mask=(mask, axes), fill=float(fill)), x.axes, x)


@rule(torch.softmax, Tensor.softmax, F.softmax)
def _softmax(watch: Any, x: Any, dim: Any, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    scores = state_of(x, Scores)
    need(scores is not None and not scores.soft and dtype is None and type(_stacklevel) is int)
    group, parts = set(x.axes[dim_of(dim, x.dim())]), scores.parts
    if group == set(parts.queries):
        parts = parts.turned()
    need(group and group == set(parts.keys))
    made = scores._replace(parts=parts, soft=True)
    watch.found(made)
    return watch.promise(made, x.axes, x)


def _context(x: Any, values: Tensor, dim: int, keep: bool, given: Any) -> Any:
    """The weighted sum; ``values`` has the dimensions of the weights, ones where constant."""
    weights = x.cell.state
    # A context's gradient comes through weights that are a view of the operator's, not turned.
    need(not x.cell.grad or flat(x.cell.axes) == weights.order)
    dims, lengths, axes, order = _way(x.axes, x.shape, values.shape, dim, weights.parts, keep)
    batch_len, _, keys_len = shape_of(weights.parts[:3], weights.sizes)
    rows = values.permute(dims).reshape(batch_len, keys_len, -1)
    # The same tensor at each step, for the gradients of steps to meet.
    if type(given) is Tensor and given.shape == rows.shape and given.stride() == rows.stride():
        rows = given if given.storage_offset() == rows.storage_offset() else rows
    context, x.cell.value = weights.attend(rows, x.cell.axes)
    return place(context.reshape(lengths), axes, order)


@remembered
def _way(
    layout: Layout, shape: Sequence[int], given: Sequence[int], dim: int, parts: Parts, keep: bool
) -> Any:
    """Of a context: how values are permuted, its shape and dimensions, and their order wanted."""
    batch: list[int] = []
    queries: list[int] = []
    features: list[int] = []
    for i, (group, n) in enumerate(zip(layout, given, strict=True)):
        if i != dim and (group or n != 1):
            need(not group or n in (1, shape[i]))
            (features if not group else batch if n != 1 else queries).append(i)
    batch, queries = (sorted(each, key=layout.__getitem__) for each in (batch, queries))
    need(flat(tuple(layout[i] for i in batch)) == parts.batch and len(features) < 2)
    need(flat(tuple(layout[i] for i in queries)) == parts.queries)
    need(layout[dim] == parts.keys and given[dim] == shape[dim])
    dims = [*batch, dim, *features]
    dims += [i for i in range(len(layout)) if i not in dims]
    axes = (*batch, *queries, *features)
    lengths = [given[i] if i in features else shape[i] for i in axes]
    return dims, lengths, axes, tuple(i for i in range(len(layout)) if keep or i != dim)
