"""The parity check: a call is timed only after its result has been checked.

The reference in fp64 is the oracle. Ours must keep the parity rule of DESIGN section 2,

    max|ours - ref64| <= 2 * max|eager - ref64| + atol,  atol = two roundings of the result,

for context, weights and every gradient; eager is the reference in the tested dtype. It runs on a
few rows, so that its sums are cut otherwise than those of a call; GRANTED is for that. A baseline
may differ by 1e-3 of the largest value: a hundred times the worst rounding error of an fp32 sum of
these sizes, and far less than any wrong term.

Large shapes are checked on evenly spread batch rows. The gradient of the context is zero on the
other rows, so that the weight gradients are sums over the checked rows alone. The checked call is
the one that is timed afterwards.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bahdanau_fast import parity, reference

from ..cases import DECODE_STEPS, Inputs, Shape, draw
from ..worker import Worker
from . import Group, Provider, Runnable, decode

# Elements of (B,Tq,Tk,H) that the oracle computes at most, in fp64 and in the tested dtype.
CHECKED_ELEMENTS = 16_000_000
BASELINE_TOLERANCE = 1e-3

# What the rule grants to the order of a sum. A gradient is a sum of many products, and eager's
# error is that of one order of adding them. A library picks it by the shape: cut finely, a sum
# adds little to the roundings of its products, and a right result in another order would not be
# within twice the error. Products of both signs add up to about sqrt(k) of them after k
# additions, each of which rounds what is there: a run of RUN additions has the variance of RUN /
# 2 roundings of each product, and adding up the runs less than that. So here, where eager's sums
# are cut otherwise than those of the calls, the rule has sqrt(RUN / 2) times what the exact
# result changes by if each product of a score and of its gradient is rounded once, in no less
# than fp32, as sums are. A single run of 40 000 has 35 times as much, and breaks the rule.

# Additions one after the other that a right sum may have.
RUN = 32
# Times what :func:`rounded_products` changes the exact result by.
GRANTED = math.sqrt(RUN / 2)


@dataclass(frozen=True)
class Verdict:
    """Whether a result passed; its worst quantity, and the error of that over the allowed error."""

    passed: bool
    worst: float
    where: str


def checked_call(
    source: str, name: str, task: str, shape: dict[str, Any], mode: str
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What a worker makes: a call of a provider in ``source.PROVIDERS``, and the verdict on it."""
    providers = {each.name: each for each in importlib.import_module(source).PROVIDERS}
    torch.set_grad_enabled(mode != "forward")  # for the timed calls too
    inputs = draw(Shape(**shape))
    inputs.require_grad(mode != "forward")
    oracle = Oracle(inputs, Shape(**shape), task, mode == "train")
    call, verdict = oracle.checked(providers[name], task, mode == "train")
    return call, asdict(verdict)


