"""Random sequences of calls, changes and backward passes give what the plain module gives."""

import os
from collections import Counter
from itertools import islice

import pytest
from course import CourseAttention
from threads import one_thread  # noqa: F401
from ways import sides
from ways.sequences import ACTIONS, Plan, Step, draw_plan, run, shorten, told

SEQUENCES, PARTS = int(os.environ.get("BAHDANAU_FAST_SEQUENCES", "1250")), 5  # .ci/run: 10 000


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_sequences(part):
    ended = Counter()
    for seed in range(part, SEQUENCES, PARTS):
        plan = draw_plan(seed)
        assert not run(plan, ended), told(seed, plan)
    done = {action: ended[action, True] for action in ACTIONS}
    assert all(done.values()), done
    assert sum(done.values()) > 5 * SEQUENCES // PARTS
    assert sum(ended.values()) < 1.1 * sum(done.values())  # few that the plain module refuses


def test_parameters_of_inference_mode_are_trained_as_by_plain_code():
    """Found among 50 000 sequences: plain operations leave such a w_v without a gradient."""
    steps = [
        Step("mode", {"name": "inference"}),
        Step("change", {"how": "weights, all in float32"}),
        Step("train", {"kind": "SGD", "how": "plain"}),
        Step("call", {"queries_len": 1, "steps": 1}),
    ]
    assert run(Plan({"seed": 509, "bias": False}, steps)) == []


class Stale(CourseAttention):
    """Reuses a projection until the keys are another tensor: what must never be."""

    def __init__(self, *sizes, cache_keys, activation="tanh", **options):
        super().__init__(*sizes, **options)
        self.kept = None

    def forward(self, queries, keys, values, valid_lens):
        if self.kept is None or self.kept[0] is not keys:
            self.kept = keys, keys.detach().clone()
        return super().forward(queries, self.kept[1], values, valid_lens)


def test_a_stale_projection_is_noticed_and_told_in_a_few_steps(monkeypatch):
    monkeypatch.setattr(sides.bf, "AdditiveAttention", Stale)
    failed = [*islice((seed for seed in range(40) if run(draw_plan(seed))), 6)]
    assert len(failed) == 6
    short = shorten(draw_plan(failed[0]))
    assert 0 < len(short.steps) <= 4
    assert all(not run(Plan(short.options, short.steps[:i])) for i in range(len(short.steps)))
    assert f"# seed {failed[0]}" in told(failed[0], draw_plan(failed[0]))
