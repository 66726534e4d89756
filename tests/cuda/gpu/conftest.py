"""Tests of the CUDA C++ kernels where they run: on a GPU. tests/test_cuda_kernels.py runs their
source on the host.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
