"""Plants one mistake at a time in each kernel and sees whether the suite notices: ``make mutants``.

A mutant is a copy of the tree with one place changed, built, and held against the narrowest tests
that should fail (planted/). Killed: they fail, or crash. Survived: they pass, and a test is
missing. The CUDA kernels run on the host or, as machine code, in the PTX machine (tests/ptx), the
Triton kernels in the interpreter, which has one thread and cannot miss a barrier.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from planted import cpu, cuda, find_tests, inside, triton

import build

sys.path.append(str(build.ROOT))
from benchmarks.timing.machine import machine

# Side by side: the first has C++ to build for each mutant, the second a driver of CUDA kernels.
LANES = (cpu.MUTANTS + inside.MUTANTS, triton.MUTANTS + cuda.MUTANTS)
INSTALLED = {"bahdanau_fast": "bahdanau_fast", "kernels": "bahdanau_fast/kernels"}
LONGEST = 600  # seconds of a mutant's tests: one that hangs is noticed too


def of_pytest(tests, tree, package, cxxflags="-O0"):
    """Arguments of pytest for some tests of a tree on a package, and the environment.

    ``cxxflags`` are for drivers of CUDA kernels: most of a mutant's time is spent compiling one.
    """
    file, chosen = tests
    environment = build.environment(package, TRITON_INTERPRET=str(int("triton" in file)))
    rooms = [tree / "tests" / room for room in ("support", "hardening", "cuda/host")]
    path = [package, *rooms, tree]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    environment["CXXFLAGS"] = cxxflags
    environment["OMP_NUM_THREADS"] = "1"  # two lanes
    arguments = ["-q", "-x", "-p", "no:cacheprovider"]
    arguments += ["-p", "no_shrinking", "-c", str(tree / "pyproject.toml")]
    arguments += ["-o", f"pythonpath={package}", str(find_tests(tree, file)), "-k", chosen]
    return arguments, environment


def verdict(status, said):
    """Whether the tests passed, the last thing they said, and the test that failed, if one did."""
    if status < 0:
        return False, f"ended by {signal.Signals(-status).name}", ""
    last = said.strip().splitlines()[-1:] or [""]
    if status not in (0, 1) or ("failed" in last[0]) != (status == 1):
        raise RuntimeError(f"the tests did not run: {said[-4000:]}")
    failed = re.search(r"^FAILED (?:.*/)?(test_\S*::.*?)(?: - .*)?$", said, re.MULTILINE)
    return status == 0, last[0].strip("= "), failed[1] if failed else ""


def check(tests, tree, package):
    """The verdict of tests in a process of their own."""
    arguments, environment = of_pytest(tests, tree, package)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=package,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False, f"no end after {LONGEST} s", ""
    return verdict(process.returncode, said)


def copy_tree(tree):
    """What the package is built of, and the tests, into a folder."""
    for part in ("bahdanau_fast", "kernels", "csrc", "tests", "benchmarks"):
        shutil.rmtree(tree / part, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(build.ROOT / part, tree / part, ignore=ignored)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(build.ROOT / part, tree)


class Lane:
    """A copy of the tree, and the package built of it, that mistakes are planted in by turns."""

    def __init__(self, name):
        self.tree, self.package = build.BUILD / f"{name}-tree", build.BUILD / name
        self.objects, self.commit = self.package / "objects" / "cpu", machine()["commit"]
        # Is there while objects may be those of a mutant; still, where the last run was stopped.
        self.planted = self.package / "planted"
        if self.planted.exists():
            shutil.rmtree(self.objects)
            self.planted.unlink()
        copy_tree(self.tree)
        self.lay_out()

    def lay_out(self):
        """The package of the tree; only C++ that is not as it was is compiled."""
        build.lay_out(self.package.name, "-O1", source=self.tree)

    def places(self, mutant):
        """The file of the tree, and where a module of Python is installed that too."""
        folder, _, rest = mutant.file.partition("/")
        installed = INSTALLED.get(folder)
        return [self.tree / mutant.file, *([self.package / installed / rest] if installed else [])]

    def plant(self, mutant):
        """Make the change and build it; gives back what puts everything right again."""
        paths = self.places(mutant)
        text, times = paths[0].read_text(), paths[0].stat()
        if text.count(mutant.old) != 1:
            raise RuntimeError(f"{mutant.file} has changed: plant {mutant.name!r} elsewhere")
        start, kept = time.time(), self.of_other_instruction_sets()

        def mend():
            for path in paths:
                path.write_text(text)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for path in self.objects.glob("*.o"):
                if path.stat().st_mtime > start - 1 and path not in kept:
                    path.unlink()
            self.planted.unlink()

        self.planted.touch()
        for path in paths:
            path.write_text(text.replace(mutant.old, mutant.new))
        if mutant.file.startswith(("csrc/cpu/", "csrc/common/")):
            for path in kept:  # as new as the mistake: not compiled
                os.utime(path, (start + 1, start + 1))
            self.lay_out()
        return mend

    def of_other_instruction_sets(self):
        """The objects of CPU kernels that this machine does not run."""
        told, objects = machine()["cpu kernels"], self.objects.glob("kernels_*.o")
        return [path for path in objects if path.stem.split("_")[1] not in told]

    def check_without(self, mutants):
        """The tests pass on the tree as it is; those of a file are run together."""
        files = {}
        for file, some in dict.fromkeys(mutant.tests for mutant in mutants):
            files.setdefault(file, []).append(some)
        for file, parts in files.items():
            tests = (file, "" if "" in parts else f"({') or ('.join(parts)})")
            passes, said, _ = check(tests, self.tree, self.package)
            if not passes:
                raise RuntimeError(f"{file} fails without a mutant: {said}")
            print(f"no mutant {file}: {said}", flush=True)

    def attempt(self, mutant):
        """The row of a mutant: whether it was killed, by which test, and in how many seconds."""
        start, mend = time.time(), self.plant(mutant)
        try:
            passes, said, by = check(mutant.tests, self.tree, self.package)
        finally:
            mend()
        row = {
            "kernel": mutant.kernel,
            "kind": mutant.kind,
            "what": mutant.what,
            "file": mutant.file,
            "was": mutant.old.strip(),
            "became": mutant.new.strip(),
            "tests": " -k ".join(mutant.tests),
            "verdict": "survived" if passes else "killed",
            "by": by or said,
            "seconds": round(time.time() - start),
            "commit": self.commit,
        }
        print(f"{row['verdict']:<9} {mutant.name} ({row['seconds']} s): {row['by']}", flush=True)
        return row


def wanted(arguments, before):
    """For each lane the mutants to try."""
    killed = {mutant_of(row) for row in before if row["verdict"] == "killed"}
    return [
        [m for m in lane if re.search(arguments.only, m.name) and planted_as(m) not in killed]
        for lane in LANES
    ]


def planted_as(mutant):
    """What tells a mutant from others, and from what it was before somebody changed it."""
    tests = " -k ".join(mutant.tests)
    return mutant.name, mutant.file, mutant.old.strip(), mutant.new.strip(), tests


def mutant_of(row):
    """The same of a row."""
    name = f"{row['kernel']}: {row['what'] or row['kind']}"
    return name, row["file"], row["was"], row["became"], row["tests"]


class Results:
    """What --json holds, written after every mutant: a stopped run goes on with --again."""

    def __init__(self, path, again):
        self.path, self.lock, self.start = path, Lock(), time.time()
        self.where, self.before, self.minutes = machine(), {}, 0.0
        if again:
            stored = json.loads(path.read_text())
            self.before = {mutant_of(row): row for row in stored["mutants"]}
            self.minutes = stored["minutes"]
        self.rows = dict(self.before)

    def add(self, row):
        """One more."""
        with self.lock:
            self.rows[mutant_of(row)] = row
            if self.path is not None:
                self.path.write_text(json.dumps(self.stored(), indent=1) + "\n")

    def stored(self):
        """All of it, in the order of the mutants; what became of earlier ones is left out."""
        order = [planted_as(mutant) for lane in LANES for mutant in lane]
        rows = [self.rows[key] for key in order if key in self.rows]
        minutes = round(self.minutes + (time.time() - self.start) / 60, 1)
        return {"machine": self.where, "minutes": minutes, "mutants": rows}

    def of_lane(self, place, mutants):
        """Try some mutants, one after the other."""
        if mutants:
            lane = Lane(f"mutants{place}")
            lane.check_without(mutants)
        for mutant in mutants:
            self.add(lane.attempt(mutant))


def asked(description):
    """Which mistakes to try, and where the results go: arguments of the command."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name this regular expression finds")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--again", action="store_true", help="but not those killed according to it")
    return parser.parse_args()


def main():
    """Try the mutants asked for; 1 when one survives."""
    arguments = asked(__doc__)
    results = Results(arguments.json, arguments.again)
    lanes = wanted(arguments, results.before.values())
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(results.of_lane, range(len(lanes)), lanes))
    stored = results.stored()
    rows = stored["mutants"]
    killed = sum(row["verdict"] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} mutants killed in {stored['minutes']} minutes")
    return int(killed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
