"""The GPU report where there is no GPU: rows that crash, hang or raise."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fresh import ROOT, python

from bahdanau_fast.check.children import OVER
from benchmarks import gpu_report
from benchmarks.decoders import DROP_IN, FUSE, NONE, OURS, OWN
from benchmarks.gpu import EACH, Experiment, is_wrong, run

# What stands in for a torch that finds no GPU.
BLIND = """
from types import SimpleNamespace
__version__, version = "2.13.0+cu130", SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(is_available=lambda: False, is_initialized=lambda: False)
"""
MACHINE = ("-m", "benchmarks.machine")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for GPUs")
@pytest.mark.parametrize(
    ("command", "stub", "said"),
    [
        ([sys.executable, "-S", *MACHINE], None, "no torch: "),
        (
            [sys.executable, *MACHINE],
            BLIND,
            "no GPU: torch 2.13.0+cu130, built for 13.0, sees none",
        ),
        (
            ["make", "-s", "gpu-report", f"PYTHON={sys.executable}", "OUT={out}"],
            None,
            "a CPU torch",
        ),
        ([sys.executable, "-m", "benchmarks.gpu_report", "--out", "{out}"], None, "a CPU torch"),
    ],
)
def test_without_a_gpu_it_is_one_line_and_exit_code_2(command, stub, said, tmp_path):
    if stub:
        (tmp_path / "torch.py").write_text(stub)
    command = [part.replace("{out}", str(tmp_path / "out")) for part in command]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith(f"gpu-report: {said}")
    assert not (tmp_path / "out").exists()


# ---- rows that fail ------------------------------------------------------------------------------

# Rows of a stage, as its module would have them; each good one tells its process.
PLANTED = """
import ctypes, faulthandler, os, subprocess, time
import torch
from bahdanau_fast.check.children import say
from benchmarks.gpu import Row

faulthandler.disable()

def good():
    return {"process": os.getpid(), "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}

def hangs():
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, file=open(os.environ["PLANTED_PIDS"], "a"))
    print("the last launch", flush=True)
    time.sleep(600)

def bad_access():  # the GPU fails later calls too: no further row may use this process
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    return {}

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
    return rows

def slow(device):
    return [Row("quick", 60, good), Row("slow", 600, hangs), Row("never", 60, good)]

def broken(device):
    raise OSError("no such driver")

def meets():  # a row that another process's row has to join
    pids = os.environ["PLANTED_PIDS"]
    print(os.getpid(), file=open(pids, "a"))
    while len(open(pids).read().split()) < 2:
        time.sleep(0.05)
    return good()

def joined(device):
    return [Row("one", 60, meets), Row("two", 60, meets)]

def mixed(device):
    return [Row("one", 60, good), Row("raises", 60, FAILING["raises"]), Row("two", 60, good)]

def machine(device):
    said = {"gpu": "Planted X1, 7 multiprocessors", "cpu": "x", "cores": "2 (2 threads)"}
    say({"stage": "machine", "row": "machine", **said, "torch": "2.11.0", "commit": "abc"})

def one(number):
    say({"stage": "lab", "row": "one", "number": number})

def dies():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The planted module where forked processes find it; gives the pids of what they started."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pids = tmp_path / "pids"
    monkeypatch.setenv("PLANTED_PIDS", str(pids))
    return pids


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def rows_of(function, seconds, parts=1):
    found, source = [], f"planted:{function}"
    run(
        [
            Experiment(function, seconds, EACH, ("stage", source, "cuda", part, parts), True)
            for part in range(parts)
        ],
        *(seconds, found.append, parts),
    )
    return {row.pop("row"): row for row in found if row["stage"] == "stage"}


def test_a_row_that_crashes_hangs_or_raises_costs_that_row_alone(planted, tmp_path):
    found = rows_of("every", 100)
    problems = {name: row["problem"] for name, row in found.items() if "problem" in row}
    assert problems == {
        "crash": "its process died of SIGSEGV",
        "hang": "no answer within 1.5 s",
        "leaves": "its process left",
        "bad access": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "raises": "ZeroDivisionError: division by zero",
        "no json": "TypeError: Object of type set is not JSON serializable",
    }
    assert found["hang"]["said"] == ["the last launch"]
    processes = {name: row["process"] for name, row in found.items() if "process" in row}
    names = list(processes)
    assert names == ["first", *(f"after {name}" for name in problems)]
    # A fresh process where the one before is gone or not to be trusted, and only there.
    went_on = {b for a, b in pairwise(names) if processes[a] == processes[b]}
    assert went_on == {"after raises", "after no json"}
    (child,) = map(int, planted.read_text().split())
    assert not is_there(child)
    # A process after one that was killed compiles into a folder of its own.
    caches = {row["process"]: row["cache"] for row in found.values() if "cache" in row}
    assert caches[processes["first"]] == str(tmp_path)
    assert len(set(caches.values())) == len(caches) > 1


