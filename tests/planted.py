"""Providers of known speed, for the comparison of two versions: they sleep, and are right."""

import time

from benchmarks.providers import PROVIDERS as REAL
from benchmarks.providers import Provider, Runnable

STEP = 0.004


def _sleeping(seconds):
    def build(inputs):
        right = next(each for each in REAL if each.name == "ours op").build("full", inputs)
        result = right.forward()

        def forward():
            time.sleep(seconds)
            return result

        return Runnable(forward, right.leaves)

    return build


def _wrong(inputs):
    right = next(each for each in REAL if each.name == "ours op").build("full", inputs)
    context, weights = right.forward()
    return Runnable(lambda: (context * 1.01, weights), right.leaves)


PROVIDERS = (
    Provider("steady", "ours", {"full": _sleeping(STEP)}),
    Provider("wrong", "ours", {"full": _wrong}),
    Provider("slower", "ours", {"full": _sleeping(1.15 * STEP)}),
)
