"""The parity check: a call is timed only after its result has been checked.

The reference in fp64 is the oracle. Ours must keep the parity rule (bahdanau_fast/parity.py) for
context, weights and every gradient; eager is the reference in the tested dtype. A baseline may
differ by 1e-3 of the largest value: a hundred times the worst rounding error of an fp32 sum of
these sizes, and far less than any wrong term.

Large shapes are checked on evenly spread batch rows. The gradient of the context is zero on the
other rows, so that the weight gradients are sums over the checked rows alone. The checked call is
the one that is timed afterwards.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import parity, reference

from ..cases import DECODE_STEPS, Inputs, Shape, draw
from . import Group, Provider, Runnable, decode

# Elements of (B,Tq,Tk,H) that the oracle computes at most, in fp64 and in the tested dtype.
CHECKED_ELEMENTS = 16_000_000
BASELINE_TOLERANCE = 1e-3

# What the rule grants to the order of a sum, which a library picks by the shape, and eager here by
# that of few rows: cut finely, a sum adds little to the roundings of its products, and a right
# result in another order would not be within twice the error. k products of both signs add up to
# about sqrt(k) of them, and each addition rounds what is there: a run of RUN additions, which a
# right sum may have, has the variance of RUN / 2 roundings of each product. So the rule has
# sqrt(RUN / 2) times what :func:`rounded_products` changes the exact result by. A single run of
# 40 000 has 35 times as much, and breaks the rule.
RUN = 32
GRANTED = math.sqrt(RUN / 2)


@dataclass(frozen=True)
class Verdict:
    """Whether a result passed; its worst quantity, and the error of that over the allowed error."""

    passed: bool
    worst: float
    where: str


def checked_call(
    source: str, name: str, task: str, shape: Shape, mode: str = "forward"
) -> tuple[Callable[[], Any], Verdict]:
    """What a worker makes: a call of a provider in ``source.PROVIDERS``, and the verdict on it."""
    providers = {each.name: each for each in importlib.import_module(source).PROVIDERS}
    torch.set_grad_enabled(mode != "forward")  # for the timed calls too
    inputs = draw(shape)
    inputs.require_grad(mode != "forward")
    oracle = Oracle(inputs, shape, task, mode == "train")
    return oracle.checked(providers[name])


def prepare(runnable: Runnable, train: bool, grad_context: Tensor) -> Callable[[], Any]:
    """The call to be timed: a forward, or with ``train`` a forward and all gradients."""
    if not train:
        return runnable.forward

    def step() -> tuple[Tensor, ...]:
        context = runnable.forward()[0]  # weights that nobody holds have no gradient to be found
        return torch.autograd.grad(context, runnable.leaves, grad_context)

    return step


class Oracle:
    """The result of a task in fp64, and the error of eager PyTorch in the tested dtype."""

    def __init__(self, inputs: Inputs, shape: Shape, task: str, gradients: bool) -> None:
        self._inputs, self._task, self._gradients = inputs, task, gradients
        per_row = shape.features // shape.batch * (DECODE_STEPS if task == "loop" else 1)
        count = max(1, min(shape.batch, CHECKED_ELEMENTS // per_row))
        self.rows = torch.linspace(0, shape.batch - 1, count).round().long()
        self._exact = self._compute(torch.float64)
        self._eager = self._compute(inputs.keys.dtype)

    def check(self, runnable: Runnable, group: Group) -> Verdict:
        """Run a call once, with its backward in training, and compare it with the reference."""
        context, weights = runnable.forward()
        results = {"context": context.detach()[self.rows]}
        if weights is not None or group != "peer":  # some peers return a context alone
            results["weights"] = weights.detach()[self.rows]
        verdicts = [self._judge(name, result, group) for name, result in results.items()]
        # A context of the wrong shape has no gradient; its own verdict says what is wrong.
        if self._gradients and all(math.isfinite(verdict.worst) for verdict in verdicts):
            grad = torch.zeros_like(self._inputs.grad_context)
            grad[self.rows] = self._inputs.grad_context[self.rows]
            for i, found in enumerate(torch.autograd.grad(context, runnable.leaves, grad)):
                checked = found[self.rows] if found.dim() == 3 else found
                verdicts.append(self._judge(f"gradient {i}", checked, group))
        return max(verdicts, key=lambda verdict: verdict.worst)

    def checked(self, provider: Provider) -> tuple[Callable[[], Any], Verdict]:
        """A provider's call as it will be timed, and the verdict on it."""
        runnable = provider.build(self._task, self._inputs)
        verdict = self.check(runnable, provider.group)
        return prepare(runnable, self._gradients, self._inputs.grad_context), verdict

    def _judge(self, name: str, result: Tensor, group: Group) -> Verdict:
        exact = self._exact[name]
        if result.shape != exact.shape:
            return Verdict(False, math.inf, f"{name} has shape {tuple(result.shape)}")
        if result.dtype != self._inputs.keys.dtype:
            return Verdict(False, math.inf, f"{name} has dtype {result.dtype}")
        error, largest = parity.error(result, exact), float(exact.abs().max())
        allowed = BASELINE_TOLERANCE * largest
        if group == "ours":
            eager = parity.error(self._eager[name], exact)
            allowed = parity.allowed(eager, largest, result.dtype)
            allowed += GRANTED * parity.error(self._rounded[name], exact)
        worst = error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)
        return Verdict(worst <= 1, worst, name)

    @functools.cached_property
    def _rounded(self) -> dict[str, Tensor]:
        """The exact results of products that are rounded once."""
        return self._compute(torch.float64, rounded=True)

    def _compute(self, dtype: torch.dtype, rounded: bool = False) -> dict[str, Tensor]:
        """The reference on the checked rows, all of them at once."""
        inputs = self._inputs

        def cut(tensor: Tensor) -> Tensor:
            rows = tensor[self.rows] if tensor.dim() == 3 else tensor
            return rows.detach().to(dtype).requires_grad_(self._gradients)

        lens = None if inputs.valid_lens is None else inputs.valid_lens[self.rows]
        leaves = tuple(cut(leaf) for leaf in inputs.leaves(self._task))
        scorer = rounded_products(leaves[-1], inputs.keys.dtype) if rounded else leaves[-1]
        with torch.set_grad_enabled(self._gradients):
            if self._task in ("projected", "scan"):
                context, weights = reference.attend(*leaves[:3], scorer, lens)
            else:
                query, *source, w_q, w_k, _ = leaves
                given = source[0], source[-1], w_q, w_k, scorer, lens  # one where values is keys
                loops = self._task == "loop"

                def call(query: Tensor) -> tuple[Tensor, Tensor]:
                    return reference.additive_attention(query, *given)

                context, weights = decode(call, query) if loops else call(query)
        results = {"context": context.detach(), "weights": weights.detach()}
        if self._gradients:
            grad = inputs.grad_context[self.rows].to(dtype)
            for i, gradient in enumerate(torch.autograd.grad(context, leaves, grad)):
                results[f"gradient {i}"] = gradient
        return results


def rounded_products(w_v: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A layer in the place of w_v, (1,H) or (H,): each product moved by up to a rounding.

    The rounding is that of sums, which of half types are fp32.
    """
    step = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    generator = torch.Generator(w_v.device).manual_seed(0)

    def layer(hidden: Tensor) -> Tensor:
        moved = torch.empty_like(hidden).uniform_(1 - step, 1 + step, generator=generator)
        return (hidden * moved) @ w_v.reshape(-1, 1)

    return layer
