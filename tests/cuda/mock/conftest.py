"""A mock GPU for each test of csrc/cuda on the mock CUDA runtime."""

import pytest
import torch
from mock_cuda import mock


@pytest.fixture
def gpu():
    """A mock GPU that nothing was asked of."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, its extension defines the operators")
    gpu = mock()
    gpu.new_gpu()
    gpu.calls()
    gpu.last_error()
    return gpu
