"""Runs a part of ``tests/triton/kernels`` in Triton's interpreter, in a process of its own.

It has to be asked for before Python starts. Parts are files of their own, so that two workers share
them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "test_contract"


def passes(chosen, least):
    """Assert that the chosen tests pass, ``least`` of them at least, and that none is skipped."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/triton/kernels", "-k", chosen],
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
