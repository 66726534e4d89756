"""Limits: one table, by family of processor, that the documents print from the code."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast import backends, limits
from bahdanau_fast.backends.route import Facts, route
from bahdanau_fast.call import Call
from benchmarks import command
from benchmarks.studies import dispatch_limits

ROOT = Path(__file__).parents[2]


def test_the_page_prints_the_code():
    page = (ROOT / "docs/limits.md").read_text()
    tables = limits.describe().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert f"\n\n{table}\n" in page


@pytest.mark.parametrize("kind", [limits.Limits, limits.GpuLimits, limits.PrecisionLimits])
def test_every_limit_says_what_it_is(kind):
    for each in fields(kind):
        assert list(each.metadata) == ["unit", "decides", "measured by"]
        assert all(each.metadata.values())


@pytest.mark.parametrize("family", limits.FAMILIES)
def test_a_family_can_be_forced(family):
    code = "from bahdanau_fast import limits as l; print(l.family(), l.LIMITS.onednn_work)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BAHDANAU_FAST_LIMITS": family},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [family, str(limits.FAMILIES[family].onednn_work)]


def test_a_family_nobody_knows(monkeypatch):
    monkeypatch.setenv("BAHDANAU_FAST_LIMITS", "z80")
    with pytest.raises(ValueError, match="must be one of amd, intel, x86, arm, got 'z80'"):
        limits.family()


def test_the_bench_measures_every_limit():
    measured = [name for choice in dispatch_limits.CHOICES for name in choice.limits]
    assert sorted(measured) == sorted(each.name for each in fields(limits.Limits))
    commands = {each.metadata["measured by"] for each in fields(limits.Limits)}
    assert commands == {f"python -m bahdanau_fast bench --only {command.LIMITS}"}


def test_studies_pass_other_limits():
    attention = bf.AdditiveAttention(8, 8, 8)
    queries = torch.zeros(2, 1, 8)
    keys = torch.zeros(2, 10, 8)
    assert "one operator" in attention.explain(queries, keys)
    with limits.using(one_operator_work=0):
        assert "one operator" not in attention.explain(queries, keys)
    assert "one operator" in attention.explain(queries, keys)


def decided(batch, hidden, projected=False, backend=None):
    queries, keys = torch.zeros(batch, 1, hidden), torch.zeros(batch, 50, hidden)
    weight, w_v = torch.zeros(hidden, hidden), torch.zeros(1, hidden)
    w_k = None if projected else weight
    return backends.decide(Call(queries, keys, keys, w_v, weight, w_k, backend=backend))


@pytest.mark.skipif("cpu" not in backends.available(), reason="asks about the C++ kernels")
def test_routes():
    assert decided(1, 8).form == "one operator"
    assert decided(64, 512).form == "projected"
    assert decided(1, 512).form == "step"
    assert decided(1, 8, backend="reference").form == "reference"
    with torch.autocast("cpu", torch.bfloat16):
        assert decided(1, 512).form == "projected"
    route = decided(1, 512)
    assert (route.backend, route.reuse, route.records) == ("cpu", True, False)
    assert route.reason == (
        "cpu: the fastest for CPU tensors; step: 512 elements of queries, of at most 4096"
    )


@pytest.mark.skipif("cpu" not in backends.available(), reason="asks about the C++ kernels")
def test_one_query_on_keys_that_came_projected_reads_a_table_only_in_fp64():
    assert decided(1, 64, projected=True).table
    assert not decided(16, 512, projected=True).table
    assert decided(16, 512).table


@pytest.mark.parametrize(
    ("capability", "hip", "family"),
    [
        ((8, 0), None, "sm_80"),
        ((8, 6), None, "sm_86"),
        ((8, 7), None, "sm_80"),
        ((8, 9), None, "sm_86"),
        ((9, 0), None, "sm_90"),
        ((10, 3), None, "sm_90"),
        ((12, 0), None, "sm_120"),
        ((9, 4), "6.4", "other"),
    ],
)
def test_the_family_of_a_gpu(monkeypatch, capability, hip, family):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    of_gpu = limits.of_gpu.__wrapped__  # its cache is by device
    assert of_gpu(torch.device("cuda:0")) is limits.GPU_FAMILIES[family]
    assert of_gpu(torch.device("cpu")) is limits.OTHER_GPU


# A step of one query on a GPU, from raw queries and projected keys of 512 units.
GPU_STEP = Facts(
    device="cuda",
    dtype=torch.bfloat16,
    batch=64,
    queries_len=1,
    keys_len=100,
    query_size=512,
    key_size=512,
    value_size=512,
    hidden=512,
    queries_projected=False,
    keys_projected=True,
    called=False,
    records=False,
    drops=False,
    traced=False,
    plain_only=False,
    autocast=False,
    asked=None,
    there=("cuda", "triton", "reference"),
    interpreted=False,
)
TRITON = {"there": ("triton", "reference")}


@pytest.mark.parametrize(
    ("family", "changes", "form"),
    [
        # W_q has 512 KB: a cluster of eight blocks reads 64 KB each.
        ("sm_90", {}, "step"),
        ("sm_90", {"query_size": 513}, "projected"),
        ("sm_90", TRITON, "projected"),
        ("sm_80", {}, "projected"),
        ("sm_80", {"query_size": 64}, "step"),
        ("sm_80", {"query_size": 16, "queries_len": 4}, "step"),
        ("sm_80", {"query_size": 16, "queries_len": 5}, "projected"),
        ("sm_90", {"records": True}, "projected"),
        ("sm_90", {"drops": True}, "projected"),
        ("other", {**TRITON, "query_size": 64, "drops": True}, "step"),
        ("sm_90", {"value_size": 2049}, "projected"),
        ("sm_80", {"query_size": 64, "value_size": 257}, "step"),
        ("sm_80", {"query_size": 32, "value_size": 257, "dtype": torch.float32}, "projected"),
        # A tile of values: 16 of 2048 features, which Triton keeps in shared memory.
        ("sm_86", {**TRITON, "query_size": 16, "queries_len": 2, "value_size": 2048}, "step"),
        ("other", {**TRITON, "query_size": 16, "queries_len": 2, "value_size": 2048}, "projected"),
        ("other", {"query_size": 16, "queries_len": 2, "value_size": 2048}, "step"),
        ("sm_90", {"keys_projected": False}, "raw"),
        ("sm_80", {"keys_projected": False}, "raw keys"),
        ("sm_80", {"keys_projected": False, "queries_len": 5}, "projected"),
        ("other", {**TRITON, "keys_projected": False, "queries_len": 5}, "raw keys"),
        ("sm_80", {"keys_projected": False, "keys_len": 10_000}, "projected"),
        ("sm_90", {"keys_projected": False, "dtype": torch.float32}, "projected"),
    ],
)
def test_routes_of_gpus(family, changes, form):
    facts = GPU_STEP._replace(**changes)
    assert route(facts, limits.LIMITS, limits.GPU_FAMILIES[family]).form == form


def test_studies_pass_other_limits_of_a_gpu():
    limited = replace(limits.GPU_FAMILIES["sm_90"], own_queries=0)
    assert route(GPU_STEP, limits.LIMITS, limited).form == "projected"
