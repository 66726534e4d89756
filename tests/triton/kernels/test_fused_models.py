"""The attention of others' modules, and every style of writing it, reaches a Triton kernel."""

import functools

import driving
import parity
import pytest
import torch
from beside import results, same
from styles import STYLES

import bahdanau_fast as bf
from bahdanau_fast.kernels.decode import decode_kernel

FUSED = [name for name, style in STYLES.items() if not style.reason]


@pytest.fixture
def launches(monkeypatch):
    """The launches of kernels."""
    kind, found = type(decode_kernel), []  # compiled, or interpreted
    run_one = kind.run
    monkeypatch.setattr(kind, "run", lambda *a, **k: found.append(a) or run_one(*a, **k))
    return found


@pytest.fixture(autouse=True)
def device():
    """Where masks and lengths are made, too."""
    torch.manual_seed(0)
    with torch.device(parity.DEVICE):
        yield


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *s: torch.randn(s, generator=generator, device="cpu").to(parity.DEVICE)


def peer(name):
    """A peer's module, and a function that takes steps with it."""
    module = driving.PEERS[name].make().eval().to(parity.DEVICE)

    def run():
        with torch.no_grad():
            return [result.clone() for _, result in driving.PEERS[name].drive(module, drawing(3))]

    run()  # makes what is lazy
    return module, run


def style(name):
    """A module of a style, and a function that gives its results and gradients."""
    module, leaves, draw = STYLES[name].make().eval().to(parity.DEVICE), [], drawing(1)

    def leaf(*shape):
        leaves.append(draw(*shape).requires_grad_())
        return leaves[-1]

    inputs = STYLES[name].inputs(leaf)
    return module, functools.partial(results, functools.partial(module, *inputs), leaves, module)


ALL = [*((peer, name) for name in driving.PEERS), *((style, name) for name in FUSED)]


@pytest.mark.parametrize(("make", "name"), ALL)
def test_a_fused_module_launches_kernels(make, name, launches):
    module, run = make(name)
    plain = run()
    assert bf.fuse(module, always=True)
    for _ in range(6):  # the first are noted
        run()
    with bf.backends.use("triton"):
        fused = run()
    least = len(driving.SOURCES) * driving.STEPS if make is peer else 2  # forward and backward
    assert len(launches) >= least
    same(fused, plain, 1e-5 if make is peer else 2.0**-13)
