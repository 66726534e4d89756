"""The same providers under pytest-benchmark: ``pytest benchmarks --benchmark-only``.

For one figure at a time, its histogram, and comparison between saved runs. Ratios that are to be
believed come from ``python -m benchmarks``, which interleaves. ``BENCH_SHAPES=all`` takes the
whole list, ``BENCH_SHAPES=ocr,speech`` some of it.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .contestants.parity import Oracle
from .contestants.providers import PROVIDERS, Provider, Unavailable, eager_too_large
from .timing.measure import prepare
from .workloads.inputs import Inputs, draw
from .workloads.shapes import LIST, QUICK, Shape

WANTED = os.environ.get("BENCH_SHAPES", ",".join(QUICK)).split(",")
SHAPES = [shape for shape in LIST if shape.name in WANTED or WANTED == ["all"]]
ROWS = [
    pytest.param(shape, task, train, provider, id=f"{shape.name}-{task}-{kind}-{provider.name}")
    for shape in SHAPES
    for task, train, kind in (
        ("full", False, "forward"),
        ("full", True, "train"),
        ("step", False, "forward"),
    )
    for provider in PROVIDERS
    if task in provider.builders
    and not provider.on_demand
    and not (train and shape.forward_only)
    and not (provider.group == "eager" and eager_too_large(shape))
]


@functools.lru_cache(maxsize=1)
def _inputs(shape: Shape) -> Inputs:
    inputs = draw(shape)
    inputs.require_grad(True)
    return inputs


@functools.lru_cache(maxsize=1)
def _oracle(shape: Shape, task: str, train: bool) -> Oracle:
    return Oracle(_inputs(shape), shape, task, train)


@pytest.mark.parametrize(("shape", "task", "train", "provider"), ROWS)
def test_attention(
    benchmark: BenchmarkFixture, shape: Shape, task: str, train: bool, provider: Provider
) -> None:
    inputs = _inputs(shape)
    benchmark.group = f"{shape} {task} {'forward + backward' if train else 'forward'}"
    with torch.set_grad_enabled(train):
        try:
            runnable = provider.build(task, inputs)
        except Unavailable as reason:
            pytest.skip(str(reason))
        verdict = _oracle(shape, task, train).check(runnable, provider.group, train)
        assert verdict.passed, f"{verdict.where}: {verdict.worst:.3g} of the allowed error"
        benchmark(prepare(runnable, train, inputs.grad_context))
