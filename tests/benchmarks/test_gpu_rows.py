"""What rows of the GPU report compute, on the CPU and in Triton's interpreter."""

import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from fresh import ROOT, python
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu_report
from benchmarks.cases import Shape
from benchmarks.contestants.registry import by_name
from benchmarks.gpu import stages
from benchmarks.gpu.stages import GpuCase
from benchmarks.measure import GpuCall, captured, interleave

CPU = torch.device("cpu")
TINY = Shape("tiny", 2, 1, 5, 8)


CASES = [
    GpuCase("cpu", TINY, "step", "float32"),
    GpuCase("reference", TINY, "projected", train=True),
    GpuCase("cpu", TINY, "full", "float16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_of_ours_is_checked_and_timed(case):
    row = stages.timed(case, stages.subject(case), CPU)
    assert row["passed"]
    assert 0 < row["worst"] <= 1
    assert 0 < row["called"]["p20"] <= row["called"]["median"] <= row["called"]["p80"]
    assert row["no graph"] == "no GPU"
    assert all(launches > 0 <= us for launches, us in row["kernels"].values())
    if case.backend == "cpu" and case.task == "full":
        (named,) = [n for n in row["kernels"] if n.startswith("bahdanau_fast::")]
        assert row["kernels"][named][0] == 1


def test_what_a_call_has_to_move():
    # Queries, keys, values and w_v; twice and their gradients, or context and weights.
    read = 4 * (2 * 8 + 2 * 2 * 5 * 8 + 8)
    case = GpuCase("cpu", TINY, "projected", "float32")
    assert stages.timed(case, by_name("ours op"), CPU)["bytes"] == read + 4 * 2 * (8 + 5)
    assert stages.timed(replace(case, train=True), by_name("ours op"), CPU)["bytes"] == 3 * read


LENS = replace(TINY, lens="drawn")
FORMS = [
    ("W_q in front", GpuCase("cpu", TINY, "step", "float32")),
    ("ours, masked", GpuCase("cpu", LENS, "full", "float32", True)),
    ("d2l fused", GpuCase("cpu", LENS, "full", "float32", True)),
    ("ours compiled", GpuCase("cpu", TINY, "full", "float32")),
]


@pytest.mark.parametrize(("name", "case"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_ours_as_users_meet_it_is_right(name, case):
    assert stages.built(case, by_name(name), CPU)["passed"]


def test_every_row_has_a_name():
    for stage in gpu_report.STAGES:
        names = [row.name for row in getattr(stages, stage)("cpu")]
        assert names
        assert len(set(names)) == len(names)


class Names(TorchDispatchMode):
    """Takes down which operators are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.name())
        return func(*args, **(kwargs or {}))


def test_a_sanitizer_sees_nothing_of_the_reference(capsys):
    names = Names()
    names.found = set()
    with names:
        stages.main("cpu", "float32", "cpu")
    shapes = [shape.name for shape, *_ in stages.SMALL]
    assert re.findall(r"cpu: (small-\w+) ", capsys.readouterr().out) == shapes
    assert {"bahdanau_fast::attention", "bahdanau_fast::attention_backward"} <= names.found
    assert not re.search("masked_fill|tanh|softmax", " ".join(names.found))


@pytest.mark.parametrize("kind", ["right", "a little off", "not written"])
def test_a_wrong_result_is_wrong(kind, monkeypatch):
    case, ours = GpuCase("cpu", TINY, "projected", "float32"), by_name("ours op")
    built = ours.build("projected", stages.inputs_of(case, CPU))
    results = {
        "right": built.forward,
        "a little off": lambda: [tensor * 1.00001 for tensor in built.forward()],
        "not written": lambda: (torch.empty(2, 1, 8), torch.empty(2, 1, 5)),
    }
    changed = replace(built, forward=results[kind])
    provider = replace(ours, builders={"projected": lambda _: changed})
    monkeypatch.setattr(stages, "subject", lambda _: provider)
    result = stages.poisoned(case, CPU)
    assert (
        gpu_report.right(result) == result["passed"] == (result["worst"] <= 1) == (kind == "right")
    )
    assert math.isinf(result["worst"]) == (kind == "not written")
    assert not torch.are_deterministic_algorithms_enabled()


# In Triton's interpreter, which has to be asked for before anything is imported; it knows neither
# tanh of the library nor that of the hardware.
INTERPRETED = """
import json
import torch, triton
import triton.language as tl
from benchmarks.contestants import expert
from benchmarks.contestants.registry import by_name
from benchmarks import measure
from benchmarks.gpu import stages
from benchmarks.gpu.stages import GpuCase
from benchmarks.cases import Shape

@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr):
    return 2 / (1 + tl.exp(-2 * x)) - 1

measure.GPU_SECONDS, expert._tanh = 1e-3, tanh
beam, cpu = Shape("beam", 2, 4, 100, 16, lens="drawn"), torch.device("cpu")
ours = GpuCase("triton", beam, "projected")
print(json.dumps(stages.timed(ours, stages.subject(ours), cpu)))
for train in (False, True):
    case = GpuCase("auto", beam, "projected", train=train)
    print(json.dumps(stages.built(case, by_name("expert"), cpu)))
"""


def test_rows_in_the_interpreter(tmp_path):
    file = tmp_path / "interpreted.py"
    file.write_text(INTERPRETED)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = python("-W", "ignore", str(file), cwd=ROOT, PYTHONPATH=path, TRITON_INTERPRET="1")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    assert all(row["passed"] for row in rows), rows


def test_a_gpus_calls_are_timed_in_turns_as_all_others_are():
    assert captured(lambda: None) == "no GPU"
    calls = {"called": GpuCall(lambda: None, CPU), "cold": GpuCall(lambda: None, CPU, cold=True)}
    timings = interleave(calls, 0.05)
    assert len(timings.samples["called"]) >= 5
    assert all(spread["median"] > 0 for spread in timings.packed().values())
    assert stages.copy_rate(CPU)["bytes per second, copy"] > 0


@pytest.mark.parametrize(("value", "same"), [(1.0, True), (None, False), (1.0000001, False)])
def test_a_graph_that_writes_nothing_or_other_bits_is_found(value, same):
    kept = torch.ones(3), None

    def replay():
        if value is not None:
            kept[0].fill_(value)
        return kept

    assert stages.repeats_bits(lambda: (torch.ones(3), None), replay) == same
