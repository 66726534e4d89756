"""Tiles are chosen by the model, or by timing when asked; once, and never during a capture."""

import json

import pytest
import torch

from bahdanau_fast import tuning

CPU = torch.device("cpu")
PLANS = ("model's", "slow", "fast", "broken")


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Launches so far; what each plan takes is made up."""
    calls = []

    def launch(plan):
        if plan == "broken":
            raise RuntimeError("out of resource: shared memory")
        calls.append(plan)

    clock = {"now": 0.0}

    def perf_counter():
        clock["now"] += {"model's": 2.0, "slow": 3.0, "fast": 1.0}[calls[-1]]
        return clock["now"]

    monkeypatch.setattr(tuning.time, "perf_counter", perf_counter)
    monkeypatch.setattr(tuning, "_chosen", None)
    monkeypatch.setenv("BAHDANAU_FAST_CACHE", str(tmp_path))
    monkeypatch.setenv("BAHDANAU_FAST_AUTOTUNE", "1")
    return calls, launch


def choose(launch, key=(1, 2)):
    return tuning.choose("kernel", key, PLANS, launch, CPU)


def test_unless_asked_the_model_decides(timed, monkeypatch):
    calls, launch = timed
    monkeypatch.delenv("BAHDANAU_FAST_AUTOTUNE")
    assert choose(launch) == "model's"
    assert calls == []


def test_the_fastest_is_kept_and_found_again(timed, monkeypatch, tmp_path):
    calls, launch = timed
    assert choose(launch) == "fast"
    done = len(calls)
    assert choose(launch) == "fast"
    monkeypatch.setattr(tuning, "_chosen", None)  # another process
    assert choose(launch) == "fast"
    assert len(calls) == done
    assert choose(launch, (1, 3)) == "fast"
    assert len(calls) > done
    assert len(json.loads((tmp_path / "tuning.json").read_text())) == 2


def test_a_broken_file_is_begun_anew(timed, tmp_path):
    _, launch = timed
    (tmp_path / "tuning.json").write_text("not json")
    assert choose(launch) == "fast"
    assert json.loads((tmp_path / "tuning.json").read_text())


def test_nothing_is_timed_during_a_capture(timed, monkeypatch):
    calls, launch = timed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    cuda = torch.device("cuda")
    assert tuning.choose("kernel", (1,), PLANS, launch, cuda) == "model's"
    assert calls == []
