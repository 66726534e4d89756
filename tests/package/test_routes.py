"""Where a call goes: by its sizes, the family of the processor and the backend asked for."""

import math
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast import backends, limits
from bahdanau_fast.backends.backend import Backend, Facts, Sizes
from bahdanau_fast.backends.cpu import CPU as CPU_KERNELS
from bahdanau_fast.backends.cuda import CUDA
from bahdanau_fast.backends.reference import REFERENCE
from bahdanau_fast.backends.route import GPU_STEP_HIDDEN, GPU_STEP_QUERIES, is_step, route
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.call import Call
from bahdanau_fast.checks import TorchState
from bahdanau_fast.ops.attention import attention

needs_cpu = pytest.mark.skipif("cpu" not in backends.available(), reason="asks about C++ kernels")


def test_this_processor_has_a_family():
    assert limits.LIMITS is limits.FAMILIES[limits.family()]
    with limits.using(few_rows=7):
        assert limits.LIMITS.few_rows == 7
    assert limits.LIMITS is limits.FAMILIES[limits.family()]


@pytest.mark.parametrize(
    ("maker", "number", "family"),
    [
        *(("AuthenticAMD", 25, "amd"), ("AuthenticAMD", 26, "zen5"), ("GenuineIntel", 6, "intel")),
        *(("HygonGenuine", 24, "x86"), ("AuthenticAMD", None, "amd"), (None, None, "x86")),
    ],
)
def test_families(maker, number, family, monkeypatch):
    lines = {"processor": 0, "vendor_id": maker, "cpu family": number, "flags": "fpu: vme"}
    text = "\n".join(f"{name}\t: {x}" for name, x in lines.items() if x is not None)
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert limits.family() == family
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert limits.family() == "arm"


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
    sizes=Sizes(64, 1, 100, query_size=512, key_size=512, value_size=512, hidden=512),
    state=TorchState(),
    sharded=False,
    general=False,
    projected_only=False,
    requested=None,
    available=(CUDA, TRITON, REFERENCE),
    queries_projected=False,
    keys_projected=True,
    called=False,
    drops=False,
)


def routed(**changes):
    """The route of that step with some facts changed, also those of its sizes and state."""
    facts = GPU_STEP
    for field in ("sizes", "state"):
        part = getattr(facts, field)
        its = {name: changes.pop(name) for name in part._fields if name in changes}
        facts = facts._replace(**{field: part._replace(**its)})
    facts = facts._replace(**changes)
    sizes, traced = facts.sizes, facts.state.traced
    step = is_step(traced, sizes.queries_len, sizes.hidden, facts.general)
    return route(facts, step or (traced and facts.requested == "cuda"))


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
        ({"projected_only": True}, "projected"),
        ({"traced": True}, "projected"),
        ({"autocast": True}, "projected"),
        ({"called": True}, "called"),
        ({"requested": "reference", "available": (REFERENCE,)}, "reference"),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [CUDA, TRITON], ids=lambda backend: backend.name)
def test_routes_of_gpus(first, changes, form):
    available = GPU_STEP.available[GPU_STEP.available.index(first) :]
    found = routed(**{"available": available, **changes})
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
    backend = CPU_KERNELS if "device" in changes else TRITON
    found = routed(available=(backend, REFERENCE), **changes)
    assert found.backend == backend.name
    assert (found.fp32_weights, found.narrow) == (fp32_weights, narrow)


@pytest.mark.parametrize(
    "changes", [{"queries_len": 17}, {"hidden": 2049}, {"traced": True}, {"general": True}]
)
def test_what_is_no_step_is_for_triton(changes):
    need = (
        "serve more than steps of at most 16 queries and 2048 hidden units, with nothing but tanh "
        "inside"
    )
    assert routed().backend == "cuda"
    found = routed(**changes)
    assert (found.backend, found.reason.split(";")[0]) == (
        "triton",
        f"triton: cuda does not {need}",
    )
    found = routed(**changes, available=(CUDA, REFERENCE))
    assert (found.backend, found.form) == ("reference", "reference")
    assert found.reason.startswith(f"reference: cuda does not {need};")
    requested = {"requested": "cuda", "available": (CUDA, REFERENCE)}
    if "traced" in changes:  # its sizes are not known
        assert routed(**changes, **requested).backend == "cuda"
        return
    with pytest.raises(ValueError, match=f"backend must {need}, got 'cuda'"):
        routed(**changes, **requested)


@pytest.mark.parametrize("backend", [TRITON, CUDA], ids=lambda backend: backend.name)
def test_the_reference_serves_float64_on_a_gpu(backend):
    changes = {"dtype": torch.float64, "available": (backend, REFERENCE)}
    found = routed(**changes)
    assert (found.backend, found.form) == ("reference", "reference")
    need, name = "serve torch.float64 tensors", backend.name
    assert found.reason.startswith(f"reference: {name} does not {need};")
    with pytest.raises(ValueError, match=f"backend must {need}, got '{name}'"):
        routed(**changes, requested=name)


def test_a_backend_is_one_object(monkeypatch):
    class Toy(Backend):
        name, device, serves = "toy", "cpu", "the reference in disguise"

        def refuses(self, dtype, step):
            return "serve more than one dtype" if dtype != torch.float32 else None

    def kernel(queries, keys, values, w_v, w_q, w_k, bias, *rest):
        ran.append("toy")
        return bf.reference.additive_attention(queries, keys, values, w_q, w_k, w_v, bias=bias)

    ran = []
    monkeypatch.setitem(backends.BACKENDS, "toy", Toy())
    monkeypatch.setitem(attention.in_python, "toy", kernel)
    module = bf.AdditiveAttention(8, 8, 8).eval().requires_grad_(False)
    inputs = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 4)
    with backends.use("toy"):
        result = module(*inputs, None)
        assert module.explain(*inputs[:2]).startswith("toy: requested by name; one operator")
        with pytest.raises(ValueError, match="backend must serve more than one dtype, got 'toy'"):
            module.double()(*(x.double() for x in inputs), None)
    assert ran == ["toy"]
    assert "toy" in backends.available()
    assert "the reference in disguise" in backends.explain()
    torch.testing.assert_close(result, module.float()(*inputs, None))


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
