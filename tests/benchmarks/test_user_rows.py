"""Rows of what a user feels, with tiny sizes on the CPU; and the table of decoders."""

from functools import partial

import pytest
import torch

from bahdanau_fast.fuse import report
from benchmarks import decoders
from benchmarks.contestants.baselines import CourseAttention
from benchmarks.decoders import DROP_IN, FUSE, OURS, OWN
from benchmarks.gpu import figures, user
from benchmarks.timing import measure

DECODER = "(3,4,5,8)"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(user, "SIZES", user.TINY)
    monkeypatch.setattr(report, "LEAST", 0)  # else calls as small are left to their own code
    monkeypatch.setattr(figures, "SECONDS", 1e-3)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)


def rows(part=""):
    return {row.name: row for row in user.user("cpu") if part in row.name}


def test_every_row_computes_and_is_right():
    found = {name: row.compute() for name, row in rows().items()}
    assert len(found) == len(user.user("cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32
    for name, result in found.items():
        assert 0 <= result["worst"] <= 1, name
        assert result["passed"], name
        seconds = 1e-6 * result["host us"] if "host" in name else result["called"]["median"]
        assert 0 < seconds < 10, name
    assert [name for name, result in found.items() if "fused" in result] == [*rows(f"{FUSE}: ")]
    assert found[f"{FUSE}: training step {DECODER}, float32"]["fused"]
    calls = {}
    for name in found:
        who, _, call = name.partition(": ")
        calls.setdefault(call, set()).add(who)
    every = {OWN, DROP_IN, FUSE, OURS}
    for task in ("training step", "greedy decode"):
        for dtype in ("float32", "bfloat16"):
            assert calls.pop(f"{task} {DECODER}, {dtype}") == every
    assert calls["module call (2,1,5,8), forward"] == {OWN, DROP_IN, f"{OWN}, compiled"}
    assert all(any(who.startswith((OWN, DROP_IN)) for who in whos) for whos in calls.values())


def test_compiled_rows_come_last_and_take_longer(monkeypatch):
    monkeypatch.setattr(user, "SIZES", user.TINY | {"compiled": None})
    seconds = [(row.seconds, "compiled" in row.name) for row in user.user("cpu")]
    assert seconds == sorted(seconds)
    assert {s for s, _ in seconds} == {user.ROW_SECONDS, user.COMPILED_SECONDS}
    assert any("training step" in name for name in rows("compiled"))
    assert not any("graphed" in name for name in rows())  # which needs a GPU


class Wrong(CourseAttention):
    """Ignores the lengths."""

    def forward(self, queries, keys, values, valid_lens):
        return super().forward(queries, keys, values, None)


@pytest.mark.parametrize("call", ["training step", "greedy decode"])
def test_a_wrong_decoder_is_seen(call, monkeypatch):
    wrong = partial(decoders._CourseDecoder, Wrong)
    monkeypatch.setitem(decoders.DECODERS, DROP_IN, decoders.DECODERS[DROP_IN]._replace(make=wrong))
    result = rows()[f"{DROP_IN}: {call} {DECODER}, float32"].compute()
    assert result["worst"] > 1
    assert not result["passed"]
    with pytest.raises(RuntimeError, match="tiny: training step of 'drop-in' is wrong by"):
        decoders.compare(user.TINY["decoder"], 1e-3)


@pytest.mark.parametrize("way", ["forward", "forward + backward"])
def test_a_wrong_module_is_seen(way, monkeypatch):
    monkeypatch.setattr(user.bf, "AdditiveAttention", Wrong)
    for name, row in rows(f"module call (2,1,5,8), {way}").items():
        if "compiled" not in name:
            assert row.compute()["passed"] == name.startswith(OWN), name


def test_the_table_of_decoders():
    figures = [decoders.compare(user.TINY["decoder"], 1e-3, min_rounds=1)]
    heads, _, *lines = decoders.times(figures)
    assert [line.split("|")[2].strip() for line in lines] == list(decoders.DECODERS)
    assert [head.strip() for head in heads.split("|")[3:6]] == [
        *("training step (ms)", "inference (ms)", "greedy decode (ms)"),
    ]
    del figures[0]["decode"]  # as figures of earlier commits
    assert "greedy" not in decoders.times(figures)[0]
