"""Whether ``auto`` may take the CUDA extension, by what it says of the GPUs that are visible."""

import contextlib
import re
import sys
import types

import pytest
import torch

from bahdanau_fast.backends import availability

NO_IMAGE = "no kernel image is available for execution on the device"


@pytest.fixture
def problem(monkeypatch):
    """``cuda_problem()`` on GPUs of these compute capabilities; ``failing`` ones cannot run it."""

    def problem(*capabilities, failing=(), current=0):
        asked, device = [], [current]

        @contextlib.contextmanager
        def on(index):
            before, device[0] = device[0], index
            yield
            device[0] = before

        def why_not():
            asked.append(device[0])
            return NO_IMAGE if device[0] in failing else None

        binary = types.SimpleNamespace(why_not=why_not)
        monkeypatch.setitem(sys.modules, "bahdanau_fast._C_cuda", binary)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: len(capabilities),
            "current_device": lambda: device[0],
            "get_device_capability": lambda index=None: capabilities[
                device[0] if index is None else index
            ],
            "device": on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(availability, "_load", lambda *args: None)
        return availability.cuda_problem.__wrapped__(), asked

    return problem


def test_a_binary_that_runs_is_taken(problem):
    assert problem((9, 0)) == (None, [0])


def test_a_binary_for_other_gpus_is_not_taken(problem):
    said, _ = problem((8, 6), failing=(0,))
    assert re.search(r"does not run on cuda:0 .*8\.6.*: no kernel image", said)


def test_every_kind_of_gpu_is_asked_once(problem):
    assert problem((9, 0), (9, 0), (8, 6), (9, 0)) == (None, [0, 2])
    assert problem((9, 0), (8, 6), (8, 6), current=2) == (None, [2, 0])
    said, _ = problem((9, 0), (9, 0), (8, 6), failing=(2,))
    assert "does not run on cuda:2" in said


def test_an_old_gpu_beside_the_current_one_is_not_asked(problem):
    assert problem((9, 0), (7, 5)) == (None, [0])
    said, asked = problem((9, 0), (7, 5), current=1)
    assert "compute capability 8.0 is needed, this GPU has 7.5" in said
    assert asked == []
