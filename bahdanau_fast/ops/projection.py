"""``x @ weight.T`` by the fastest matrix product for a processor, as :mod:`limits` says it.

PyTorch multiplies fp32 matrices with MKL; the other library inside torch is oneDNN. Of 16 rows and
a large weight MKL makes two to three times the time of 15, on Intel's processors; of their
transpose, ``weight @ x.T``, it does not. For few rows this package has a product of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from bahdanau_fast import checks, limits
from bahdanau_fast.ops import few_rows
from bahdanau_fast.ops.saved_tensors import (
    BackwardToken,
    PendingBackwards,
    SavedTensors,
    with_rows_together,
)

#: Rows, weight and bias to the projected rows.
Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

# Rows below which a projection only reads its weight, and MKL does that as fast as oneDNN.
ONEDNN_ROWS = 4
# Rows and columns of a weight's gradient from which on oneDNN, which does not share out its sum, is
# worth it.
ONEDNN_SIDE = 128
# Longer sums are taken in parts: oneDNN adds up one by one, and would round more often. The second
# holds where each part has to be copied first.
ONEDNN_TERMS, ONEDNN_COPIED_TERMS = 256, 512
# The rows that are worth the transpose of an MKL product.
TURNED_ROWS, TURNED_ROWS_MOST = 16, 48
# What this package's product is worth: features of a row, rows of the weight, and elements of
# the weight for each row; of one row, of which MKL makes less work, elements of the weight.
FEW_ROWS_FEATURES, FEW_ROWS_HIDDEN, FEW_ROWS_WEIGHT = 256, 128, 8192
ONE_ROW_WEIGHT = 1 << 18


def _find_onednn() -> Any:
    """Torch's own operator for fp32 ``linear`` through oneDNN, or None where it would not pay."""
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


_onednn = _find_onednn()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, plain: bool = False) -> Tensor:
    """``F.linear`` in result and gradients; ``plain``, it is that function: for the reference."""
    faster = None if plain else way(x, weight)
    records = faster is not None and checks.needs_gradient(x, weight, bias)
    faster = way(x, weight, trains=True) if records else faster
    if faster is None:
        return F.linear(x, weight, bias)
    if records:
        node: Any = _Linear
        product: Tensor = node.apply(x, weight, bias, faster, None)
        return product
    return faster(x, weight, bias)


def shared_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, backwards: PendingBackwards
) -> tuple[Tensor, SavedTensors | None]:
    """:func:`linear` by a node that several calls share, and what that saves, or None."""
    if not checks.needs_gradient(x, weight, bias):
        return linear(x, weight, bias), None
    grad_fns = tuple(t.grad_fn for t in (x, weight, bias) if t is not None)
    dtype = checks.autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if x.requires_grad or not x.is_contiguous():
        x = with_rows_together(x)
    saved = SavedTensors(
        backwards,
        x if weight.requires_grad else None,
        weight if x.requires_grad else None,
        grad_fns=grad_fns,
    )
    node: Any = _Linear
    return node.apply(x, weight, bias, way(x, weight, trains=True), saved), saved


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, token: BackwardToken) -> Tensor:
        ctx.token = token
        return keys.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.token.after_backward()
        return grad, None


def waiting(keys: Tensor, token: BackwardToken) -> Tensor:
    """Shared keys for a call whose backward may come, as long as the graph of the result exists."""
    node: Any = _Waiting
    result: Tensor = node.apply(keys, token)
    return result


def way(x: Tensor, weight: Tensor, trains: bool = False) -> Product | None:
    """The product that takes the place of ``F.linear``; None where nothing does."""
    # Asked first: compiled code takes F.linear, and no size of x becomes a guard of it.
    if torch.compiler.is_compiling():
        return None
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        return None  # for an error in torch's words
    bounds, elements, (hidden, size) = limits.LIMITS, x.numel(), weight.shape
    least, found = bounds.onednn_work_to_train if trains else bounds.onednn_work, None
    if _is_few(elements, hidden, size):
        found = few_rows.multiply
    elif elements * hidden >= least and elements >= ONEDNN_ROWS * size:
        found = None if _onednn is None else multiply
    elif min(hidden, size) >= bounds.turned_side:
        pays = TURNED_ROWS * size <= elements <= TURNED_ROWS_MOST * size
        found = multiply_turned if pays else None
    return found if found and weight.is_contiguous() and _is_plain(x, weight) else None


