"""The package, laid out as installed in a folder of its own, with its C++ compiled another way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "hardening"


def lay_out(name, cxxflags):
    """Build into ``build/hardening/<name>``, with more compiler flags; the folder for the path."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for part, target in (("bahdanau_fast", "bahdanau_fast"), ("kernels", "bahdanau_fast/kernels")):
        for old in (folder / target).glob("*.py"):
            old.unlink()
        shutil.copytree(
            ROOT / part,
            folder / target,
            ignore=shutil.ignore_patterns("*.so", "__pycache__"),
            dirs_exist_ok=True,
        )
    environment = {
        **os.environ,
        "CXXFLAGS": cxxflags,
        "BAHDANAU_FAST_CPU": "1",
        "BAHDANAU_FAST_CUDA": "0",
        "BAHDANAU_FAST_OBJECTS": str(folder / "objects"),
    }
    # The target folder is another one than the checkout: its own binary stays as it is.
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} does not build\n{done.stdout[-3000:]}{done.stderr[-5000:]}")
    return folder


def environment(folder, **more):
    """Of a process that imports the package from ``folder`` and the tests from here."""
    path = [str(folder), str(ROOT / "tests" / "support"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def write(path, figures):
    """A run's figures, with what it was made with; a line for each row."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks.machine import machine, rows_text

    cxx = os.environ.get("CXX", "g++")
    said = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    names = ("cpu", "cores", "torch", "python", "bahdanau_fast", "commit")
    found = machine()
    where = {**{name: found[name] for name in names}, "compiler": said.splitlines()[0]}
    path.write_text(rows_text({"where": where, **figures}))