def test_several_processes_share_the_rows_and_what_they_compile(planted, tmp_path):
    found = rows_of("joined", 60, parts=2)
    assert len({row["process"] for row in found.values()}) == 2
    assert {row["cache"] for row in found.values()} == {str(tmp_path)}


def test_an_experiment_that_hangs_or_dies_costs_itself(planted):
    found = []
    experiments = [
        Experiment("hangs", 3, EACH, ("stage", "planted:slow", "cuda")),
        Experiment("one", 60, "planted:one", (1,)),
        Experiment("dies", 60, "planted:dies", beside=True),
        Experiment("raises", 60, "planted:broken", ("cuda",), beside=True),
        Experiment("two", 60, "planted:one", (2,)),
    ]
    run(experiments, 300, found.append, 2)
    ends = {row["row"]: row for row in found if "took" in row}
    assert 3 <= ends["hangs"]["took"] < 10
    assert (ends["hangs"]["ended"], ends["hangs"]["said"]) == (OVER, ["the last launch"])
    rows = {row["row"]: row for row in found if row["stage"] == "stage"}
    assert "process" in rows["quick"]
    assert (rows["slow"]["problem"], rows["never"]["not run"]) == (OVER, OVER)
    assert ends["dies"]["ended"] == "its process died of SIGKILL"
    assert ends["raises"]["said"][-1] == "OSError: no such driver"
    assert [row["number"] for row in found if row["row"] == "one" and "number" in row] == [1, 2]
    assert [name for name, row in ends.items() if not is_wrong(row)] == ["one", "two"]
    (child,) = map(int, planted.read_text().split())
    assert not is_there(child)
    found.clear()
    run(experiments[1:2], 5, found.append)
    assert found == [{"stage": "hour", "row": "one", "skipped": "no time left"}]


