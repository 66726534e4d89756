"""The arithmetic of the model, on cases that can be worked out by hand."""

import dataclasses

import pytest

from gpu_model.gpus import GPUS, LIMITS, SOURCES, Gpu
from gpu_model.times import Time, Work, modelled, resident_blocks

WORK = Work("a kernel", 1320, 8, 32, 0, {"fma": 1e6, "alu": 1e6}, sectors=1e7, moved=3.2e8)


def test_every_constant_is_there_with_its_source():
    assert set(SOURCES) == {field.name for field in dataclasses.fields(Gpu)}
    assert list(GPUS) == ["A100", "H100", "H200", "RTX 4090", "B200"]
    for gpu in GPUS.values():
        assert gpu.code in LIMITS
        assert all(value > 0 for value in dataclasses.astuple(gpu)[2:])
        assert gpu.dram < gpu.l2
        assert gpu.l2_cycles < gpu.dram_cycles


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


@pytest.mark.parametrize(("blocks", "waves"), [(1, 1), (132 * 8, 1), (132 * 8 + 1, 2)])
def test_waves(blocks, waves):
    assert modelled(GPUS["H100"], dataclasses.replace(WORK, blocks=blocks)).waves == waves


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
    even = Time(dict.fromkeys(("DRAM", "L2", "port", "shared", "latency", "issue"), 1.0), 1, 1, 1)
    assert even.seconds == pytest.approx(3 ** (1 / 3))


def test_blocks_on_a_part_of_the_multiprocessors_take_longer():
    few = modelled(GPUS["H100"], dataclasses.replace(WORK, blocks=66))
    whole = modelled(GPUS["H100"], WORK)
    assert few.parts["issue"] == pytest.approx(2 * whole.parts["issue"])
    assert few.parts["port"] == pytest.approx(2 * whole.parts["port"])


@pytest.mark.parametrize("name", GPUS)
def test_twice_the_bytes_take_twice_the_time(name):
    once, twice = (
        modelled(GPUS[name], dataclasses.replace(WORK, sectors=k * 1e7, moved=k * 3.2e8))
        for k in (1, 2)
    )
    assert once.bound == twice.bound == "DRAM"
    assert twice.parts["DRAM"] == pytest.approx(2 * once.parts["DRAM"])
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=0.05)
    assert twice.roof == pytest.approx(2 * once.roof)


def test_a_chain_of_loads_takes_its_latency_a_wave():
    gpu = GPUS["H100"]
    chain = Work("a chain", 132, 1, 32, 0, trips=100, sectors=1, moved=32)
    expected = 100 * gpu.dram_cycles * 1.5 / 1.98e9
    assert modelled(gpu, chain).seconds == pytest.approx(expected)
    assert modelled(gpu, chain).bound == "latency"
    cached = dataclasses.replace(chain, moved=0)
    assert modelled(gpu, cached).seconds == pytest.approx(100 * gpu.l2_cycles * 1.5 / 1.98e9)