def build_in(
    worker: Worker, source: str, provider: str, task: str, shape: Shape, mode: str = "forward"
) -> Verdict:
    """Let a process build the call that it will time, and check its parity; or WorkerError."""
    given = (source, provider, task, asdict(shape), mode)
    return Verdict(**worker.make(__name__, checked_call.__name__, *given))


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
        exact = self._compute(task, torch.float64, gradients)
        eager = self._compute(task, inputs.keys.dtype, gradients)
        self._exact = exact
        self._eager_error = {name: parity.error(eager[name], exact[name]) for name in exact}

    def grad_context(self) -> Tensor:
        """The gradient of the checked call's context: zero on rows that are not checked."""
        masked = torch.zeros_like(self._inputs.grad_context)
        masked[self.rows] = self._inputs.grad_context[self.rows]
        return masked

    def check(self, runnable: Runnable, group: Group, train: bool) -> Verdict:
        """Run a call once, with its backward if ``train``, and compare it with the reference."""
        context, weights = runnable.forward()
        results = {"context": context.detach()[self.rows]}
        if weights is not None or group != "peer":  # some peers return a context alone
            results["weights"] = weights.detach()[self.rows]
        verdicts = [self._judge(name, result, group) for name, result in results.items()]
        # A context of the wrong shape has no gradient; its own verdict says what is wrong.
        if train and all(math.isfinite(verdict.worst) for verdict in verdicts):
            gradients = torch.autograd.grad(context, runnable.leaves, self.grad_context())
            for i, gradient in enumerate(gradients):
                per_row = gradient.dim() == 3
                checked = gradient[self.rows] if per_row else gradient
                verdicts.append(self._judge(f"gradient {i}", checked, group))
        return max(verdicts, key=lambda verdict: verdict.worst)

    def checked(
        self, provider: Provider, task: str, train: bool
    ) -> tuple[Callable[[], Any], Verdict]:
        """A provider's call as it will be timed, and the verdict on it."""
        runnable = provider.build(task, self._inputs)
        verdict = self.check(runnable, provider.group, train)
        return prepare(runnable, train, self._inputs.grad_context), verdict

    def _judge(self, name: str, result: Tensor, group: Group) -> Verdict:
        exact = self._exact[name]
        if result.shape != exact.shape:
            return Verdict(False, math.inf, f"{name} has shape {tuple(result.shape)}")
        if result.dtype != self._inputs.keys.dtype:
            return Verdict(False, math.inf, f"{name} has dtype {result.dtype}")
        error, largest = parity.error(result, exact), float(exact.abs().max())
        allowed = BASELINE_TOLERANCE * largest
        if group == "ours":
            allowed = parity.allowed(self._eager_error[name], largest, result.dtype)
            allowed += GRANTED * parity.error(self._rounded[name], exact)
        worst = error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)
        return Verdict(worst <= 1, worst, name)

    @functools.cached_property
    def _rounded(self) -> dict[str, Tensor]:
        """The exact results of products that are rounded once."""
        return self._compute(self._task, torch.float64, self._gradients, rounded=True)

    def _compute(
        self, task: str, dtype: torch.dtype, gradients: bool, rounded: bool = False
    ) -> dict[str, Tensor]:
        """The reference on the checked rows, all of them at once."""
        inputs = self._inputs

        def scorer(w_v: Tensor) -> Any:
            return rounded_products(w_v, inputs.keys.dtype) if rounded else w_v

        def cut(tensor: Tensor) -> Tensor:
            rows = tensor[self.rows] if tensor.dim() == 3 else tensor
            return rows.detach().to(dtype).requires_grad_(gradients)

        lens = None if inputs.valid_lens is None else inputs.valid_lens[self.rows]
        leaves = tuple(cut(leaf) for leaf in inputs.leaves(task))
        with torch.set_grad_enabled(gradients):
            if task in ("projected", "scan"):
                query, key, value, w_v = leaves
                context, weights = reference.attend(query, key, value, scorer(w_v), lens)
            else:
                query, *source, w_q, w_k, w_v = leaves
                keys, values = source[0], source[-1]  # one leaf where values is keys
                layer = scorer(w_v)

                def step(query: Tensor) -> tuple[Tensor, Tensor]:
                    return reference.additive_attention(query, keys, values, w_q, w_k, layer, lens)

                context, weights = decode(step, query) if task == "loop" else step(query)
        results = {"context": context.detach(), "weights": weights.detach()}
        if gradients:
            grad = inputs.grad_context[self.rows].to(dtype)
            for i, gradient in enumerate(torch.autograd.grad(context, leaves, grad)):
                results[f"gradient {i}"] = gradient
        return results


def rounded_products(w_v: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A layer in the place of w_v for the reference: each product moved by up to a rounding.

    Args:
        w_v: (1,H) or (H,).
        dtype: that is tested; of half types, sums are fp32.
    """
    step = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    generator = torch.Generator(w_v.device).manual_seed(0)

    def layer(hidden: Tensor) -> Tensor:
        moved = torch.empty_like(hidden).uniform_(1 - step, 1 + step, generator=generator)
        return (hidden * moved) @ w_v.reshape(-1, 1)

    return layer
