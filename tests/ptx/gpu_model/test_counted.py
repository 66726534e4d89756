"""Counts of a few blocks, scaled, against all of them."""

import dataclasses

import pytest
import torch
from machine import build

from gpu_model.counted import Counted, Problem, works
from gpu_model.gpus import GPUS
from gpu_model.rivals import compiled, eager
from gpu_model.times import modelled

pytestmark = pytest.mark.skipif(build.NVCC is None, reason="nvcc is not on this machine")

A100 = dataclasses.replace(GPUS["A100"], multiprocessors=16)
CALLS = {
    "a block a row": Problem(5, 1, 40, 64, 48),
    "rows in splits": Problem(4, 2, 70, 40, 24),
    "tiles": Problem(5, 20, 70, 40, 24),
}


@pytest.fixture(scope="module")
def driver():
    return Counted("bf16", "80")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backward", [False, True])
def test_scaled_counts_are_those_of_all_blocks(driver, name, backward):
    scaled = driver.count(CALLS[name], A100, backward)
    driver.everything = True
    try:
        whole = driver.count(CALLS[name], A100, backward)
    finally:
        driver.everything = False
    assert [(x.entry, x.blocks) for x in scaled] == [(x.entry, x.blocks) for x in whole]
    for some, every in zip(scaled, whole, strict=True):
        assert some.counts.keys() == every.counts.keys()
        for unit, count in every.counts.items():
            assert some.counts[unit] == pytest.approx(count, rel=0.01), (some.entry, unit)
        assert some.trips == pytest.approx(every.trips, rel=0.01)


def test_bytes_of_a_step_are_those_of_its_tensors(driver):
    p = CALLS["a block a row"]
    (launch,) = driver.count(p, A100, False)
    read = p.batch * (p.keys * (p.hidden + p.value_size) + p.hidden) + p.hidden
    assert launch.counts["read"] == 2 * read
    assert launch.counts["written"] == p.batch * (2 * p.value_size + 4 * p.keys)


def test_a_call_of_a_kernel_has_a_time(driver):
    found = driver.count(CALLS["a block a row"], A100, False)
    (work,) = works(found, A100, registers=lambda *_: {found[0].entry: 128})
    assert (work.name, work.blocks, work.warps) == ("decode_forward 1", 5, 8)
    time = modelled(A100, work)
    assert time.resident == 2
    assert 0 < time.roof < time.seconds < 1e-4


def test_what_others_launch_and_move():
    p = Problem(2, 3, 5, 7, 11, dtype=torch.float32)
    f, s = 2 * 3 * 5 * 7, 2 * 3 * 5
    inputs = 2 * (3 + 5) * 7 + 2 * (3 + 5) * 11
    assert (eager(p).launches, compiled(p).launches) == (5, 3)
    assert eager(p).moved == 4 * (4 * f + 4 * s + inputs)
    assert compiled(p).moved == 4 * (4 * s + inputs)
    masked = dataclasses.replace(p, lens=(1, 5))
    assert eager(masked).launches == 9
    least = eager(p).floor(GPUS["H100"])
    assert least == pytest.approx(5 * 2.5e-6, rel=0.01)
