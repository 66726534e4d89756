"""Where a call goes: by its sizes, the family of the processor and the backend asked for."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast import backends, limits
from bahdanau_fast.backends.route import (
    GPU_STEP_HIDDEN,
    GPU_STEP_QUERIES,
    Facts,
    route,
)
from bahdanau_fast.call import Call

needs_cpu = pytest.mark.skipif("cpu" not in backends.available(), reason="asks about C++ kernels")


def test_this_processor_has_a_family():
    assert limits.LIMITS is limits.FAMILIES[limits.family()]
    with limits.using(few_rows=7):
        assert limits.LIMITS.few_rows == 7
    assert limits.LIMITS is limits.FAMILIES[limits.family()]


def test_numbers_that_stand_in_two_languages():
    header = (Path(__file__).parents[2] / "csrc/common/limits.h").read_text()
    numbers = {
        "kDecodeQueries": GPU_STEP_QUERIES,
        "kDecodeHidden": GPU_STEP_HIDDEN,
    }
    for name, ours in numbers.items():
        factors = re.search(rf"\b{name} = ([\d *]+)", header)[1].split("*")
        assert math.prod(map(int, factors)) == ours, name


def decided(batch, hidden, keys_projected=False, backend=None):
    queries, keys = torch.zeros(batch, 1, hidden), torch.zeros(batch, 50, hidden)
    weight, w_v = torch.zeros(hidden, hidden), torch.zeros(1, hidden)
    w_k = None if keys_projected else weight
    return backends.decide(Call(queries, keys, keys, w_v, weight, w_k, backend=backend))


@needs_cpu
def test_routes():
    assert decided(1, 8).form == "one operator"
    assert decided(64, 512).form == "projected"
    assert decided(1, 512).form == "step"
    assert decided(1, 8, backend="reference").form == "reference"
    with torch.autocast("cpu", torch.bfloat16):
        assert decided(1, 512).form == "projected"
    found = decided(1, 512)
    assert (found.backend, found.reuse, found.records) == ("cpu", True, False)
    assert found.reason == (
        "cpu: the fastest for CPU tensors; step: 512 elements of queries, of at most 4096"
    )


@needs_cpu
def test_a_module_says_where_a_call_goes():
    attention = bf.AdditiveAttention(8, 8, 8)
    assert "one operator" in attention.explain(torch.zeros(2, 1, 8), torch.zeros(2, 10, 8))


@needs_cpu
def test_one_query_on_keys_that_came_projected_reads_no_table():
    assert not decided(16, 512, keys_projected=True).table
    assert decided(16, 512).table


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
    plain_inputs=False,
    general=False,
)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "one operator"),
        ({"query_size": 8192, "queries_len": 10}, "one operator"),
        ({"records": True}, "one operator"),
        ({"drops": True}, "one operator"),
        ({"value_size": 2049}, "one operator"),
        ({"keys_projected": False}, "one operator"),
        ({"queries_projected": True}, "one operator"),
        ({"queries_len": 100, "keys_projected": False, "records": True}, "one operator"),
        ({"general": True}, "projected"),
        ({"traced": True}, "projected"),
        ({"autocast": True}, "projected"),
        ({"called": True}, "called"),
        ({"asked": "reference"}, "reference"),
    ],
    ids=str,
)
@pytest.mark.parametrize("there", ["cuda", "triton"])
def test_routes_of_gpus(there, changes, form):
    there = GPU_STEP.there[GPU_STEP.there.index(there) :]
    found = route(GPU_STEP._replace(there=there, **changes))
    assert (found.form, found.fused) == (form, form not in ("called", "reference"))


@pytest.mark.parametrize(
    ("changes", "fp32_weights", "narrow"),
    [
        ({}, False, True),
        ({"autocast": True}, True, False),
        ({"device": "cpu"}, False, True),
        ({"device": "cpu", "autocast": True}, False, True),
        ({"device": "cpu", "records": True}, False, False),
        ({"device": "cpu", "traced": True}, False, False),
    ],
    ids=str,
)
def test_the_dtype_of_the_weights(changes, fp32_weights, narrow):
    facts = GPU_STEP._replace(**{"there": ("cpu", "triton", "reference"), **changes})
    found = route(facts)
    assert found.backend == {"cpu": "cpu", "cuda": "triton"}[facts.device]
    assert (found.fp32_weights, found.narrow) == (fp32_weights, narrow)


@pytest.mark.parametrize(
    "changes", [{"queries_len": 17}, {"hidden": 2049}, {"traced": True}, {"general": True}]
)
def test_what_is_no_step_is_for_triton(changes):
    facts = GPU_STEP._replace(**changes)
    why = (
        "CUDA C++ has steps of at most 16 queries and 2048 hidden units, with nothing but tanh "
        "inside, alone"
    )
    assert route(GPU_STEP).backend == "cuda"
    found = route(facts)
    assert (found.backend, found.reason.startswith(f"triton: {why};")) == ("triton", True)
    found = route(facts._replace(there=("cuda", "reference")))
    assert (found.backend, found.form) == ("reference", "reference")
    assert found.reason.startswith(f"reference: {why}, and Triton is not there")
    if facts.traced:  # its sizes are not known
        assert route(facts._replace(asked="cuda")).backend == "cuda"
        return
    with pytest.raises(
        ValueError, match="backend must serve more than steps of at most 16 queries"
    ):
        route(facts._replace(asked="cuda"))


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_the_reference_serves_float64_on_a_gpu(name):
    facts = GPU_STEP._replace(dtype=torch.float64, there=(name, "reference"))
    found = route(facts)
    assert (found.backend, found.form) == ("reference", "reference")
    assert found.reason.startswith("reference: torch.float64 has no GPU kernels")
    with pytest.raises(ValueError, match=f"backend must serve torch.float64 tensors, got '{name}'"):
        route(facts._replace(asked=name))


# ---- a backend by name ---------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_use_nests_and_restores():
    assert backends.resolve(CPU) == "cpu"
    with backends.use("reference"):
        assert backends.resolve(CPU) == "reference"
        with backends.use("cpu"):
            assert backends.resolve(CPU) == "cpu"
            with backends.use("auto"):
                assert backends.resolve(CPU) == "cpu"
        assert backends.resolve(CPU) == "reference"
        with backends.use("auto"):
            assert backends.resolve(CPU) == "cpu"
        assert backends.resolve(CPU, "cpu") == "cpu"
    assert backends.resolve(CPU) == "cpu"


def test_use_restores_after_an_error():
    def fail():
        with backends.use("reference"):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert backends.resolve(CPU) == "cpu"


def test_use_decides_who_computes(monkeypatch):
    asked = []
    real = bf.reference.attend
    monkeypatch.setattr(bf.reference, "attend", lambda *a: asked.append(1) or real(*a))
    q, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    call = (q, q, q, w, w, torch.randn(5))
    results = [bf.additive_attention(*call)[0]]
    assert asked == []
    with backends.use("reference"):
        results.append(bf.additive_attention(*call)[0])
        assert len(asked) == 1
        results.append(bf.additive_attention(*call, backend="cpu")[0])
        assert len(asked) == 1
    results.append(bf.additive_attention(*call, backend="reference")[0])
    assert len(asked) == 2
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_explain():
    text = backends.explain()
    lines = text.splitlines()
    assert lines[0] == "auto takes 'cpu' for cpu tensors"
    name = sys.modules["bahdanau_fast._C_cpu"].instruction_set()
    states = {line.split()[0]: line.split() for line in lines[1:]}
    assert states["cpu"] == [
        "cpu",
        "available:",
        *f"fused C++ for CPU tensors, {name} kernels".split(),
    ]
    assert states["reference"][:2] == ["reference", "available:"]
    with backends.use("reference"):
        assert "forced to 'reference'" in backends.explain()
    assert backends.explain("meta").startswith("auto takes 'reference' for meta tensors")
    assert backends.available() == ("cpu", "reference")
