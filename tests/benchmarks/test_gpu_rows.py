"""What the rows of the GPU report compute, on the CPU and in Triton's interpreter."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from fresh import ROOT, python

from benchmarks import gpu_report
from benchmarks.contestants.providers import by_name
from benchmarks.gpu import figures, stages
from benchmarks.gpu.figures import GpuCase
from benchmarks.timing.measure import GpuCall, captured, interleave
from benchmarks.workloads.shapes import SUBJECT, Shape

CPU = torch.device("cpu")
TINY = Shape("tiny", 2, 1, 5, 8)

CASES = [
    GpuCase("cpu", TINY, "step", "float32"),
    GpuCase("reference", TINY, "projected", train=True),
    GpuCase("cpu", TINY, "full", "float16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_of_ours_is_checked_and_timed(case):
    row = figures.times(case, figures.subject(case), CPU)
    assert row["passed"]
    assert 0 < row["worst"] <= 1
    assert 0 < row["called"]["p20"] <= row["called"]["median"] <= row["called"]["p80"]
    assert row["no graph"] == "no GPU"
    found = figures.kernels(case, CPU, calls=3)
    assert found["passed"]
    assert all(launches > 0 <= us for launches, us in found["kernels"].values())
    if case.backend == "cpu" and case.task == "full":
        (named,) = [n for n in found["kernels"] if n.startswith("bahdanau_fast::")]
        assert found["kernels"][named][0] == 1


def test_a_wrong_result_is_wrong(monkeypatch):
    case = GpuCase("cpu", TINY, "projected", "float32")
    right = figures.verdict(case, CPU)
    ours = by_name(SUBJECT["projected"])
    builders = {"projected": lambda inputs: ours.build("projected", inputs)}
    wrong = replace(ours, builders=builders)
    monkeypatch.setattr(figures, "subject", lambda _: wrong)
    assert figures.verdict(case, CPU) == right
    attend = ours.builders["projected"]

    def off(inputs):
        built = attend(inputs)
        return replace(built, forward=lambda: [x * 1.00001 for x in built.forward()])

    builders["projected"] = off
    result = figures.verdict(case, CPU)
    assert not result["passed"]
    assert result["worst"] > 1
    assert not gpu_report.right(result)


def test_smoke_finds_results_that_are_not_written(monkeypatch):
    case = GpuCase("cpu", TINY, "projected", "float32")

    def unwritten(inputs):
        empty = torch.empty(2, 1, 8), torch.empty(2, 1, 5)
        return replace(built, forward=lambda: empty)

    built = by_name("ours op").build("projected", figures.inputs_of(case, CPU))
    provider = replace(by_name("ours op"), builders={"projected": unwritten})
    monkeypatch.setattr(figures, "subject", lambda _: provider)
    result = figures.smoke(case, CPU)
    assert math.isinf(result["worst"])
    assert not torch.are_deterministic_algorithms_enabled()


# In Triton's interpreter, which has to be asked for before anything is imported.
INTERPRETED = """
import json, torch
from benchmarks.gpu import figures, stages
from benchmarks.gpu.figures import GpuCase
from benchmarks.workloads.shapes import Shape

cpu = torch.device("cpu")
figures.SECONDS = 1e-3
long = GpuCase("triton", Shape("long", 1, 1, 300, 16), "projected")
plans = figures.candidates(long, cpu, "step")["plans"]
print(json.dumps([plans, [row.name for row in stages.plans("cpu")]]))
"""


def test_plans_in_the_interpreter():
    done = python("-W", "ignore", "-c", INTERPRETED, cwd=ROOT, TRITON_INTERPRET="1")
    plans, names = json.loads(done.stdout)
    assert len(plans) >= 4
    assert len({plan.partition(": ")[2] for plan in plans}) == len(plans)
    assert all(figures["passed"] for figures in plans.values())
    assert any(name.startswith("plans of grad_tanh, triton: ") for name in names)


@pytest.mark.parametrize(
    ("said", "code", "passed"),
    [
        ("ERROR SUMMARY: 0 errors", 0, True),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("ERROR SUMMARY: 12 errors", 0, False),
        ("ERROR SUMMARY: 0 errors", 7, False),
        ("", 0, False),
    ],
)
def test_a_sanitizer_passes_by_its_exit_and_its_words(said, code, passed):
    words = [sys.executable, "-c", f"import sys; print('{said}'); sys.exit({code})"]
    result = stages._command(words, stages.CLEAN)
    assert (result["passed"], result["exit"]) == (passed, code)
    assert result["said"] == said.replace("\\n", "\n").splitlines() or [""]


# ---- timing on a GPU, of which this machine has none ---------------------------------------------


def test_a_gpus_calls_are_timed_in_turns_as_all_others_are():
    assert captured(lambda: None) == "no GPU"
    calls = {"called": GpuCall(lambda: None, CPU), "cold": GpuCall(lambda: None, CPU, cold=True)}
    timings = interleave(calls, 0.05)
    assert timings.rounds >= 5
    assert all(spread["median"] > 0 for spread in timings.packed().values())
    assert figures.floor(CPU)["bytes per second, read"] > 0


def test_a_graph_that_writes_nothing_or_other_bits_is_found():
    kept = torch.ones(3), None

    def replay(value):
        def run():
            if value is not None:
                kept[0].fill_(value)
            return kept

        return run

    assert figures.repeats_bits(lambda: (torch.ones(3), None), replay(1.0))
    assert not figures.repeats_bits(lambda: (torch.ones(3), None), replay(None))
    assert not figures.repeats_bits(lambda: (torch.ones(3), None), replay(1.0000001))
