"""One way through: how many files a call passes on its way, and that it is decided once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import flow
import pytest

import bahdanau_fast as bf

ROOT = Path(__file__).parents[2]
MOST_FILES = 7
DECIDE, ROUTE = "backends/__init__.py:decide", "backends/route.py:route"
CALLS = ("a step on a memory", "an unchanged loop", "many queries", "a small call")


def on_the_cpu():
    return {"seen": flow.followed("auto"), "first": flow.followed("auto", first=True)}


def run(argument, **environment):
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/package/flow.py"), argument],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def interpreted():
    return json.loads(run("triton", TRITON_INTERPRET="1"))


@pytest.fixture(scope="module", params=(on_the_cpu, interpreted), ids=lambda of: of.__name__)
def found(request):
    if request.param is on_the_cpu and "cpu" not in bf.backends.available():
        pytest.skip("follows calls to the C++ operators")
    return request.param()


def files(entered):
    return {at.split(":")[0] for at in entered}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_passes_few_files(found, name):
    """Also where its sizes are new, and are not looked up in the routes of earlier calls."""
    seen, first = (files(found[which][name]) for which in ("seen", "first"))
    assert "modules/base.py" in seen
    assert len(first) <= MOST_FILES, sorted(first)
    assert first - {"backends/route.py"} == seen


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_decided_once(found, name):
    seen, first = found["seen"][name], found["first"][name]
    assert (first[DECIDE], first[ROUTE]) == (1, 1)
    assert seen[DECIDE] == 1
    assert not any(at.startswith("backends/route.py") for at in seen)  # looked up
    deciding = {"backends/__init__.py", "backends/route.py", "backends/availability.py"}
    assert sum(at.split(":")[1] == "resolve" for at in first) == 0
    assert files(first) & deciding <= {"backends/__init__.py", "backends/route.py"}


@pytest.mark.skipif("cpu" not in bf.backends.available(), reason="explains the C++ kernels")
def test_the_page_explains_the_same_calls():
    said = run("explain", BAHDANAU_FAST_LIMITS="amd")
    assert all(f"{name}: queries" in said for name in CALLS)
    assert f"```\n{said}```" in (ROOT / "docs/how-it-works.md").read_text()
