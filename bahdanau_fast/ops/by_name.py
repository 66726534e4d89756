"""``attend`` and ``attend_backward`` with the backend as an argument.

A dispatch key holds one implementation. Compiled code that asks for a backend behind no key (Triton
beside CUDA C++, or in its interpreter) calls these operators; shapes and gradients are those of
:mod:`projected`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.ops.projected import (
    ATTEND_INPUTS,
    TAGS,
    attend_backward_fake,
    attend_fake,
    gradients,
    implementations,
    library,
    setup_context,
)

__all__ = ["attend_by"]

library.define(
    f"attend_by(str backend, {ATTEND_INPUTS}, bool need_weights) "
    "-> (Tensor context, Tensor weights)",
    tags=TAGS,
)
library.define(
    f"attend_backward_by(str backend, {ATTEND_INPUTS}, Tensor weights, Tensor? grad_context, "
    "Tensor? grad_weights, int needs) -> (Tensor grad_queries, Tensor grad_keys, "
    "Tensor grad_values, Tensor grad_w_v)",
    tags=TAGS,
)


def _implementation(backend: str, direction: int) -> Callable[..., Any]:
    if backend not in implementations:  # code exported by another process
        need = "be loaded: call bahdanau_fast.backends.available()"
        checks.reject(ValueError, "backend", need, repr(backend))
    return implementations[backend][direction]


def _attend(backend: str, *inputs: Any) -> tuple[Tensor, Tensor]:
    return _implementation(backend, 0)(*inputs)  # type: ignore[no-any-return]


def _attend_backward(backend: str, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _implementation(backend, 1)(*inputs)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.backend = inputs[0]
    setup_context(ctx, inputs[1:], output)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[at] for at in (1, 2, 5, 6)]
    operator = partial(torch.ops.bahdanau_fast.attend_backward_by.default, ctx.backend)
    grad_q, grad_k, grad_v, grad_w = gradients(ctx, ctx.saved_tensors, operator, needed, *grads)
    return None, grad_q, grad_k, None, None, grad_v, grad_w, None, None, None, None


library.impl("attend_by", _attend, "CompositeExplicitAutograd")
library.impl("attend_backward_by", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "bahdanau_fast::attend_by", lambda _, *inputs: attend_fake(*inputs), lib=library
)
torch.library.register_fake(
    "bahdanau_fast::attend_backward_by",
    lambda _, *inputs: attend_backward_fake(*inputs),
    lib=library,
)
torch.library.register_autograd(
    "bahdanau_fast::attend_by", _backward, setup_context=_setup_context, lib=library
)

# With the name of a backend, then the arguments and results of ``attend``.
attend_by: Callable[..., tuple[Tensor, Tensor]] = torch.ops.bahdanau_fast.attend_by.default
