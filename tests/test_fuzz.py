"""A short run of ``make fuzz``: the seeds it kept, and cases of chance."""

import random
import sys
from collections import Counter
from pathlib import Path

HARDENING = Path(__file__).resolve().parent / "hardening"
sys.path.insert(0, str(HARDENING))

import entry_points  # noqa: E402


def test_seeds():
    seeds = sorted((HARDENING / "seeds").iterdir())
    assert len(seeds) > 50
    ended = Counter(entry_points.one(seed.read_bytes()) for seed in seeds)
    assert min(ended[kind] for kind in ("checked", "ran", "refused")) > 5


def test_cases_of_chance():
    draw = random.Random(7)
    ended = Counter(entry_points.one(draw.randbytes(96)) for _ in range(300))
    assert ended["checked"] > 80
