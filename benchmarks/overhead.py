"""The cost of a call besides its arithmetic: ours, eager code, and a plain autograd.Function.

Run ``python -m benchmarks.overhead [--json FILE] [--seconds S]``: fp32, the smallest shape of the
course, in turns, medians. "forward, grad" records a graph; "and backward" runs it too. The plain
Function calls the same operator and saves what its backward needs, as in PyTorch's tutorial.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bahdanau_fast as bf
from bahdanau_fast.memory.shapes import finish
from bahdanau_fast.ops import whole

from .contestants.baselines import CourseAttention
from .printing.tables import markdown
from .timing.machine import save
from .timing.measure import interleave

SIZES = B, TQ, TK, H = 2, 1, 10, 8
_ops = torch.ops.bahdanau_fast


class PlainFunction(torch.autograd.Function):
    """The operator in a Function as the tutorial writes it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        context, *saved = _ops.additive_attention(*inputs[:6], None, inputs[6], None, 0.0)
        ctx.save_for_backward(*inputs, *saved)
        return context, saved[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = (*saved[:6], None, saved[6], None, 0.0)
        found = _ops.additive_attention_backward(*inputs, *saved[7:], *grads)
        return (*found[:6], None)


def calls(lens: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name to a call that gives the context."""
    torch.manual_seed(0)
    ours = bf.AdditiveAttention(H, H, H)
    weights = ours.W_q.weight, ours.W_k.weight, ours.w_v.weight
    course = CourseAttention(H, H, H)
    course.load_state_dict(ours.state_dict())
    q, k, v = torch.randn(B, TQ, H), torch.randn(B, TK, H), torch.randn(B, TK, H)
    inputs = (q, k, v, *weights)

    def op() -> Tensor:
        records = torch.is_grad_enabled()
        context, weights, link = whole.attend(inputs, None, lens, None, 0.0, records)
        return finish(context, weights, None, link)[0]

    return {
        "our module": lambda: ours(q, k, v, lens),
        "our function": lambda: bf.additive_attention(*inputs, lens)[0],
        "our op": op,
        "plain autograd.Function": lambda: PlainFunction.apply(*inputs, lens)[0],
        "eager course module": lambda: course(q, k, v, lens),
    }


def measure(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Task to name to microseconds: median, p20, p80."""
    named = calls(torch.tensor([2, 6]))
    grad = torch.ones(B, TQ, H)
    want = named["eager course module"]()
    for call in named.values():
        torch.testing.assert_close(call(), want, rtol=1e-4, atol=1e-5)
    found = {}
    for task in ("forward, no grad", "forward, grad", "and backward"):
        timed: dict[str, Callable[[], Any]] = dict(named)
        if task == "and backward":
            timed = {name: lambda call=call: call().backward(grad) for name, call in named.items()}
        with torch.set_grad_enabled(task != "forward, no grad"):
            for call in timed.values():
                call()
            spreads = interleave(timed, seconds).packed()
        found[task] = {
            name: {part: 1e6 * time for part, time in spread.items()}
            for name, spread in spreads.items()
        }
    return found


def lines(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """The result of :func:`measure` as a Markdown table."""
    text = "{median:.1f} ({p20:.1f}-{p80:.1f})"
    cells = [
        [name, *(text.format(**of_task[name]) for of_task in found.values())]
        for name in next(iter(found.values()))
    ]
    return markdown(["microseconds", *found], cells)


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description="Cost of a call.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each of three tasks")
    arguments = parser.parse_args()
    found = measure(arguments.seconds)
    print("\n".join(lines(found)))
    save(arguments.json, {"microseconds": found})


if __name__ == "__main__":
    main()
