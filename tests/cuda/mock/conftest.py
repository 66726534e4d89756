"""The fixture of the mock GPU."""

import platform
import shutil

import pytest
import torch
from mock_cuda import mock


@pytest.fixture
def gpu():
    """A mock GPU that nothing was asked of."""
    if platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None:
        pytest.skip("the mock includes fibers for x86-64, and is compiled by g++")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, its extension defines the operators")
    gpu = mock()
    gpu.new_gpu()
    gpu.calls()
    gpu.last_error()
    return gpu
