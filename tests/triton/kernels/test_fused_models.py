"""The attention of others' modules reaches a Triton kernel once it is fused."""

import sys
from pathlib import Path

import parity
import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast.fuse import report
from bahdanau_fast.kernels.decode import decode_kernel

sys.path.append(str(Path(__file__).parents[2] / "fuse"))
import driving


@pytest.mark.parametrize("name", driving.PEERS)
def test_a_fused_module_launches_kernels(name, monkeypatch):
    monkeypatch.setattr(report, "LEAST", 0)  # small calls, too
    kind, launches = type(decode_kernel), []  # compiled, or interpreted
    run_one = kind.run
    monkeypatch.setattr(kind, "run", lambda *a, **k: launches.append(a) or run_one(*a, **k))
    torch.manual_seed(0)
    module = driving.PEERS[name].make().eval().to(parity.DEVICE)

    def run():
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.randn(shape, generator=generator).to(parity.DEVICE)

        with torch.no_grad():
            return [result.clone() for _, result in driving.PEERS[name].drive(module, draw)]

    run()  # makes what is lazy
    plain = run()
    assert bf.fuse(module)
    with bf.backends.use("triton"):
        run()  # is checked
        launches.clear()
        fused = run()
    assert len(launches) >= len(driving.SOURCES) * driving.STEPS
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
