"""Plants one mistake at a time in each kernel and sees whether the suite notices: ``make mutants``.

A mutant is a copy of the tree with one line changed, built, and held against the narrowest tests
that should fail (planted.py). Killed: they fail. Survived: they pass, and a test is missing. The
CUDA kernels run on the host, the Triton kernels in the interpreter, which has one thread and cannot
miss a barrier.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from planted import MUTANTS

import build

TREE = build.BUILD / "mutants"


def copy_tree():
    """The tree as it is, without what was built, beside the builds of mutants before."""
    for part in ("bahdanau_fast", "kernels", "csrc", "tests", "benchmarks"):
        shutil.rmtree(TREE / part, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(build.ROOT / part, TREE / part, ignore=ignored)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(build.ROOT / part, TREE)


def run(tests, folder):
    """Whether the tests pass on the package in ``folder``, and the last thing they said."""
    file, chosen = tests
    environment = build.environment(folder, TRITON_INTERPRET=str(int("triton" in file)))
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(TREE / "tests"), str(TREE)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-c", str(TREE / "pyproject.toml"), str(TREE / file), "-k", chosen]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-300:]]
    if done.returncode not in (0, 1) or ("failed" in last[0]) != (done.returncode == 1):
        raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, last[0]


def lay_out():
    """The package of the tree; only C++ that is not as it was is compiled."""
    return build.lay_out("mutant", "-O1", source=TREE)


def plant(mutant):
    """Change the line; gives back what puts it right again."""
    path = TREE / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.file} has changed: plant {mutant.name!r} elsewhere")
    path.write_text(text.replace(mutant.old, mutant.new))
    return lambda: path.write_text(text)


def main():
    """Try the mutants asked for; 1 when one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name contains this")
    parser.add_argument("--json", type=Path, help="write the table there")
    arguments = parser.parse_args()
    copy_tree()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    rows = []
    for tests in dict.fromkeys(mutant.tests for mutant in chosen):
        passes, said = run(tests, lay_out())
        if not passes:
            raise RuntimeError(f"{tests} fail without a mutant: {said}")
    for mutant in chosen:
        start, mend = time.time(), plant(mutant)
        try:
            passes, said = run(mutant.tests, lay_out())
        finally:
            mend()
        verdict = "survived" if passes else "killed"
        seconds = round(time.time() - start)
        print(f"{verdict:<9} {mutant.name} ({seconds} s): {said}", flush=True)
        rows.append({"mutant": mutant.name, "file": mutant.file, "was": mutant.old.strip(),
                     "became": mutant.new.strip(), "tests": " -k ".join(mutant.tests),
                     "verdict": verdict})  # fmt: skip
    killed = sum(row["verdict"] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} mutants killed")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(killed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
