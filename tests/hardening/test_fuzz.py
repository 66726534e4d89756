"""A short run of ``fuzz.py``: the seeds it kept, and cases of chance."""

import os
from collections import Counter

import fuzz
import pytest
from threads import one_thread  # noqa: F401

CHANCE = int(os.environ.get("BAHDANAU_FAST_CHANCE", fuzz.CHANCE))


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_cases(target):
    one = fuzz.function_of(target)
    for seed in fuzz.seeds_of(target):
        one(seed)
    ended = Counter(map(one, fuzz.of_chance(CHANCE)))
    assert ended["checked"] > 0.2 * CHANCE
    assert ended["refused"] > 0
