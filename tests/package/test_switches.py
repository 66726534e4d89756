"""What BAHDANAU_FAST_OFF switches off is reached by nothing, and said.

Where a kernel is chosen beside the launches: tests/triton/test_kept_launches.py; clusters:
tests/cuda/mock/test_cuda_runtime.py, and tests/cuda/compiled/test_cuda_build.py, by which switch.
"""

import pytest
import torch
from fresh import ROOT, forked

from bahdanau_fast import backends, switches
from bahdanau_fast.backends import availability

READ = "import bahdanau_fast; from bahdanau_fast import switches; print(*sorted(switches.OFF))"


@pytest.fixture
def off(monkeypatch):
    return lambda *names: monkeypatch.setattr(switches, "OFF", frozenset(names))


@pytest.mark.parametrize(
    ("given", "read"), [("", ""), ("waves", "waves"), (" terms , one-launch,", "one-launch terms")]
)
def test_it_is_read_at_import(given, read):
    done = forked("-c", READ, path=ROOT, BAHDANAU_FAST_OFF=given)
    assert (done.stdout, done.stderr) == (f"{read}\n", "")


def test_an_unknown_name_is_said_with_those_that_there_are():
    done = forked("-c", READ, path=ROOT, BAHDANAU_FAST_OFF="one_launch,waves")
    assert done.stdout == "waves\n"
    assert f"must name some of {', '.join(switches.SWITCHES)}, got 'one_launch'" in done.stderr


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_backend_is_not_there(name, off, monkeypatch):
    problem = getattr(availability, f"{name}_problem").__wrapped__
    monkeypatch.setattr(availability.importlib, "import_module", lambda _: 1 / 0)
    off(name)
    assert problem() == f"switched off by BAHDANAU_FAST_OFF={name}"


def test_no_decoder_is_one_launch(off):
    off("one-launch")
    for sizes in ((2, 3, 32, 32, 32), (2, 3, 32, 32, 32, 64, 5)):  # tokens are written
        why = availability.one_launch_problem(torch.device("cuda"), False, False, sizes)
        assert why == "switched off by BAHDANAU_FAST_OFF=one-launch"


def test_explain_says_what_is_off(off):
    assert switches.VARIABLE not in backends.explain()
    off("waves", "terms")
    assert backends.explain().endswith("  off by BAHDANAU_FAST_OFF: terms, waves")