def test_a_report_with_failing_stages_has_everything_else(planted, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(gpu_report, "SOURCE", "planted")
    monkeypatch.setattr(gpu_report, "MACHINE", "planted:machine")
    monkeypatch.setattr(gpu_report, "STAGES", {"broken": (30, 1), "mixed": (30, 1)})
    assert gpu_report.main(["--out", str(out), "--stage", "broken", "mixed"]) == 1
    (path,) = out.iterdir()
    assert path.name.startswith("planted-x1-20")
    rows = read(path)
    assert rows[1]["gpu"] == "Planted X1, 7 multiprocessors"
    (broken,) = [row for row in rows if row["row"] == "broken" and "ended" in row]
    assert broken["ended"] == "its process raised"
    assert broken["said"][-1] == "OSError: no such driver"
    found = [row for row in rows if row["stage"] == "mixed"]
    assert [row["row"] for row in found if "problem" not in row] == ["one", "two"]
    assert "2 of ours not right" in capsys.readouterr().out


# The stages with small shapes and a few calls of each kind, as a module of their own.
SMALL_STAGES = """
import gc
from dataclasses import replace
import benchmarks.gpu.user as of_users
import dry_hour
from bahdanau_fast.fuse import choice, look
from benchmarks.gpu import stages
from benchmarks.gpu.stages import *
from benchmarks import measure

def small(shape):
    return replace(shape, batch=2, queries=min(shape.queries, 5), keys=5, hidden=8, query_size=8,
                   key_size=8, value_size=8)

def user(device):
    rows = of_users.user(device)
    return [row for row in rows if "(2,3,4,8)" not in row.name]  # the chapter's

gc.collect = lambda *_: 0  # before each row, with all of torch to look at
measure.GPU_SECONDS, measure.SAMPLE_SECONDS, measure.PAUSE_SECONDS = 1e-3, 1e-4, 0.0
of_users.SIZES, choice.PAYS, look._SECONDS = dry_hour.TINY, float("inf"), 0.0  # small calls pay
of_users.COMPILER = "aot_eager"  # inductor takes its time
stages.RIVALS = ("d2l eager",)  # a compilation takes seconds, the expert a GPU
stages.DTYPES, stages.ACCEPTANCE = ("bfloat16",), ()
for name in ("CALLS", "OURS_ALONE"):
    cases = [replace(case, shape=small(case.shape)) for case in getattr(stages, name)]
    kinds = {(case.task, case.dtype, case.train): case for case in cases}
    setattr(stages, name, [*kinds.values()])
"""


def test_a_report_of_the_cpu(tmp_path):
    (tmp_path / "planted.py").write_text(SMALL_STAGES)
    out = tmp_path / "out"
    code = (
        "import sys, torch._dynamo  # once, not in the process of each stage\n"
        "from benchmarks import gpu_report; gpu_report.SOURCE = 'planted'\n"
        "gpu_report.STAGES = {n: (s, 1) for n, (s, _) in gpu_report.STAGES.items()}\n"
        f"sys.exit(gpu_report.main(['--device', 'cpu', '--out', {str(out)!r}]))"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = python("-W", "ignore", "-c", code, cwd=ROOT, PYTHONPATH=path)
    (path,) = out.iterdir()
    found = read(path)
    assert found[1]["triton"]
    assert not [row for row in found if is_wrong(row)]
    rows = {row["row"]: row for row in found if row["stage"] not in ("hour", "machine")}
    timed = [row for row in rows.values() if "called" in row and row["stage"] != "user"]
    assert len(timed) > 10
    assert all(row["passed"] and row["bytes"] > 0 for row in timed)
    assert {row["stage"] for row in rows.values()} == {"user", "smoke", "time", "rivals"}
    assert "0 of ours not right" in done.stdout
    every_row_is_felt({name: row for name, row in rows.items() if row["stage"] == "user"})
    assert re.search(r"\| training step \(3,4,5,8\), float32 +\| \d", done.stdout)


def every_row_is_felt(rows):
    calls = {}
    for name, row in rows.items():
        who, _, call = name.partition(": ")
        calls.setdefault(call, set()).add(who)
        assert row.get("passed", who == NONE), name
        assert 0 < (1e-6 * row["host us"] if "host us" in row else row["called"]["median"]) < 10
        assert ("fused" in row) == (who == FUSE), name
    assert rows[f"{FUSE}: training step (3,4,5,8), float32"]["fused"]
    every = {OWN, DROP_IN, FUSE, OURS}
    for task in ("training step", "greedy decode"):
        assert calls.pop(f"{task} (3,4,5,8), bfloat16 autocast") == every
        assert calls.pop(f"{task} (3,4,5,8), float32") == {*every, NONE}
    for way in ("forward", "forward + backward"):
        assert {OWN, FUSE} <= calls.pop(f"Tacotron step (2,9,6,5,8,2,3), {way}")
        assert {OWN, FUSE} <= calls.pop(f"captioner step (2,6,5,8), {way}")
        assert {OWN, DROP_IN} <= calls.pop(f"module call (2,1,5,8), {way}")
    assert {call.split(", ")[0] for call in calls} == {"host"}
    assert any("compiled" in name for name in rows)


def test_an_interrupted_report_leaves_no_process(planted):
    """A make that is stopped must not leave a process on the GPU."""
    code = (
        "from benchmarks import gpu_report; from benchmarks.gpu import command\n"
        "gpu_report.SOURCE, gpu_report.MACHINE = 'planted', 'planted:machine'\n"
        "gpu_report.STAGES = {'slow': (60, 1)}\n"
        f"command(lambda: gpu_report.main(['--out', {str(planted.parent)!r}]))"
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
    total, build = gpu_report.TOTAL_SECONDS, gpu_report.BUILD_SECONDS
    assert total < 600 - 15  # the last one's processes are ended
    planned = sum(seconds for seconds, _ in gpu_report.STAGES.values())
    assert build + gpu_report.MACHINE_SECONDS + planned <= total
    plan = gpu_report.experiments([*gpu_report.STAGES], "cuda")
    spare = {e.name: e.spare for e in plan}
    assert spare == {"user": 240, "smoke": 180, "time": 100, "build": 60, "rivals": 0}
    assert len(plan) == sum(parts for _, parts in gpu_report.STAGES.values())
    assert f"timeout {build:.0f} " in (ROOT / "Makefile").read_text()
