"""Copies of the package, and Python in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bahdanau_fast"
# For sitecustomize: an editable install offers its own binary to any package of this name.
WITHOUT_EDITABLE = """import sys
sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]
"""
# In front of a program: modules of these names cannot be found.
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def copy_package(folder):
    """The package without its binary into a folder, which hides an editable install on the path."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, folder / "bahdanau_fast", ignore=ignored)
    (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return folder


def copy_tree(folder):
    """What the package is built of into a folder."""
    ignored = shutil.ignore_patterns("*.so", "*.why.txt", "*.json", "__pycache__")
    for part in ("csrc", "bahdanau_fast", "kernels", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, folder)
    return folder


def program(path, text):
    """A file that can be run; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def empty_compiler(path):
    """A compiler and linker that makes every file it is asked for, empty; its name."""
    loop = 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : >"$2"; fi; shift; done'
    return program(path, f"#!/bin/sh\n{loop}\n")


def python(*arguments, cwd=None, path=None, check=True, **variables):
    """A finished process of Python; with ``path`` in front where modules are looked for."""
    variables |= {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        # It looks for modules in ``cwd``, also where the tests were told not to.
        env={**os.environ, "PYTHONSAFEPATH": "", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done


def build_package(tree, what, **variables):
    """What a hook of the build makes of a source tree, in its folder dist, and what it printed.

    As frontends call it: the tree itself, whose kernels/ could hide a package, is not on the path.
    """
    call = "import sys; sys.path = [x for x in sys.path if x]; import setuptools.build_meta as made"
    (tree / "dist").mkdir(exist_ok=True)
    skip = {"BAHDANAU_FAST_CPU": "1", "BAHDANAU_FAST_CUDA": "0"}
    arguments = ["-c", f"{call}; print(made.{what}('dist'))"]
    printed = python(*arguments, cwd=tree, path="", **{**skip, **variables}).stdout
    return tree / "dist" / printed.split()[-1], printed
