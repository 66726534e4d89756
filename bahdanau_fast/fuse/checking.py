"""Does a replaced ``forward`` compute what the module's own does?

Both run a few steps on copies of the module in fp64, on the same small random inputs: in training
mode with gradients of all inputs and parameters, and in evaluation mode without. A formula that
differs is seen: rounding is 2**-52, and the two may be 2**-30 apart.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast.fuse.families.family import Family
from bahdanau_fast.fuse.replacing import replace

__all__ = ["difference"]

SAME = 2.0**-30

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def difference(module: nn.Module, family: Family) -> str | None:
    """Why a family's ``forward`` would not be the module's own; None where it is.

    Args:
        module: left as it is.
        family: to be tried.
    """
    with _quiet(), torch.random.fork_rng(_gpus(module)):
        try:
            theirs = _copy(module)
            if any(isinstance(p, nn.UninitializedParameter) for p in theirs.parameters()):
                family.rehearse(theirs, _Drawing(theirs))  # gives lazy layers their sizes
            theirs.double()
            ours = _copy(theirs)
        except Exception as error:
            return f"a copy of it does not run: {_said(error)}"
        replace(ours, family)
        for dropout in (0.0, 1.0) if _dropouts(theirs) else (0.0,):
            for one in (theirs, ours):
                for layer in _dropouts(one):
                    layer.p = dropout
            for training in (True, False):
                found = _difference_in(theirs, ours, family, training)
                if found is not None:
                    where = "training" if training else "evaluation"
                    return f"{found} ({where} mode{', everything dropped' if dropout else ''})"
    return None


def _difference_in(
    theirs: nn.Module, ours: nn.Module, family: Family, training: bool
) -> str | None:
    results: list[dict[str, Tensor | None]] = []
    for one, whose in ((theirs, "its own forward"), (ours, "the fused forward")):
        try:
            with torch.set_grad_enabled(training):
                results.append(_results(one.train(training), family))
        except Exception as error:
            return f"{whose} raises {_said(error)}"
    for name, exact in results[0].items():
        result = results[1].get(name)
        if exact is None or result is None:
            if exact is not result:
                return f"{name} is {'no' if result is None else 'a'} tensor"
        elif exact.shape != result.shape or exact.dtype != result.dtype:
            return f"{name} is {_kind(result)}, where its own is {_kind(exact)}"
        elif exact.numel():
            largest = float((exact.double() - result.double()).abs().max())
            if not largest <= SAME * max(1.0, float(exact.double().abs().max())):
                return f"{name} differs by {largest:.2g}"
    return None


def _results(module: nn.Module, family: Family) -> dict[str, Tensor | None]:
    """Outputs of a rehearsal and, where they are recorded, gradients of inputs and parameters."""
    draw = _Drawing(module)
    outputs: dict[str, Tensor | None] = dict(family.rehearse(module, draw))
    recorded = [t for t in outputs.values() if t is not None and t.requires_grad]
    if torch.is_grad_enabled():
        leaves = {f"the gradient of input {i + 1}": t for i, t in enumerate(draw.inputs)}
        leaves |= {f"the gradient of {name}": p for name, p in module.named_parameters()}
        leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        seeds = [draw(*t.shape).detach() for t in recorded]
        grads = torch.autograd.grad(recorded, list(leaves.values()), seeds, allow_unused=True)
        outputs |= dict(zip(leaves, grads, strict=True))
    return {name: None if t is None else t.detach().clone() for name, t in outputs.items()}


class _Drawing:
    """Draws inputs, the same for every module."""

    def __init__(self, module: nn.Module) -> None:
        first = next(module.parameters())
        self._device, self._dtype = first.device, first.dtype
        self._generator = torch.Generator().manual_seed(0)
        self.inputs: list[Tensor] = []

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        drawn = drawn.to(self._device, self._dtype).requires_grad_()
        self.inputs.append(drawn)
        return drawn


def _copy(module: nn.Module) -> nn.Module:
    """A copy without hooks, and of kept tensors without their graph."""
    memo: dict[int, Any] = {}
    for each in module.modules():
        own = vars(each)
        if getattr(each, "has_uninitialized_params", bool)():
            continue  # its hook makes its parameters
        memo |= {id(own[name]): type(own[name])() for name in _HOOKS if name in own}
        kept = [t for t in own.values() if isinstance(t, Tensor) and not t.is_leaf]
        memo |= {id(t): t.detach().clone() for t in kept}
    return copy.deepcopy(module, memo)


def _dropouts(module: nn.Module) -> list[nn.Dropout]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]


def _gpus(module: nn.Module) -> list[int]:
    devices = {p.device for p in module.parameters() if p.is_cuda}
    return [device.index for device in devices if device.index is not None]


@contextmanager
def _quiet() -> Iterator[None]:
    """No words about what happens to a copy."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
