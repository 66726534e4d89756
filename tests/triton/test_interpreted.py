"""The Triton kernels in Triton's interpreter, in a process of its own.

It has to be asked for before Python starts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("chosen", "least"),
    [("not deep", 50), pytest.param("deep", 140, marks=pytest.mark.deep)],
)
def test_the_kernels_in_the_interpreter(chosen, least):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/triton/kernels", "-m", chosen],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout[-5000:], result.stderr[-2000:])
    assert result.returncode == 0
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= least
    assert "skipped" not in result.stdout
