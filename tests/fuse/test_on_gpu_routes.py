"""Every style reaches a GPU's kernels, on routes whose launches do nothing."""

from functools import partial

import pytest
import torch
from beside import results
from conftest import watched
from host_only import routed
from mock_cuda import kernel_of, launches, mock
from styles import STYLES
from triton.backends.nvidia.driver import CudaLauncher

import bahdanau_fast as bf
from bahdanau_fast import backends

FUSED = [name for name, style in STYLES.items() if not style.reason]


@pytest.fixture
def launched(monkeypatch):
    """What Triton launches."""
    found, call = [], CudaLauncher.__call__
    monkeypatch.setattr(CudaLauncher, "__call__", lambda *a: found.append(a) or call(*a))
    return found


@pytest.fixture(autouse=True)
def devices_are_alike(monkeypatch):
    """So that what was shown on a CPU is of the same kind on the route."""
    of = watched._kind_of

    def kind(x):
        return (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else of(x)

    monkeypatch.setattr(watched, "_kind_of", kind)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", FUSED)
def test_a_style_reaches_kernels(name, backend, launched):
    torch.manual_seed(0)
    (inputs, leaves), module = STYLES[name].drawn(), STYLES[name].make().eval()
    bf.fuse(module, always=True)
    for _ in range(4):
        results(partial(module, *inputs), leaves, module)
    with routed(backend):
        backends._routes.clear()
        if backend == "cuda":
            mock().note(True)
        results(partial(module, *inputs), leaves, module)
        found = launched or [kernel_of(each) for each in launches(mock().calls())]
        routes = list(backends._routes.values())
    general = any(route.general for route in routes)  # scores alone, other activations: Triton's
    expected = "reference" if general and backend == "cuda" else backend
    assert {route.backend for route in routes} == {expected}
    # The dispatcher, which general ones pass through, sees CPU tensors: ../triton/kernels.
    assert len(found) > 1 or general
