"""Limits: one table, by family of processor, that the documents print from the code."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast import backends, limits

ROOT = Path(__file__).parents[2]


def test_the_page_prints_the_code():
    assert limits.describe() in (ROOT / "docs/limits.md").read_text()


def test_every_limit_says_what_it_is():
    for each in fields(limits.Limits):
        assert set(each.metadata) == {"unit", "decides", "measured by"}


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


def test_studies_pass_other_limits():
    attention = bf.AdditiveAttention(8, 8, 8)
    queries = torch.zeros(2, 1, 8)
    keys = torch.zeros(2, 10, 8)
    assert "one operator" in attention.explain(queries, keys)
    with limits.using(one_operator_work=0):
        assert "one operator" not in attention.explain(queries, keys)
    assert "one operator" in attention.explain(queries, keys)


def decided(batch, hidden, **options):
    queries, keys = torch.zeros(batch, 1, hidden), torch.zeros(batch, 50, hidden)
    weight, w_v = torch.zeros(hidden, hidden), torch.zeros(1, hidden)
    given = (queries, keys, keys, weight, weight, w_v, None, hidden, 0.0)
    return backends.decide(*given, **options)


@pytest.mark.skipif("cpu" not in backends.available(), reason="asks about the C++ kernels")
def test_routes():
    assert decided(1, 8).form == "one operator"
    assert decided(64, 512).form == "projected"
    assert decided(1, 512).form == "step"
    assert decided(1, 8, name="reference").form == "reference"
    with torch.autocast("cpu", torch.bfloat16):
        assert decided(1, 512).form == "projected"
    route = decided(1, 512)
    assert (route.backend, route.reuse, route.records) == ("cpu", True, False)
    assert route.reason == (
        "cpu: the fastest for CPU tensors; step: 512 elements of queries, of at most 4096"
    )
