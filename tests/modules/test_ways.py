"""Whatever changes between two calls, and however, the second gives what the plain module gives.

A tenth of the cases, drawn by one fixed seed, runs by default; the others have ``-m thorough``. All
workers of a run and both runs of .ci/run have to draw the same, which a day may not give.
"""

import random

import pytest
import torch
from threads import one_thread  # noqa: F401
from ways.layers import EVERY
from ways.modes import MODES, play, variants
from ways.sides import DK, DQ, REMEMBERED, SMALL
from ways.table import WAYS

from bahdanau_fast import backends
from bahdanau_fast.backends.cpu import TABLE_ELEMENTS
from bahdanau_fast.backends.route import REUSE_ELEMENTS
from bahdanau_fast.call import Call

# Compiled by Inductor too, which takes several times as long.
BY_INDUCTOR = ("`keys.mul_(-1.5)`", "`keys.numpy()`", "`Adam`, fused", "`load_state_dict`")


def marks(way, mode):
    """Each way of a layer is compiled by itself: a second for each, of which four are enough."""
    if mode == "compiled" and way.layers not in ((), EVERY):
        return [pytest.mark.deep]
    return [pytest.mark.thorough] if mode == "compiled" or DRAWN.random() >= 0.1 else []


DRAWN = random.Random(3)
CASES = [
    pytest.param(way, mode, id=f"{way.what}, {way.how}, {mode}", marks=marks(way, mode))
    for way in WAYS
    for mode in MODES
    if mode != "inductor" and mode not in way.without
]


@pytest.fixture(scope="module", autouse=True)
def many_compilations():
    """One function is compiled for all ways, once more for each that changes a module's code."""
    with torch._dynamo.config.patch(recompile_limit=500, accumulated_recompile_limit=500):
        yield
    torch._dynamo.reset()


def wrong(way, mode, every=False):
    return [
        f"{name}: {line}"
        for name, options in variants(way, mode, every)
        for line in play(way, mode, **options)
    ]


@pytest.mark.parametrize(("way", "mode"), CASES)
def test_way(way, mode):
    assert wrong(way, mode) == []


LONG = [case for case in CASES if variants(*case.values, every=True) != variants(*case.values)]


@pytest.mark.deep
@pytest.mark.parametrize(("way", "mode"), LONG)
def test_every_variant_of_a_way(way, mode):
    assert wrong(way, mode, every=True) == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", BY_INDUCTOR)
def test_way_by_inductor(how):
    (way,) = (way for way in WAYS if way.how == how)
    assert wrong(way, "inductor") == []


def test_sizes():
    """One is remembered, the other goes by one operator though its keys are large enough."""
    for (batch, keys_len, hidden), one_operator in ((REMEMBERED, False), (SMALL, True)):
        queries, keys = torch.empty(batch, 2, DQ), torch.empty(batch, keys_len, DK)
        weights = torch.empty(hidden, DQ), torch.empty(hidden, DK), torch.empty(1, hidden)
        w_q, w_k, w_v = weights
        route = backends.decide(Call(queries, keys, keys, w_v, w_q, w_k))
        assert (route.form == "one operator") == one_operator
        assert keys.numel() >= REUSE_ELEMENTS
        assert batch * keys_len * hidden >= TABLE_ELEMENTS
