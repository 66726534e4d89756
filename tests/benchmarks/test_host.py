"""A GPU's host without the GPU: what is measured there is the route of a GPU, and all of it."""

import sys

import pytest
import torch
from host_only import routed
from mock_cuda import kernel_of, launches, mock
from triton.backends.nvidia.driver import CudaLauncher

import bahdanau_fast as bf
from benchmarks import host
from benchmarks.bench import Runner
from benchmarks.tables import row_table
from benchmarks.workloads.shapes import HOST, Case, cases

pytestmark = pytest.mark.skipif(host.why_not() is not None, reason=str(host.why_not()))
STEP, CALL, BOTH = (case for case in cases("host") if case.table == "host")


def call_of(case, backend):
    """A call of our module; to be made on the route."""
    module = bf.AdditiveAttention(*[case.shape.hidden] * 3)
    with routed(backend), torch.set_grad_enabled(case.mode != "forward"):
        return host.call_of(module, case)


def test_a_walk_is_counted_by_file(monkeypatch):
    monkeypatch.setattr(host, "FOLDERS", ("/ours/",))
    there = {"apply": lambda function: function()}
    texts = {
        "/ours/low.py": "def low(): return [apply(int)]",
        "/theirs/between.py": "def between(f): return f()",
        "/ours/high.py": "def high(): low(); between(low); between(int); return int()",
    }
    for file, text in texts.items():
        exec(compile(text, file, "exec"), there)
    calls = []
    there["between"](lambda: calls.append(host.walk(there["high"])))
    assert calls == [host.Walk(calls=3, stays=5, rooms=2, returns=3)]


@pytest.mark.parametrize("case", [STEP, CALL], ids=["attend", "module"])
def test_cuda_launches_its_kernels(case):
    call = call_of(case, "cuda")
    with torch.no_grad(), routed("cuda"):
        call()
        mock().calls()
        mock().note(True)
        call()
    assert [kernel_of(launch) for launch in launches(mock().calls())] == ["decode_forward"]


def test_cuda_launches_backward():
    call = call_of(BOTH, "cuda")
    with routed("cuda"):
        mock().calls()
        mock().note(True)
        call()
    names = [kernel_of(launch) for launch in launches(mock().calls())]
    assert names == ["decode_forward", "decode_backward", "sum_parts"]


@pytest.mark.parametrize("case", [STEP, CALL, BOTH], ids=["attend", "module", "backward"])
def test_triton_launches_its_kernels(case):
    call, launched = call_of(case, "triton"), []

    def profile(frame, event, _):
        if event == "call" and frame.f_code is CudaLauncher.__call__.__code__:
            launched.append(frame.f_locals["gridX"])

    with torch.set_grad_enabled(case is BOTH), routed("triton"):
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
    assert len(launched) == 1 or (case is BOTH and len(launched) > 1)
    assert launched[0] == HOST.batch


def test_a_cpu_tensor_is_one_again():
    x = torch.ones(1)
    with routed("triton"):
        assert x.is_cuda
        assert not x.is_cpu
        assert x.device.type == "cuda"
        assert torch.empty(1, device=x.device) is not None
    assert x.is_cpu
    assert x.device == torch.device("cpu")
    assert "device" not in vars(torch.Tensor)


def test_a_row_has_everybody():
    case = Case("host", HOST, "full")
    with Runner(seconds=0.001) as runner:
        row = runner.row(case)
    assert row["skipped"] == {}
    ours = {host.ON_CPU, *host.ROUTES}
    assert row["seconds"].keys() == {host.OWN, *ours}
    assert row["host"].keys() == ours
    assert all(found["share"] > 0 and found["calls"] > 0 for found in row["host"].values())
    lines = "\n".join(row_table([row]))
    assert all(f"{name} {row['host'][name]['share']:.2f} of d2l eager" in lines for name in ours)
