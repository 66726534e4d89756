"""``bahdanau-fast check`` on a GPU that is pretended: CUDA C++. Triton: tests/triton/kernels.

What csrc/cuda would launch is asked of it, on the mock of the runtime, in a capture: its plan says
what is of which family. Results are those of the CPU's kernels.
"""

import json
import os
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
from checked import MISTAKES, checking, finds
from checked_cuda import NAMES, family_of, launched, on_cpu, served
from mock_cuda import kernel_of, mock

from bahdanau_fast import check, cli, switches
from bahdanau_fast.check import families, problems
from bahdanau_fast.check.children import OVER, lines
from ptx_machine import needs_compiler


class Planted:
    """What becomes of the first result of operators, by family; and what was launched."""

    def __init__(self):
        self.mistakes, self.launched = {}, []

    def run(self, name, plain, *args):
        made = launched(name, *args)
        self.launched += made
        results = on_cpu(name, plain, args)
        self.mistakes.get(family_of(made), id)(results[0])
        return results


@pytest.fixture
def planted():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to check")
    found = Planted()
    with served(found.run):
        yield found


@needs_compiler
def test_all_is_right(planted, tmp_path, capsys):
    path = tmp_path / "report.json"
    with checking(*NAMES):
        assert cli.main(["check", "--json", str(path)]) == 0
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.endswith("PASS\n")
    assert {row["family"] for row in report["rows"]} == set(switches.SWITCHES)
    dtypes = {(row["family"], row["dtype"]) for row in report["rows"] if "dtype" in row}
    wide = {("cuda", "float32"), ("clusters", "float32")}
    assert dtypes == {(n, d) for n in NAMES for d in ("bfloat16", "float16")} | wide
    for row in report["rows"]:
        if row["family"] in NAMES:
            assert 0 <= row["ours"] <= 1
            assert row["case"] in printed
        else:
            assert row["unchecked"] == "it is left out"
    assert (report["gpu"]["name"], report["gpu"]["capability"]) == ("pretended", [9, 0])
    assert report["torch"] == torch.__version__
    assert (report["wrong"], report["off"], report["passed"]) == ([], [], True)


@needs_compiler
@pytest.mark.parametrize("said", MISTAKES)
@pytest.mark.parametrize("family", NAMES)
def test_a_mistake_is_found_and_named(family, said, planted, tmp_path, capsys):
    planted.mistakes[family] = MISTAKES[said]
    report = finds(family, said, tmp_path, capsys)
    if said != "FAIL":
        (row,) = (row for row in report["rows"] if "case" in row)
        assert bool(row["output"]) == (said.startswith("Runtime"))


@needs_compiler
@pytest.mark.parametrize("multiprocessors", [8, 148])
def test_experiments_reach_their_family(multiprocessors, planted, monkeypatch):
    """On a GPU of any size."""
    monkeypatch.setattr(problems, "_DRAWS", 1)
    for name in NAMES:
        monkeypatch.setattr(switches, "OFF", families.beside(name))
        mock().new_gpu(multiprocessors=multiprocessors)
        for each in families.FAMILIES[name].experiments:
            if each.name.endswith(("replayed", "two streams")):
                continue
            planted.launched.clear()
            assert each.absent("cuda", "cpu") is None
            each.judge("cuda", "cpu")
            assert family_of(planted.launched) == name, each.name
            kernels = {kernel_of(x) for x in planted.launched}
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


@needs_compiler
def test_time_that_is_over_blames_nobody(planted, capsys):
    with checking("cuda", SECONDS=0.5):
        assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert OVER in printed
    assert "wrong here" not in printed


@needs_compiler
def test_what_is_off_or_has_no_clusters_is_not_tried(planted, monkeypatch, capsys):
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
