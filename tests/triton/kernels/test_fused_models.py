"""The attention of others' modules, and every style of writing it, reaches a Triton kernel."""

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
from styles import STYLES
from test_styles import run as with_gradients
from test_styles import same


@pytest.fixture
def launches(monkeypatch):
    """The launches of kernels; small calls are fused, too."""
    monkeypatch.setattr(report, "LEAST", 0)
    kind, found = type(decode_kernel), []  # compiled, or interpreted
    run_one = kind.run
    monkeypatch.setattr(kind, "run", lambda *a, **k: found.append(a) or run_one(*a, **k))
    torch.manual_seed(0)
    return found


@pytest.mark.parametrize("name", driving.PEERS)
def test_a_fused_module_launches_kernels(name, launches):
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


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if not style.reason])
def test_a_fused_style_launches_kernels(name, launches):
    module, leaves = STYLES[name].make().eval().to(parity.DEVICE), []
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        leaves.append(torch.randn(shape, generator=generator).to(parity.DEVICE).requires_grad_())
        return leaves[-1]

    inputs = STYLES[name].inputs(draw)
    plain = with_gradients(module, inputs, leaves)
    assert bf.fuse(module)
    with bf.backends.use("triton"):
        for _ in range(2):  # are checked
            with_gradients(module, inputs, leaves)
        launches.clear()
        fused = with_gradients(module, inputs, leaves)
    assert len(launches) >= 2  # forward and backward
    for ours, theirs in zip(fused, plain, strict=True):
        same(ours, theirs, torch.float32)
