"""A mock GPU for each test of csrc/cuda on the mock CUDA runtime."""

import pytest
from mock_cuda import mock


@pytest.fixture
def gpu():
    """A mock GPU that nothing was asked of."""
    gpu = mock()
    gpu.new_gpu()
    gpu.calls()
    gpu.last_error()
    return gpu
