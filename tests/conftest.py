"""Workers that share the suite keep out of each other's way, and end together."""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest

# Workers share the cores: a thread that waits must not spin, or numeric tests take four times as
# long. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles and loads a program for each instruction set that the processor has, else.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# pytest has put this folder there, and `python -m` the root. `import triton` and `import kernels`
# must find the packages or nothing, not a folder of ours. The root is last, for `benchmarks`: an
# installed bahdanau_fast must stay the one that is tested.
HERE = Path(__file__).resolve().parent
FOLDERS = {str(HERE), str(HERE.parent), ""}
sys.path[:] = [*(folder for folder in sys.path if folder not in FOLDERS), str(HERE.parent)]

import torch  # noqa: E402

# Dynamo times the guards of each graph, the processor's caches emptied before; nobody reads that.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def threads():
    """Sets the number of torch's threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nothing_compiled():
    """No code that other tests have compiled; theirs and this test's are forgotten."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


LONGEST = (
    "test_ways.py",
    "test_triton.py",
    "test_gpu_report.py",
    "test_parity.py",
    "test_cuda.py",
    "test_cuda_contract.py",
    "test_export.py",
    "test_operators.py",
    "test_general.py",
    "test_shapes.py",
    "test_seq2seq_runs.py",
    "test_sequences.py",
    "test_faults.py",
    "test_examples.py",
    "test_whole_models.py",
)


def pytest_collection_modifyitems(items):
    last = len(LONGEST)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, last))


def pytest_collection_finish():
    """What is loaded by now stays: until Python ends no collection of garbage looks at it.

    At the end it goes, since some libraries report what is left as their leaks.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
