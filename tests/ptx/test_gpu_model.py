"""The model of time: its arithmetic on cases worked out by hand; counts of a few blocks, scaled."""

import csv
import dataclasses
from itertools import product

import pytest
import torch
from driven import needs_nvcc
from gpu_model import __main__ as program
from gpu_model.__main__ import eager
from gpu_model.counted import Counted, Problem, works
from gpu_model.gpus import ASSUMED, GPUS
from gpu_model.times import Time, Work, in_graph, modelled, resident_blocks

WORK = Work("a kernel", 1320, 8, 32, 0, {"fma": 1e6, "alu": 1e6}, sectors=1e7, moved=3.2e8,
            cold=3.2e8)  # fmt: skip

# ---- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tflops"), [("A100", 19.5), ("H100", 67), ("H200", 67), ("RTX 4090", 82.6)]
)
def test_rates_are_those_of_the_data_sheets(name, tflops):
    gpu = GPUS[name]
    rate = 2 * gpu.fma * gpu.multiprocessors * gpu.clock / 1e3
    assert rate == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "warps", "registers", "shared", "blocks"),
    [
        ("H100", 8, 32, 0, 8),  # 64 warps
        ("H100", 1, 32, 0, 32),  # 32 blocks
        ("RTX 4090", 8, 32, 0, 6),  # 48 warps
        ("H100", 8, 128, 0, 2),  # 4096 registers a warp, 16 warps
        ("H100", 8, 129, 0, 1),  # 4352: three warps of a quarter
        ("H100", 8, 186, 0, 1),
        ("H100", 4, 32, 56 * 1024, 4),  # 57 KB with what is reserved
        ("A100", 4, 32, 56 * 1024, 2),
        ("RTX 4090", 4, 32, 100 * 1024, 0),
    ],
)
def test_blocks_of_a_multiprocessor(name, warps, registers, shared, blocks):
    assert resident_blocks(GPUS[name], warps, registers, shared) == blocks


def test_a_block_that_does_not_fit_makes_a_second_wave():
    one, two = (
        modelled(GPUS["H100"], dataclasses.replace(WORK, blocks=blocks, units={}, trips=9))
        for blocks in (132 * 8, 132 * 8 + 1)
    )
    assert two.parts["latency"] == pytest.approx(2 * one.parts["latency"], rel=1e-3)


def test_each_resource_takes_its_counts_over_its_rate():
    gpu = GPUS["H100"]
    parts = modelled(gpu, WORK).parts
    seconds = 1e6 / 132 / 1.98e9  # ten blocks on every multiprocessor
    assert parts["fma"] == pytest.approx(seconds / 4)
    assert parts["alu"] == pytest.approx(seconds / 2)
    assert parts["issue"] == pytest.approx(2 * seconds / 4)
    assert parts["DRAM"] == pytest.approx(3.2e8 / 3.35e12 / 0.9)
    assert parts["L2"] == pytest.approx(3.2e8 / 5.5e12)
    assert modelled(gpu, WORK).roof == pytest.approx(3.2e8 / 3.35e12)


def test_what_overlaps_in_part_takes_longer_than_each():
    even = Time(dict.fromkeys(("DRAM", "L2", "port", "shared", "latency", "issue"), 1.0), 1)
    assert even.seconds == pytest.approx(3 ** (1 / 3))


def test_a_chain_of_loads_takes_its_latency_a_wave():
    gpu = GPUS["H100"]
    chain = Work("a chain", 132, 1, 32, 0, trips=100, sectors=1, moved=32, cold=32)
    expected = 100 * gpu.dram_cycles / 1.98e9
    assert modelled(gpu, chain).seconds == pytest.approx(expected)
    assert modelled(gpu, chain).bound == "latency"
    expected = 100 * gpu.l2_cycles / 1.98e9
    assert modelled(gpu, dataclasses.replace(chain, cold=0)).seconds == pytest.approx(expected)
    assert modelled(gpu, chain, in_l2=True).seconds == pytest.approx(expected)


