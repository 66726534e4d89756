"""The GPU report where there is no GPU: it says so, and what it would run works on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.contestants.providers import by_name
from benchmarks.timing.measure import Stopwatch, captured, read_bandwidth
from benchmarks.workloads.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = Shape("tiny", 2, 1, 5, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["make", "gpu-report"], ["-m", "benchmarks.gpu_report"]])
def test_without_a_gpu_it_is_one_line_and_exit_code_2(command, tmp_path):
    if command[0] == "make":
        command = [*command, f"PYTHON={sys.executable}", f"OUT={tmp_path}"]
    else:
        command = [sys.executable, *command, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1
    assert lines[0].startswith("gpu-report: no ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "case",
    [
        gpu_report.GpuCase(TINY, "step", dtype="float32"),
        gpu_report.GpuCase(TINY, "projected", True),
        gpu_report.GpuCase(TINY, "full", dtype="float16"),
    ],
    ids=str,
)
def test_a_row_on_the_cpu(case):
    row = gpu_report.measure(case, Stopwatch(CPU, rounds=2), {"read": 1e10, "copy": 1e10})
    ours = [name for name in row["called"] if name.startswith("ours")]
    assert ours
    assert "d2l eager" in row["called"]
    for median, low, high in row["called"].values():
        assert 0 < low <= median <= high
    assert row["skipped"][f"{ours[0]}, graph"] == "no GPU"
    (head, _, line) = gpu_report.table([row])
    assert head.count("|") == line.count("|")
    assert f"{1e6 * row['called'][ours[0]][0]:.1f} / - / -" in line


def test_a_provider_on_another_backend():
    case = gpu_report.GpuCase(TINY, "projected", dtype="float32")
    inputs = gpu_report._inputs(case, CPU)
    ours = gpu_report.beside(by_name("ours op"), "reference")
    assert ours.name == "ours op, reference"
    (got, _), (want, _) = (
        p.build("projected", inputs).forward() for p in (ours, by_name("ours op"))
    )
    torch.testing.assert_close(got, want)


def test_every_case_names_a_task_its_providers_have():
    cases = gpu_report.cases()
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        names = [provider.name for provider in gpu_report._providers(case)]
        assert any(name.startswith("ours") for name in names), case
        assert set(case.rivals) <= set(names), case


def test_roofs_and_capture_on_the_cpu(monkeypatch):
    roofs = read_bandwidth(Stopwatch(CPU, rounds=2))
    assert roofs["read"] > 0
    assert roofs["copy"] > 0
    assert captured(lambda: None) == "no GPU"


def test_the_file_is_named_after_gpu_and_day(tmp_path):
    report = {"machine": {"gpu": "NVIDIA H200, 132 multiprocessors"}}
    path = gpu_report.write(report, tmp_path)
    assert path.name.startswith("nvidia-h200-20")
    assert json.loads(path.read_text()) == report


def test_a_part_that_fails_or_hangs_is_reported():
    assert gpu_report._run([sys.executable, "-c", "raise SystemExit(3)"], 20)["exit"] == 3
    slow = gpu_report._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert slow["problem"] == "not done in 0 s"
