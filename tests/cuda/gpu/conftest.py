"""Tests of the CUDA C++ kernels where they run: on a GPU. test_cuda_kernels.py runs their source on
the host.
"""

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
