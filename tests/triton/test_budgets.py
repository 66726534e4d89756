"""Every Triton kernel compiles for GPUs that are not here, within what such a GPU has."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.budgets import limits_of

ROOT = Path(__file__).resolve().parents[2]
# Targets, dtypes and options of a process each, two at a time. Quick: the acceptance shapes once.
# Deep: every real shape in one dtype on one target, the acceptance shapes elsewhere, each target
# and each dtype somewhere. `make budgets` compiles them all.
QUICK = [(["sm_90"], ["bf16"], ["--quick"])]
DEEP = [
    (["sm_90"], ["bf16"], []),
    (["sm_80", "sm_90", "gfx942"], ["fp32"], ["--quick"]),
    (["sm_80"], ["bf16"], ["--quick"]),
    (["sm_90", "sm_100"], ["fp16"], ["--quick"]),
]
FORWARD = {"step", "scores", "softmax", "tables"}
BACKWARD = {"grad_weights", "grad_softmax", "grad_values", "grad_tanh"}


@pytest.fixture(
    scope="module",
    params=[QUICK, pytest.param(DEEP, marks=pytest.mark.deep)],
    ids=["quick", "deep"],
)
def runs(request):
    return request.param


@pytest.fixture(scope="module")
def rows(runs, tmp_path_factory):
    """Rows of what ``make budgets`` prints."""
    folder = tmp_path_factory.mktemp("budgets")

    def compiled(number):
        targets, dtypes, more = runs[number]
        out = folder / f"{number}.json"
        command = ["--targets", *targets, "--dtypes", *dtypes, "--json", str(out), *more]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.budgets", *command],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
        return json.loads(out.read_text())

    with ThreadPoolExecutor(2) as pool:
        return [row for found in pool.map(compiled, range(len(runs))) for row in found]


def test_every_kernel_in_every_run(runs, rows):
    for targets, dtypes, _ in runs:
        for run in itertools.product(targets, dtypes):
            kernels = {row["kernel"] for row in rows if (row["target"], row["dtype"]) == run}
            assert kernels >= FORWARD | BACKWARD, run


def test_shared_memory_is_within_the_limit(rows):
    for row in rows:
        assert row["shared"] <= limits_of(row["target"]).shared, row


def test_nothing_spills(rows):
    assert [row for row in rows if row["spills"]] == []


def test_many_queries_take_a_quarter_of_a_reciprocal(runs, rows):
    seen = 0
    for row in rows:
        if row["kernel"] == "scores" and row["dtype"] != "fp32" and row["target"] == "sm_90":
            rates = {rate["way"]: rate for rate in row["rates"]}
            assert rates["factored"]["special"] <= 0.3, row
            assert rates["factored"]["fma"] <= 4.0, row
            # The other branch takes an exponential per element.
            assert rates["direct"]["special"] >= 1.0, row
            seen += 1
    assert seen >= (4 if runs is DEEP else 1)


def test_a_step_computes_faster_than_memory_is_read(rows):
    # Half types, H = Dv: 4 bytes per element from 4.3 TB/s.
    steps = [r for r in rows if r["kernel"] == "step" and r["target"] == "sm_90"]
    for row in steps:
        if row["dtype"] != "fp32" and "Q1 " in row["tiles"]:
            assert row["rates"][0]["bound"] > 1.1e12, row
