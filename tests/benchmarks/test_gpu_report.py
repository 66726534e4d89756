"""The GPU report where there is no GPU: what it says, and rows that crash, hang or raise."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_report, page
from benchmarks.gpu import isolation

ROOT = Path(__file__).resolve().parents[2]


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


# ---- rows that fail ------------------------------------------------------------------------------

# Rows of a stage, as its module would have them; each good one tells its process.
PLANTED = """
import ctypes, os, subprocess, sys, time, types
from benchmarks.timing.worker import Row

def good():
    return {"process": os.getpid(), "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}

def hangs():
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, file=open(os.environ["PLANTED_PIDS"], "a"))
    time.sleep(600)

def bad_access():  # the GPU fails later calls too: no further row may use this process
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    return {}

def chatty():
    print("{this is no answer}")
    os.write(1, b"nor this\\n")
    return {"process": os.getpid()}

FAILING = {
    "crash": lambda: ctypes.string_at(0),
    "hang": hangs,
    "leaves": lambda: os._exit(0),
    "bad access": bad_access,
    "raises": lambda: 1 / 0,
    "no json": lambda: {"set": {1}},
}

def every(device):
    rows = [Row("first", 60, good)]
    for name, compute in FAILING.items():
        rows += [Row(name, 1.5, compute), Row(f"after {name}", 60, good)]
    return [*rows, Row("chatty", 60, chatty)]

def slow(device):
    return [Row("quick", 60, good), Row("slow", 600, hangs), Row("never", 60, good)]

def broken(device):
    raise OSError("no such driver")

def two(device):
    return [Row("one", 60, good), Row("two", 60, good)]

def meets():  # a row that another process's row has to join
    pids = os.environ["PLANTED_PIDS"]
    print(os.getpid(), file=open(pids, "a"))
    while len(open(pids).read().split()) < 2:
        time.sleep(0.05)
    return good()

def joined(device):
    return [Row("one", 60, meets), Row("two", 60, meets)]

def machine(device):
    return [Row("machine", 60, lambda: {"gpu": "Planted X1, 7 multiprocessors"})]
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The planted module where worker processes find it; gives the pids of what they started."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    pids = tmp_path / "pids"
    monkeypatch.setenv("PLANTED_PIDS", str(pids))
    return pids


def is_there(pid):
    """Whether a process still runs; one that is dead and not waited for does not.

    One that was killed may take a moment to go.
    """
    end = time.monotonic() + 5
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > end:
                return True
            time.sleep(0.05)
    return False


def rows_of(function, seconds, workers=1):
    found = []
    source, end = f"planted:{function}", time.monotonic() + seconds
    isolation.Stage(source, end, found.append, "cuda").run(workers)
    return {row.pop("row"): row for row in found}


def test_a_row_that_crashes_hangs_or_raises_costs_that_row_alone(planted):
    found = rows_of("every", 100)
    problems = {name: row["problem"] for name, row in found.items() if "problem" in row}
    assert problems == {
        "crash": "the process died of SIGSEGV",
        "hang": "not done in 1.5 s",
        "leaves": "the process ended with 0",
        "bad access": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "raises": "ZeroDivisionError: division by zero",
        "no json": "TypeError: Object of type set is not JSON serializable",
    }
    processes = {name: row["process"] for name, row in found.items() if "process" in row}
    assert list(processes) == ["first", *(f"after {name}" for name in problems), "chatty"]
    # A fresh process where the one before is gone or not to be trusted, and only there.
    went_on = {n for n in problems if processes[f"after {n}"] == before(processes, f"after {n}")}
    assert went_on == {"raises", "no json"}
    (child,) = map(int, planted.read_text().split())
    assert not is_there(child)
    # Each process compiles into a folder of its own, which goes with it.
    caches = {row["process"]: row["cache"] for row in found.values() if "cache" in row}
    assert len(set(caches.values())) == len(caches) > 1
    assert not any(map(os.path.exists, caches.values()))


def before(processes, name):
    names = list(processes)
    return processes[names[names.index(name) - 1]]


def test_a_stage_ends_in_time_and_says_what_it_left_out(planted):
    start = time.monotonic()
    found = rows_of("slow", 10)
    assert 10 <= time.monotonic() - start < 10 + 5
    assert "process" in found["quick"]
    assert found["slow"]["problem"] == "stopped: the time of the stage was up"
    assert found["never"] == {"not run": "the time of the stage was up"}
    (child,) = map(int, planted.read_text().split())
    assert not is_there(child)


