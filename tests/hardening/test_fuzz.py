"""A short run of ``fuzz.py``: cases of chance."""

import os
import random
from collections import Counter

import fuzz
import pytest
from threads import one_thread  # noqa: F401

CHANCE = int(os.environ.get("BAHDANAU_FAST_CHANCE", "300"))


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_cases_of_chance(target):
    one, draw = fuzz.function_of(target), random.Random(7)
    ended = Counter(one(draw.randbytes(fuzz.LONGEST)) for _ in range(CHANCE))
    assert ended["checked"] > 0.2 * CHANCE
    assert ended["refused"] > 0
