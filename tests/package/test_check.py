"""``bahdanau-fast check`` where there is no GPU, with mistakes in what is tried.

A GPU is pretended, on which each family has an experiment that the CPU's kernels compute. Children
are forked from the test. That the families' own experiments reach them is shown here for CUDA C++
and in tests/triton/test_kept_launches.py for Triton; tests/ptx/test_check_in_machine.py has the
machine code of both compute them.
"""

import json
import os
import signal
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from host_only import routed
from mock_cuda import kernel_of, launches, mock

from bahdanau_fast import backends, check, cli, switches
from bahdanau_fast.check import families, problems
from bahdanau_fast.check.children import OVER, lines
from ptx_machine import needs_compiler

CUDA = [name for name, family in families.FAMILIES.items() if family.backend == "cuda"]
SILENCE = 1.0  # where something hangs
FP32, TRIED = torch.float32, problems.attention(problems.CASES[-1])
HAS = {"name": "pretended", "major": 9, "minor": 0, "multi_processor_count": 132}


def _raise(_):
    raise RuntimeError("planted\nbeside other words")


#: What becomes of a result, by what is said of it.
MISTAKES = {
    "FAIL": lambda x: x.mul_(1.05),
    "RuntimeError: planted": _raise,
    f"no answer within {SILENCE:g} s": lambda _: time.sleep(1000),
    "its process died of SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}


def experiment(mistake=id):
    """By the CPU's kernels, with a mistake in the first result."""

    def way(prepared, run):
        results = run(prepared[0])
        mistake(results[0])
        return [(0, results)]

    return families.Experiment(
        "planted", FP32, lambda *_: problems.worst(TRIED, "cpu", FP32, "cpu", way)
    )


@contextmanager
def checking(**mistakes):
    """Inside, a GPU is checked, and no CPU: each family has an experiment, with its mistake."""
    chosen = {
        name: family._replace(experiments=(experiment(mistakes.get(name, id)),))
        for name, family in families.FAMILIES.items()
    }
    has = SimpleNamespace(**HAS, total_memory=1 << 30)
    with (
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_properties", lambda _: has),
        patch.object(backends, "why_not", {"triton": "it is left out"}.get),
        patch.dict(families.FAMILIES, chosen),
        patch.object(check, "_on_cpu", lambda **_: ()),
    ):
        yield


def test_all_is_right(tmp_path, capsys):
    path = tmp_path / "report.json"
    with checking():
        assert cli.main(["check", "--json", str(path)]) == 0
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.endswith("PASS\n")
    assert [row["family"] for row in report["rows"]] == list(switches.SWITCHES)
    for row in report["rows"]:
        if row["family"] in CUDA:
            assert 0 <= row["ours"] <= 1
            assert (row["case"], row["dtype"]) == ("planted", "float32")
        else:
            assert row["unchecked"] == "it is left out"
    assert (report["gpu"]["name"], report["gpu"]["capability"]) == ("pretended", [9, 0])
    assert report["torch"] == torch.__version__
    assert (report["wrong"], report["off"], report["passed"]) == ([], [], True)


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_found_and_named(said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "SILENCE", SILENCE if "answer" in said else 300.0)
    path = tmp_path / "report.json"
    with checking(clusters=MISTAKES[said]):
        assert cli.main(["check", "--json", str(path)]) == 1
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    (line,) = (line for line in printed.splitlines() if line.startswith("clusters"))
    assert said in line
    assert line.endswith("FAIL")
    assert "\nwrong here: clusters: " in printed
    assert "\nBAHDANAU_FAST_OFF=clusters switches off; --json FILE" in printed
    assert printed.endswith("\nFAIL\n")
    assert (report["wrong"], report["passed"]) == (["clusters"], False)
    (row,) = (row for row in report["rows"] if row["family"] == "clusters")
    assert bool(row.get("output")) == said.startswith("Runtime")


def called(name, *args):
    """What an operator of csrc/cuda gives in a capture, where nothing runs, and its launches."""
    gpu = mock()
    gpu.calls()
    clusters = gpu.without_clusters() if switches.is_off("clusters") else nullcontext()
    with clusters, gpu.capture(gpu.new_stream()):
        results = gpu.operator(name, *args)
    return results, launches(gpu.calls())


def family_of(made):
    if any(kernel_of(x).startswith("persistent") for x in made):
        return "one-launch"
    return "clusters" if any(x["cluster"] > 1 for x in made) else "cuda"


@needs_compiler
@pytest.mark.parametrize("multiprocessors", [8, 148])
def test_experiments_reach_their_family(multiprocessors, monkeypatch):
    """On a GPU of any size; nothing runs there, and results are zero."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, its extension defines the operators")
    launched = []

    def run(name, _, *args):
        results, made = called(name, *args)
        launched.extend(made)
        return [x.zero_() for x in results]

    monkeypatch.setattr(problems, "_DRAWS", 1)
    with routed("cuda", run):
        for name in CUDA:
            monkeypatch.setattr(switches, "OFF", families.beside(name))
            mock().new_gpu(multiprocessors=multiprocessors)
            for each in families.FAMILIES[name].experiments:
                if each.name.endswith(("replayed", "two streams")):
                    continue
                launched.clear()
                assert each.absent("cuda", "cpu") is None
                each.judge("cuda", "cpu")
                assert family_of(launched) == name, each.name
                kernels = {kernel_of(x) for x in launched}
                if "step" in each.name:
                    assert ("combine_splits" in kernels) == ("split" in each.name), each.name


@pytest.fixture
def fails(monkeypatch):
    """Has rows in the place of all that is tried."""

    def rows(*found):
        monkeypatch.setattr(check, "_tried", lambda *_: found)

    return rows


WRONG = {"case": "a", "dtype": "float32", "ours": float("inf"), "eager": 0.1, "worst": "context"}


@pytest.mark.parametrize(
    ("families", "off"),
    [
        (("clusters", "waves"), "clusters,waves"),
        (("cuda", "clusters", "one-launch"), "cuda"),
        (("triton", "kept-launches", "one-launch"), "one-launch,triton"),
    ],
)
def test_a_backend_that_is_wrong_goes_with_all_of_it(families, off, fails, capsys):
    fails(*({"family": name, **WRONG} for name in families))
    assert cli.main(["check"]) == 1
    assert f"\nBAHDANAU_FAST_OFF={off} switches off;" in capsys.readouterr().out


def test_what_is_off_already_stays_off(fails, monkeypatch, capsys):
    monkeypatch.setattr(switches, "OFF", frozenset(("terms",)))
    fails({"family": "waves", **WRONG})
    cli.main(["check"])
    assert "\nBAHDANAU_FAST_OFF=terms,waves switches off;" in capsys.readouterr().out


def test_json_alone_is_the_output(fails, capsys):
    fails({"family": "cpu", **WRONG})
    assert cli.main(["check", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == [{"family": "cpu", **WRONG, "ours": "inf"}]
    assert err.endswith("FAIL\n")


def test_a_report_that_cannot_be_written_is_said_first(fails, tmp_path, capsys):
    assert cli.main(["check", "--json", str(tmp_path / "gone" / "report.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "No such file or directory" in err


def test_time_that_is_over_blames_nobody(monkeypatch, capsys):
    monkeypatch.setattr(check, "SECONDS", 0.5)
    with checking(cuda=MISTAKES["no answer within 1 s"]):
        assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert OVER in printed
    assert "wrong here" not in printed


def test_what_is_off_or_has_no_clusters_is_not_tried(monkeypatch, capsys):
    monkeypatch.setattr(switches, "OFF", frozenset(("one-launch",)))
    with checking(), patch.object(check, "_CLUSTERS", (9, 1)):
        assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert "one-launch     not checked: switched off by BAHDANAU_FAST_OFF=one-launch" in printed
    assert "clusters       not checked: this GPU has none" in printed


def test_what_a_child_prints_is_kept_beside_its_rows():
    def work():
        print("before")
        yield {"row": 1}
        raise ValueError("planted")

    first, last = lines([work], time.monotonic() + 60.0, 60.0)
    assert first == {"row": 1}
    assert last["ended"] == "its process raised"
    assert (last["output"][0], last["output"][-1]) == ("before", "ValueError: planted")


def test_children_beside_each_other_end_with_the_time(tmp_path):
    def work(name, seconds):
        (tmp_path / f"{name} begun").touch()
        time.sleep(seconds)
        (tmp_path / f"{name} ended").touch()
        yield {}

    begun = time.monotonic()
    works = [partial(work, "quick", 0.0), partial(work, "late", 1000.0)]
    *rows, last = lines(works, begun + 1.0)
    assert (rows, last["ended"]) == ([{}], OVER)
    assert {path.name for path in tmp_path.iterdir()} == {
        "quick begun",
        "quick ended",
        "late begun",
    }
    assert time.monotonic() < begun + 60.0


def test_without_a_gpu_there_are_no_processes(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: 1 / 0)
    monkeypatch.setattr(check, "_on_cpu", lambda **_: ())
    assert check.check()
