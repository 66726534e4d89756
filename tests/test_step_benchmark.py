"""One decoder step under pytest-benchmark: ``pytest tests/test_step_benchmark.py``, on a GPU too.

pytest-benchmark shows one figure at a time, draws its histogram and compares saved runs. Ratios
between providers come from ``make bench``, which takes turns. Where tests run side by side
(``make test``), each step is checked and called once.
"""

import pytest
import torch

from benchmarks.cases import STEPS_ON_MEMORY
from benchmarks.contestants.parity import Oracle
from benchmarks.contestants.registry import by_name
from benchmarks.gpu.stages import GpuCase, inputs_of
from benchmarks.measure import synchronize

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("provider", ["d2l eager", "rewrite eager", "ours memory"])
@pytest.mark.parametrize("shape", STEPS_ON_MEMORY, ids=lambda shape: shape.name)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_on_a_memory(benchmark, device, shape, provider):
    where, chosen = torch.device(device), by_name(provider)
    inputs = inputs_of(GpuCase("auto", shape, "step", "float32"), where)
    benchmark.group = f"{shape}, {device}"
    with torch.no_grad():
        runnable = chosen.build("step", inputs)
        assert Oracle(inputs, shape, "step", False).check(runnable, chosen.group).passed

        def step():
            results = runnable.forward()
            synchronize(where)
            return results

        context, weights = benchmark.pedantic(step, rounds=20, warmup_rounds=2)
    assert context.shape == (shape.batch, 1, shape.value_size)
    assert weights.sum(-1).sub(1).abs().max() < 1e-5
