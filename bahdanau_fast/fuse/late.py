"""Results that are put off: a late tensor becomes its value, in place, for whoever needs it.

The Python object stays the same and gets the inside of the real tensor, graph included. So a hook,
a closure or a container that holds it need not be known: in the end it holds what plain code would
have given it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch._functorch.utils as functorch_utils
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch.overrides import enable_reentrant_dispatch

__all__ = [
    "AVAILABLE", "KEPT", "QUERIES", "Late", "become", "compute", "make", "replace_functions",
    "restore_functions",
]  # fmt: skip

#: What may be asked of a tensor that has no values yet.
QUERIES = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_floating_point, torch.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda")),
}
#: What this rests on inside torch; without it nothing is put off.
AVAILABLE = (
    hasattr(torch._C, "_swap_tensor_impl")
    and hasattr(functorch_utils, "unwrap_dead_wrappers")
    and hasattr(Tensor, "_use_count")
)


class Late(Tensor):
    """A tensor whose values are not computed yet.

    Attributes:
        put_off: who knows the call that makes it, and the number of that call.
    """

    put_off: tuple[Any, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in QUERIES:
            compute((args, kwargs))
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Past torch's functions, in C++. It asks for no gradient itself, so autograd above has
        # recorded nothing: the call is made again from the top, and its graph survives.
        with enable_reentrant_dispatch():
            compute((args, kwargs))
            return func(*args, **(kwargs or {}))


def make(shape: Any, dtype: torch.dtype, device: torch.device) -> Late:
    """A late tensor that nobody has put off yet."""
    made: Late = Tensor._make_wrapper_subclass(Late, shape, dtype=dtype, device=device)
    return made


def become(late: Late, value: Tensor) -> None:
    """Give a late tensor its value: who holds it holds a usual tensor from now on."""
    torch._C._swap_tensor_impl(late, value)
    late.__class__ = type(value)  # type: ignore[assignment]
    late.__dict__.clear()


def compute(x: Any) -> None:
    """Every late tensor in some arguments becomes its value."""
    kind = type(x)
    if kind is Late:
        x.put_off[0].compute(x)
    elif kind is tuple or kind is list:
        for each in x:
            compute(each)
    elif kind is dict:
        for each in x.values():
            compute(each)


def _with_values(function: Any) -> Any:
    """The same function, for which late tensors become values."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        compute((args, kwargs))
        return function(*args, **kwargs)

    return wrapped


# No torch functions, but looked up at each call: the first by autograd.Function.apply, also where
# somebody has bound ``scale = Scale.apply`` long before; the next where tensors enter transforms of
# torch.func; the last by scripted code.
_PAST = (
    (functorch_utils, "unwrap_dead_wrappers"),
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)
_theirs: list[tuple[Any, str, Any]] = []  # what stood there, while it is replaced


def replace_functions() -> None:
    """Have those functions compute what is late, until :func:`restore_functions`."""
    for place, name in _PAST if not _theirs else ():
        if hasattr(place, name):
            _theirs.append((place, name, getattr(place, name)))
            setattr(place, name, _with_values(_theirs[-1][2]))


def restore_functions() -> None:
    """Give torch its functions back."""
    while _theirs:
        setattr(*_theirs.pop())


def _references() -> int:
    held = {0: object()}
    one = held.pop(0)
    return sys.getrefcount(one)


#: References to an object that one local name alone holds, as ``sys.getrefcount`` counts them.
KEPT = _references()
