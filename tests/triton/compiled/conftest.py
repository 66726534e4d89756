"""Tests of compiled code that launches Triton's kernels, without a GPU: on tensors of the CPU.

What serves those is decided for a whole process: ../test_triton.py runs this folder in its own.
"""

import importlib
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import bahdanau_fast as bf
from bahdanau_fast import backends
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.ops import operator

TESTS = Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "ptx"), str(TESTS / "cuda")]

if os.environ.get("TRITON_SERVES_CPU") == "1":
    implement = operator.implement

    def on_the_cpu(backend, _, **more):
        implement(backend, "CPU", **more)

    with patch.object(operator, "implement", on_the_cpu):
        importlib.import_module("bahdanau_fast.backends.triton.register")
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def by_triton():
    why_not = {"cuda": "it is left out"}.get
    with (
        patch.object(TRITON, "device", "cpu"),  # which serves the CPU
        patch.object(backends, "why_not", why_not),
        bf.backends.use("triton"),
    ):
        yield