def test_a_load_takes_half_as_long_again_at_the_whole_bandwidth():
    gpu = GPUS["H100"]
    busy = Work("a copy", 132, 1, 32, 0, trips=1, sectors=1e7, moved=3.2e8, cold=3.2e8)
    trip = gpu.dram_cycles / 1.98e9
    assert 1.49 * trip < modelled(gpu, busy).parts["latency"] <= 1.5 * trip


# ---- counts --------------------------------------------------------------------------------------

A100 = dataclasses.replace(GPUS["A100"], multiprocessors=16)
CALLS = {
    "a block a row": Problem(5, 1, 16, 256, 48),
    "rows in splits": Problem(4, 2, 72, 40, 24),
    "beams": Problem(5, 10, 72, 40, 24),
}


@pytest.fixture(scope="module")
def driver():
    return Counted("80", "80")


@needs_nvcc
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


@needs_nvcc
def test_bytes_of_a_step_are_those_of_its_tensors(driver):
    p = CALLS["a block a row"]
    (launch,) = driver.count(p, A100, False)
    read = p.batch * (p.keys * (p.hidden + p.value_size) + p.hidden) + p.hidden
    assert launch.counts["read"] == 2 * read
    assert launch.counts["written"] == p.batch * (2 * p.value_size + 4 * p.keys)


@needs_nvcc
def test_a_call_of_a_kernel_has_a_time(driver):
    found = driver.count(CALLS["a block a row"], A100, False)
    (work,) = works(found)
    assert (work.name, work.blocks, work.warps) == ("decode_forward 1", 5, 4)
    time = modelled(A100, work)
    assert 0 < time.roof < time.seconds < 1e-4


def test_the_l2_holds_a_call_or_not():
    gpu, chain = GPUS["H100"], Work("a chain", 1, 1, 32, 0, moved=3e7, cold=3e7, trips=9, sectors=1)
    assert in_graph(gpu, [chain], True) < in_graph(gpu, [chain])
    assert in_graph(gpu, [chain] * 2, True) == in_graph(gpu, [chain] * 2)


def test_what_eager_code_launches_and_moves():
    p = Problem(2, 3, 5, 7, 11, dtype=torch.float32)
    f, s = 2 * 3 * 5 * 7, 2 * 3 * 5
    inputs = 2 * (3 + 5) * 7 + 2 * (3 + 5) * 11
    assert (eager(p).launches, eager(p, backward=True).launches) == (5, 8)
    assert eager(p).moved == 4 * (4 * f + 4 * s + inputs)
    masked = dataclasses.replace(p, lens=(1, 5))
    assert eager(masked).launches == 9
    least = eager(p).floor(GPUS["H100"])
    assert least == pytest.approx(5 * 1.3e-6, rel=0.01)


# ---- the program ---------------------------------------------------------------------------------


def test_the_committed_results_have_every_call():
    with program.RESULTS.open(newline="") as file:
        found = {tuple(row.values())[:4] for row in csv.DictReader(file)}
    calls = product(program.PASSES, map(str, program.SHAPES), program.DTYPES, GPUS)
    assert found == set(calls)


def test_the_page_has_the_constants():
    text = (program.RESULTS.parents[2] / "docs" / "gpu.md").read_text()
    names = ("multiprocessors", "clock", "fma", "alu", "special", "tensor", "dram", "l2", "l2_mb",
             "l2_cycles", "dram_cycles")  # fmt: skip
    for name in names:
        numbers = " | ".join(f"{getattr(gpu, name):g}" for gpu in GPUS.values())
        assert f" | {numbers} |\n" in text, name
    assumed = (ASSUMED.dram_share, "of the bandwidth"), (ASSUMED.launch, "us lie between")
    for number, words in (
        *assumed,
        (ASSUMED.call, "us for a call"),
        (ASSUMED.host_launch, "us for each"),
    ):
        assert f"{number:g} {words}" in text
