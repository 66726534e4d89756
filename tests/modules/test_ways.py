"""Whatever changes between two calls, and however, the second gives what the plain module gives."""

import pytest
import torch
import torch.distributed as dist
from ranks import two_ranks
from threads import one_thread  # noqa: F401
from ways.layers import EVERY
from ways.modes import play, variants
from ways.sides import DK, DQ, REMEMBERED, SMALL
from ways.table import WAYS
from ways.way import MODES

from bahdanau_fast import backends
from bahdanau_fast.backends.route import REUSE_ELEMENTS, TABLE_ELEMENTS
from bahdanau_fast.call import Call

ALONE = [way for way in WAYS if way.ranks == 1]
TOGETHER = [way for way in WAYS if way.ranks == 2]
# Compiled by Inductor too, which takes several times as long.
BY_INDUCTOR = ("`keys.mul_(-1.5)`", "`keys.numpy()`", "`Adam`, fused", "`load_state_dict`")


def marks(way, mode):
    """Each way of a layer is compiled by itself: a second for each, of which four are enough."""
    return [pytest.mark.deep] if mode == "compiled" and way.layers not in ((), EVERY) else []


def cases(ways):
    return [
        pytest.param(way, mode, id=f"{way.what}, {way.how}, {mode}", marks=marks(way, mode))
        for way in ways
        for mode in MODES
        if mode not in way.without
    ]


@pytest.fixture(scope="module", autouse=True)
def many_compilations():
    """One function is compiled for all ways, once more for each that changes a module's code."""
    with torch._dynamo.config.patch(recompile_limit=500, accumulated_recompile_limit=500):
        yield
    torch._dynamo.reset()


def wrong(way, mode, folder):
    return [
        f"{name}: {line}"
        for name, options in variants(way, mode)
        for line in play(way, mode, folder, **options)
    ]


@pytest.mark.parametrize(("way", "mode"), cases(ALONE))
def test_way(way, mode, tmp_path):
    assert wrong(way, mode, tmp_path) == []


@pytest.mark.parametrize("how", BY_INDUCTOR)
def test_way_by_inductor(how, tmp_path):
    (way,) = (way for way in WAYS if way.how == how)
    assert wrong(way, "inductor", tmp_path) == []


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of the two ranks prints (ways/two_ranks.py)."""
    return two_ranks("ways.two_ranks", tmp_path_factory.mktemp("ranks"), timeout=600)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(("way", "mode"), cases(TOGETHER))
def test_way_of_two_processes(printed, way, mode):
    for out, err in printed:
        assert f"right: {way.how}, {mode}" in out.splitlines(), out[-3000:] + err[-3000:]


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


def test_the_table_is_long_and_of_every_kind():
    assert len(WAYS) >= 40
    assert len({(way.what, way.how) for way in WAYS}) == len(WAYS)
    assert len(TOGETHER) >= 5
    assert {mode for way in WAYS for mode in MODES if mode not in way.without} == set(MODES)
