"""Copies of the package, and Python in a process of its own."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bahdanau_fast"
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
    """The package as it is before it is built into a folder."""
    ignored = shutil.ignore_patterns("*.so", "*.why.txt", "__pycache__")
    shutil.copytree(PACKAGE, folder / "bahdanau_fast", ignore=ignored, symlinks=True)
    return folder


def copy_tree(folder):
    """What the package is built of into a folder."""
    ignored = shutil.ignore_patterns("*.so", "*.why.txt", "*.json", "__pycache__")
    for part in ("csrc", "bahdanau_fast", "kernels", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored, symlinks=True)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, folder)
    return folder


def program(path, text):
    """A file that can be run; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def empty_compiler(path, before=":"):
    """A compiler and linker that makes every file it is asked for, empty; its name."""
    loop = 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : >"$2"; fi; shift; done'
    return program(path, f"#!/bin/sh\n{before}\n{loop}\n")


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


# Imports what takes seconds, then waits; each line it reads makes a child, which goes on.
WAITS = """
import gc, json, os, signal, sys, torch.utils.cpp_extension, setuptools.build_meta
gc.freeze()  # else each child collects all of torch at its end, which takes half a second
answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)
else:
    sys.exit()
files, cwd, env, (how, program, *arguments) = json.loads(line)
signal.alarm(300)
os.environ.clear()
os.environ.update(env)
for number, name in enumerate(files):
    os.dup2(os.open(name, os.O_RDWR), number)
if cwd:
    os.chdir(cwd)
sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
sys.modules.pop("sitecustomize", None)  # that of the system, where there is one
try:
    import sitecustomize
except ImportError:
    pass
if how == "-c":
    sys.argv = [how, *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
else:
    import runpy
    sys.argv = [program, *arguments]
    run = runpy.run_module if how == "-m" else runpy.run_path
    run(program, run_name="__main__", **({"alter_sys": True} if how == "-m" else {}))
"""


@functools.cache
def _waiting():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    process = subprocess.Popen([sys.executable, "-c", WAITS], env=env, bufsize=1, **pipes)
    atexit.register(process.communicate)
    return process


def forked(how, *arguments, cwd=None, path=None, check=True, **variables):
    """As ``python``, but torch and setuptools are imported already: a fork of one that waits.

    ``how``: -c, -m or "file". Not for variables that are read when Python or torch is loaded.
    """
    if not hasattr(os, "fork"):
        arguments = arguments if how == "file" else (how, *arguments)
        return python(*arguments, cwd=cwd, path=path, check=check, **variables)
    variables |= {} if path is None else {"PYTHONPATH": str(path)}
    with tempfile.TemporaryDirectory() as folder:
        files = [os.devnull, f"{folder}/out", f"{folder}/err"]
        for file in files[1:]:
            Path(file).touch()
        command = [how, *map(str, arguments)]
        asked = [files, str(cwd or ""), {**os.environ, "PYTHONSAFEPATH": "", **variables}, command]
        print(json.dumps(asked), file=_waiting().stdin)
        code = int(_waiting().stdout.readline())
        done = subprocess.CompletedProcess(command, code, *(Path(x).read_text() for x in files[1:]))
    assert not check or code == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done


def build_package(tree, what, **variables):
    """What a hook of the build makes of a source tree, in its folder dist, and what it printed.

    As frontends call it: the tree itself, whose kernels/ could hide a package, is not on the path.
    """
    call = "import sys; sys.path = [x for x in sys.path if x]; import setuptools.build_meta as made"
    (tree / "dist").mkdir(exist_ok=True)
    skip = {"BAHDANAU_FAST_CPU": "1", "BAHDANAU_FAST_CUDA": "0"}
    arguments = ["-c", f"{call}; print(made.{what}('dist'))"]
    printed = forked(*arguments, cwd=tree, path="", **{**skip, **variables}).stdout
    return tree / "dist" / printed.split()[-1], printed
