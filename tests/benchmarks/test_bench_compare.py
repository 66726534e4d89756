"""The comparison of two versions calls what is slower, and nothing else."""

import math
import textwrap

import pytest

from benchmarks import compare
from benchmarks.cases import TOY
from benchmarks.compare import NEW, OLD, Difference, judge
from benchmarks.contestants.parity import checked_call
from benchmarks.measure import Timings
from benchmarks.worker import ROOT, Worker, WorkerError

# A provider whose clock is planted too: processes, parity check and turns are real, and no other
# load on this machine can change what they find.
PLANTED = """
    import os
    import random
    from benchmarks.contestants import Provider, Runnable
    from benchmarks.contestants.registry import by_name

    class Timed:
        def __init__(self, result, seconds):
            self.result, self.cost, self.noise = result, seconds, random.Random(os.getpid())

        def __call__(self):
            return self.result

        def seconds(self, repeats):
            return self.cost * self.noise.gauss(1, 0.002)

    def build(seconds, factor=1.0):
        def builder(inputs):
            right = by_name("ours op").build("full", inputs)
            context, weights = right.forward()
            return Runnable(Timed((context * factor, weights), seconds), right.leaves)
        return {"full": builder}

    PROVIDERS = (
        Provider("steady", "ours", build(0.004)),
        Provider("changed", "ours", build(0.004 * SLOWER)),
        Provider("wrong", "ours", build(0.004, 1.01)),
    )
"""


def test_the_interval_is_students():
    # By hand: logarithms 0.1, 0.2, 0.3 have mean 0.2 and standard error 0.1 / sqrt(3); the 99.5 %
    # point of Student's t with two degrees of freedom is 9.925.
    pairs = [Timings({NEW: [math.exp(x)], OLD: [1.0]}) for x in (0.1, 0.2, 0.3)]
    half = 9.925 * 0.1 / math.sqrt(3)
    want = math.exp(0.2), math.exp(0.2 - half), math.exp(0.2 + half)
    assert judge(pairs) == pytest.approx(want, rel=1e-3)
    assert judge(pairs, rows=12).high > want[2]


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.031, 1.2, "slower"),
        (1.029, 1.1, "no difference"),
        (0.9, 0.97, "faster"),
        (0.96, 1.04, "no difference"),
        (0.85, 1.08, "too noisy"),  # 15 % could hide in an interval as wide
    ],
)
def test_words(low, high, word):
    assert Difference(math.sqrt(low * high), low, high).word == word


@pytest.mark.deep
def test_two_versions_in_processes_of_their_own(tmp_path):
    sides = {"old": tmp_path / "old", "new": tmp_path / "new"}
    for name, slower in (("old", 1.0), ("new", 1.15)):
        sides[name].mkdir()
        (sides[name] / "bahdanau_fast").symlink_to(ROOT / "bahdanau_fast")
        text = textwrap.dedent(PLANTED).replace("SLOWER", str(slower))
        (sides[name] / "planted.py").write_text(text)
    rows = [
        compare.Comparison(name, "full", TOY, source="planted")
        for name in ("steady", "changed", "wrong")
    ]
    verdicts, problems = compare.compare(sides, rows, pairs=3, seconds=0.1)
    words = {row.provider: verdict.word for row, verdict in verdicts.items()}
    assert words == {"steady": "no difference", "changed": "slower"}
    assert verdicts[rows[1]].ratio == pytest.approx(1.15, rel=0.02)
    assert "fails parity" in problems[rows[2]]
    text = "\n".join(compare.lines(verdicts, problems))
    assert "1 no difference, 1 slower" in text
    assert "not compared: wrong" in text


def test_a_process_that_imports_something_else_is_not_measured(tmp_path):
    with pytest.raises(WorkerError, match="was to be found in"):
        compare.compare({"old": tmp_path, "new": tmp_path}, compare.ROWS[:1], 2, 0.01)


def test_a_process_says_what_is_wrong_and_goes_on():
    with Worker() as worker:
        source = "benchmarks.contestants.registry"
        with pytest.raises(WorkerError, match="KeyError: 'scan'"):
            worker.make(checked_call, source, "d2l eager", "scan", TOY)
        with pytest.raises(WorkerError, match="No module named 'nowhere'"):
            worker.make(checked_call, "nowhere", "d2l eager", "full", TOY)
        assert worker.make(checked_call, source, "ours module", "full", TOY, "train").passed
        assert 0 < worker.seconds(3) < 1
        worker.kill()
        with pytest.raises(WorkerError, match="died of SIGKILL"):
            worker.seconds(1)


def test_an_unknown_commit_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare", "no-such-commit"])
    assert compare.main() == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
