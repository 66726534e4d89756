"""The Triton backend without a GPU: what is said of it, and its kernels in Triton's interpreter.

The interpreter has to be asked for before Python starts: these tests run in processes of their own.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh import forked

import bahdanau_fast as bf
from bahdanau_fast.backends import availability

ROOT = Path(__file__).resolve().parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
@pytest.mark.parametrize(
    ("backend", "why"),
    [("triton", "no CUDA or ROCm device is visible"), ("cuda", "(.* without CUDA|no CUDA device)")],
)
def test_without_a_gpu_it_says_so(backend, why):
    assert backend not in bf.backends.available()
    assert re.search(rf"{backend} +not available: {why}", bf.backends.explain())
    x, w = torch.zeros(1, 2, 3), torch.zeros(4, 3)
    message = f"backend must be available here, got '{backend}': {why}"
    with pytest.raises(ValueError, match=message):
        bf.additive_attention(x, x, x, w, w, w[:, 0], backend=backend)


ASK = """
import torch, bahdanau_fast as bf
print(bf.backends.explain())
x, w = torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
for dtype in (torch.float32, torch.float64):
    x, w = x.to(dtype), w.to(dtype)
    try:
        bf.additive_attention(x, x, x, w, w, w[:, 0], backend="triton")
        print("served", dtype)
    except ValueError as error:
        print(error)
bf.additive_attention(x, x, x, w, w, w[:, 0])
"""


def test_float64_is_refused_by_name_and_served_by_the_next():
    result = forked("-c", ASK, TRITON_INTERPRET="1")
    assert "triton     available: Triton kernels in its interpreter" in result.stdout
    assert "auto takes 'cpu' for cpu tensors" in result.stdout
    assert "served torch.float32" in result.stdout
    assert "backend must serve torch.float64 tensors, got 'triton'" in result.stdout


@pytest.fixture
def gpus(monkeypatch):
    """Has GPUs of these compute capabilities, the first of them the current one."""

    def there(*capabilities):
        def capability(device=None):
            return capabilities[device.index or 0 if device else 0]

        for place, name, value in (
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", capability),
            (availability, "_load", lambda *_: None),
            (availability, "_does_not_run", lambda: None),
            (availability, "cuda_problem", availability.cuda_problem.__wrapped__),
            (availability, "triton_problem", availability.triton_problem.__wrapped__),
            (availability, "_is_too_old", functools.cache(availability._is_too_old.__wrapped__)),
        ):
            monkeypatch.setattr(place, name, value)

    return there


TOO_OLD = "not available: compute capability {} is needed, this GPU has {}"


@no_gpu
@pytest.mark.parametrize(
    ("capability", "taken"),
    [((7, 0), "reference"), ((7, 5), "triton"), ((8, 6), "cuda")]
    + [((n, 0), "cuda") for n in (8, 9, 12)],
)
def test_what_a_compute_capability_has(capability, taken, gpus):
    gpus(capability)
    _, *lines = said = bf.backends.explain().splitlines()
    assert said[0] == f"auto takes {taken!r} for cuda tensors"
    has = ".".join(map(str, capability))
    for line, least in zip(lines, ((8, 0), (7, 5)), strict=False):
        why = TOO_OLD.format(".".join(map(str, least)), has)
        assert (" available: " in line and why not in line) == (capability >= least)
        assert line.endswith(why) == (capability < least)


@no_gpu
def test_of_several_gpus_each_has_what_serves_it(gpus):
    gpus((9, 0), (7, 5), (7, 0))
    taken = [bf.backends.resolve(torch.device("cuda", n)) for n in range(3)]
    assert taken == ["cuda", "triton", "reference"]


HIDE = """
import sys
import importlib.util, importlib.metadata
if {missing}:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
else:
    importlib.metadata.version = lambda name: "3.5.1"
import bahdanau_fast as bf
print(bf.backends.explain())
assert "triton" not in bf.backends.available()
"""


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (True, "Triton is not installed (pip install triton)"),
        (False, "Triton must be >= 3.6, got 3.5.1"),
    ],
)
def test_without_triton_or_with_an_old_one(missing, reason):
    result = forked("-c", HIDE.format(missing=missing), TRITON_INTERPRET="1")
    assert f"not available: {reason}" in result.stdout


@no_gpu
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        pytest.param("not deep", 50, marks=pytest.mark.thorough),
        pytest.param("deep", 140, marks=pytest.mark.deep),
    ],
)
def test_the_kernels_in_the_interpreter(chosen, least):
    assert passed("kernels", chosen, TRITON_INTERPRET="1") >= least


@no_gpu
@pytest.mark.thorough
def test_compiled_code_launches_kernels():
    assert passed("compiled", "not deep", TRITON_SERVES_CPU="1") >= 6


def passed(folder, chosen, **environment):
    """How many tests of a folder pass in a process of its own, where all do and none is skipped."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"tests/triton/{folder}", "-m", chosen],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout[-5000:], result.stderr[-2000:])
    assert result.returncode == 0
    assert "skipped" not in result.stdout
    return int(re.search(r"(\d+) passed", result.stdout)[1])