def _is_few(elements: int, hidden: int, size: int) -> bool:
    rows = elements // max(size, 1)
    return (
        0 < rows <= limits.LIMITS.few_rows
        and size >= FEW_ROWS_FEATURES
        and hidden >= FEW_ROWS_HIDDEN
        and hidden * size >= (ONE_ROW_WEIGHT if rows == 1 else FEW_ROWS_WEIGHT * rows)
        and few_rows.is_there()
    )


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.is_cpu
        # Subclasses (DTensor, FakeTensor) and whatever traces or transforms know F.linear only.
        and type(x) is Tensor
        and type(weight) in (Tensor, Parameter)
        and not checks.in_transform()
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
    )


def multiply_turned(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` as the transpose of a product."""
    rows = x.flatten(0, -2).t()
    product = weight @ rows if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows)
    return product.t().contiguous().view(*x.shape[:-1], weight.shape[0])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN; the weight is contiguous, or the transpose of what is."""
    terms, ready = weight.shape[1], not weight.is_contiguous()
    most = ONEDNN_TERMS
    if terms <= (most if ready else ONEDNN_COPIED_TERMS):
        return _product(x, weight, bias)
    product = None
    for i in range(0, terms, most):
        some = weight[:, i : i + most]
        # A weight with gaps between its rows would take oneDNN's slow path, a thousand times so.
        part = _product(x[..., i : i + most], some if ready else some.contiguous())
        product = part if product is None else product.add_(part)
    assert product is not None
    return product if bias is None else product.add_(bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = _onednn(x, weight, bias, "none", [], "")
    return product


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """``left^T right`` over all rows: the gradient of a weight; not differentiable again."""
    pays = (
        _onednn is not None
        and min(left.shape[-1], right.shape[-1]) >= ONEDNN_SIDE
        and left.numel() * right.shape[-1] >= limits.LIMITS.onednn_work_to_train
        and _is_plain(left, right)
    )
    left, right = _rows(left), _rows(right)
    if not pays:
        return left.t() @ right
    return multiply(left.contiguous().t(), right.contiguous().t())


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: the gradient of the inputs of a layer; not differentiable again."""
    if (
        _onednn is None
        or x.numel() * weight.shape[1] < limits.LIMITS.onednn_work_to_train
        or not _is_plain(x, weight)
    ):
        return x @ weight
    return multiply(x.contiguous(), weight.contiguous().t())


def _rows(x: Tensor) -> Tensor:
    """(...,D) as (rows,D); a vectorized backward lacks ``flatten``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        faster: Product | None,
        saved: SavedTensors | None,
    ) -> Tensor:
        ctx.saved, ctx.few = saved, faster is few_rows.multiply
        if saved is None:
            for_x, for_weight, *_ = ctx.needs_input_grad
            ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        inputs = x.detach(), weight.detach(), None if bias is None else bias.detach()
        return (faster or F.linear)(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors if ctx.saved is None else ctx.saved.get()
        # create_graph=True: products that can be differentiated again.
        again = torch.is_grad_enabled()
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if ctx.few and not again and _is_plain(grad, grad):
            wanted = x if for_weight else None, weight if for_x else None
            grad_x, grad_weight, grad_bias = few_rows.gradients(grad, *wanted, for_bias)
        else:
            if for_x:
                grad_x = grad @ weight if again else product(grad, weight)
            if for_weight and again:
                grad_weight = _rows(grad).t() @ _rows(x)
            elif for_weight:
                grad_weight = sum_of_products(grad, x)
            if for_bias:
                grad_bias = _rows(grad).sum(0)
        if ctx.saved is not None:
            ctx.saved.after_backward()
        return grad_x, grad_weight, grad_bias, None, None
