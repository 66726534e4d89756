"""Two versions are compared on one training, and only where their losses are those of one."""

import pytest

from benchmarks import before_after
from benchmarks.compare import NEW, OLD, Side
from benchmarks.timing.worker import ROOT, Worker

COURSE = "`train`, the course's settings"


@pytest.fixture
def _one_training(monkeypatch):
    monkeypatch.setattr(before_after, "TRAININGS", {COURSE: before_after.TRAININGS[COURSE]})


@pytest.mark.usefixtures("_one_training")
def test_a_version_trains_as_itself():
    sides = {OLD: Side("this", ROOT), NEW: Side("this, too", ROOT)}
    rows = before_after.compare(sides, seconds=0.5)
    (row,) = rows
    assert row["settings"]["num_hiddens"] == 32
    assert all(row["seconds"][side]["median"] > 0 for side in sides)
    assert 0.2 < row["ratio"]["median"] < 5
    shown = "\n".join(before_after.lines({"rows": rows}))
    assert COURSE in shown
    assert f"{row['ratio']['median']:.2f}x" in shown


@pytest.mark.usefixtures("_one_training")
def test_losses_of_another_training_are_refused(monkeypatch):
    asked = iter([0.0, 1e-3])

    def make(self, *_):
        drift = next(asked)
        return {"losses": [2.0, 1.0 + drift]}

    monkeypatch.setattr(Worker, "make", make)
    with pytest.raises(RuntimeError, match="losses differ"):
        before_after.compare({OLD: Side("a", ROOT), NEW: Side("b", ROOT)}, seconds=0.1)


def test_steps_follow_each_other_and_losses_fall():
    step, said = before_after.training_step(COURSE)
    losses = said["losses"]
    assert len(losses) == before_after.COMPARED
    assert losses[-1] < losses[0]
    for _ in range(before_after.BATCHES + 1):  # past the last batch it begins again
        step()