def test_a_process_that_cannot_start_is_told_of_once(planted):
    (start,) = rows_of("broken", 30).items()
    assert start[0] == "start"
    assert start[1]["problem"] == "OSError: no such driver"


def test_several_processes_share_the_rows(planted):
    found = rows_of("joined", 60, workers=2)
    assert len({row["process"] for row in found.values()}) == 2


def test_a_report_with_failing_stages_has_everything_else(planted, tmp_path, monkeypatch, capsys):
    out, seconds = tmp_path / "out", {"broken": 30, "every": 60, "two": 20}
    monkeypatch.setattr(gpu_report, "ROWS", "planted")
    monkeypatch.setattr(gpu_report, "STAGES", {n: gpu_report.Stage(s) for n, s in seconds.items()})
    monkeypatch.setattr(gpu_report, "OURS", ("every",))
    assert gpu_report.main(["--out", str(out), "--stage", *seconds, "--only", "o"]) == 1
    (path,) = out.iterdir()
    assert path.name.startswith("planted-x1-20")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["stage"] for line in lines][:2] == ["machine", "broken"]
    said = capsys.readouterr().out
    assert "broken: start: PROBLEM: OSError: no such driver" in said
    failed = [n["row"] for n in lines if n["stage"] == "every" and "problem" in n]
    assert failed == ["no json"]
    assert "1 of ours not right" in said
    (report,) = gpu_report.reports(out)
    assert report["machine"]["gpu"] == "Planted X1, 7 multiprocessors"
    assert [line["row"] for line in report["rows"] if line["stage"] == "two"] == ["one", "two"]


def test_an_interrupted_report_leaves_no_process(planted, tmp_path):
    """A make that is stopped must not leave a process on the GPU."""
    code = (
        "import signal, sys, time; from benchmarks.gpu import isolation\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "isolation.Stage('planted:slow', time.monotonic() + 60, print, 'cuda').run()"
    )
    report = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (planted.exists() and planted.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    report.terminate()
    assert report.wait(20) == 143
    assert not is_there(int(planted.read_text()))


def test_the_stages_fit_in_ten_minutes():
    first = sum(gpu_report.STAGES[name].seconds for name in gpu_report.FIRST)
    spent = gpu_report.BUILD_SECONDS + gpu_report.MACHINE_SECONDS + first
    assert spent <= gpu_report.TOTAL_SECONDS < 600 - 15  # the last one's processes are ended
    ends = gpu_report.deadlines(gpu_report.FIRST, 1000.0)
    assert ends == [1320.0, 1430.0, 1500.0, 1580.0]
    assert gpu_report.deadlines(["parity"], 0.0) == [gpu_report.TOTAL_SECONDS]
    makefile = (ROOT / "Makefile").read_text()
    assert f"timeout {gpu_report.BUILD_SECONDS:.0f} " in makefile


def test_real_rows_on_the_cpu(tmp_path, monkeypatch):
    stages = {name: gpu_report.Stage(250) for name in ("smoke", "parity")}
    monkeypatch.setattr(gpu_report, "STAGES", stages)
    monkeypatch.setattr(gpu_report, "TOTAL_SECONDS", 700)
    only = ["--only=, float32", "--only=cpu: ", "--only=no lens"]
    given = ["--device", "cpu", "--out", str(tmp_path), "--stage", *stages, *only]
    assert gpu_report.main(given) == 0
    (report,) = gpu_report.reports(tmp_path)
    (row,) = report["rows"]
    assert (row["stage"], row["row"]) == ("parity", "cpu: no lens, float32")
    assert row["passed"]
    assert 0 < row["worst"] <= 1


def test_the_table_has_who_by_call():
    times = {"called": {"median": 3e-6}, "graph": {"median": 2e-6}, "cold": {"median": 4e-6}}
    rows = [
        {"stage": "time", "row": "cuda: step", **times},
        {"stage": "compiled", "row": "JAX jit: step", "called": {"median": 5e-5}, "passed": False},
        {"stage": "time", "row": "kernels of cuda: step", "kernels": {}},
        {"stage": "plans", "row": "plans of step, triton: step", **times},
    ]
    head, _, line = gpu_report.table(rows)
    assert head == "| case | JAX jit | cuda |"
    assert line == "| step | 50.0 / - / -, wrong | 3.0 / 2.0 / 4.0 |"
    machine = {"gpu": "Planted X1", "torch": "2.11.0", "commit": "abc"}
    text = page.page([], [], [{"machine": machine, "rows": rows}])
    assert "## Planted X1\n\ntorch 2.11.0, commit abc.\n" in text
    assert line in text
