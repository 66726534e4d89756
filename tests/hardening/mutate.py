"""Makes small random mistakes in the sources, one at a time, and sees whether the tests notice.

``python tests/hardening/mutate.py --count 200 --seed 1 [--only csrc/cpu]``

A mistake changes an operator, a number or an index, or drops a statement, of csrc/, kernels/ or
the package. Two workers make it in copies of the tree, build that where it is C++, and run the
narrowest tests of the file (NARROW), then all of its language (SUITES). A row of JSON for each goes
to ``--results``; a mistake that has a row there is not made again, so that a stopped run goes on.
Its verdict is one of

killed: a test fails that passes without the mistake, or the process ends or hangs.
survived: all tests pass: one is missing, or the mistake changes nothing that anybody can see.
same code: the compiler makes the same binary of it.
not built: it does not compile.
"""

import argparse
import ast
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from threading import Lock
from typing import NamedTuple

import build

# Beginnings of paths, the first that fits decides; tests from the root.
NARROW = {
    "csrc/cpu/kernels/project": ("tests/cpu/test_projection.py",),
    "csrc/cpu/op/project": ("tests/cpu/test_projection.py",),
    "csrc/cpu/op/fingerprint": ("tests/modules/test_key_cache.py", "tests/modules/test_ways.py"),
    "csrc/cpu/kernels/hash": ("tests/modules/test_key_cache.py", "tests/modules/test_ways.py"),
    "csrc/cpu/decoder": ("tests/cpu/test_decoding.py", "tests/cpu/test_greedy.py"),
    "csrc/cpu/kernels/recurrent": ("tests/modules/test_recurrent.py",),
    "csrc/cpu/kernels/sums/convolution": ("tests/modules/test_location.py",),
    "csrc/cpu/kernels/sums": ("tests/contract/test_general.py",),
    "csrc/cpu/op/location": ("tests/modules/test_location.py",),
    "csrc": ("tests/contract/test_parity.py", "tests/cpu/test_step.py"),
    "kernels": ("tests/triton/kernels",),
    "bahdanau_fast/backends/triton": ("tests/triton/kernels",),
    "bahdanau_fast/fuse": ("tests/fuse",),
    "bahdanau_fast/graphs": ("tests/fuse",),
    "bahdanau_fast/cli": ("tests/package/test_cli.py",),
    "bahdanau_fast/limits": ("tests/package/test_routes.py",),
    "bahdanau_fast/backends": ("tests/package", "tests/contract/test_errors.py"),
    "bahdanau_fast/memory": ("tests/modules/test_key_cache.py", "tests/modules/test_memory.py"),
    "bahdanau_fast/modules/location": ("tests/modules/test_location.py",),
    "bahdanau_fast/modules/attention_rnn": ("tests/modules/test_recurrent.py",),
    "bahdanau_fast/modules/decoder_loop": (
        "tests/modules/test_recurrent.py",
        "tests/cpu/test_greedy.py",
    ),
    "bahdanau_fast/modules/layers": ("tests/modules/test_layers.py", "tests/modules/test_ways.py"),
    "bahdanau_fast/modules": ("tests/modules/test_modules.py", "tests/modules/test_layers.py"),
    "bahdanau_fast/ops/decode": ("tests/cpu/test_decoding.py", "tests/cpu/test_greedy.py"),
    "bahdanau_fast/ops": ("tests/pytorch/test_operators.py", "tests/modules/test_deferred.py"),
    "bahdanau_fast/checks": ("tests/contract/test_errors.py", "tests/contract/test_masks.py"),
    "bahdanau_fast": ("tests/contract",),
}
TRITON = ("kernels", "bahdanau_fast/backends/triton")  # run by Triton's interpreter
SUITES = {
    True: ("tests/triton",),
    False: (
        *("tests/contract", "tests/cpu", "tests/hardening", "tests/package"),
        *("tests/modules", "tests/fuse", "tests/pytorch", "tests/seq2seq"),
    ),
}
SOURCES = ("csrc/cpu", "csrc/common", "kernels", "bahdanau_fast")
LEFT_OUT = ("bahdanau_fast/seq2seq",)
ON_A_GPU = re.compile(
    r"cuda|gpu|\bhip\b|sm_\d|num_warps|num_stages|eviction|barrier", re.IGNORECASE
)
SWAPPED = {
    **{"+": "-", "-": "+", "*": "/", "+=": "-=", "-=": "+=", "<": "<=", "<=": "<"},
    **{">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "and": "or"},
    **{"or": "and", "not": "", "True": "False", "False": "True"},
}
# Bytes and seconds that tests may take, for mistakes that ask for ever more.
WORKERS, MEMORY, LONGEST = 2, 16 << 30, 3600


class Mutant(NamedTuple):
    """One change: ``old`` at a place becomes ``new``; ``text`` is the line as it was."""

    file: str
    line: int
    column: int
    old: str
    new: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.old!r} -> {self.new!r} in  {self.text.strip()}"


def numbers(token):
    """What a number becomes."""
    if token in ("0", "1"):
        return [str(1 - int(token))]
    if token.isdigit():
        return [str(int(token) + by) for by in (1, -1)]
    return ["1.0"] if token.startswith("0.0") else [f"(2 * {token})"]


def of_python(text):
    """(line, column, old, new) of every change of a module; not in strings, errors and imports."""
    nodes, silent = list(ast.walk(ast.parse(text))), set()
    for node in nodes:
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, node.end_lineno + 1))
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        kept = isinstance(node, ast.Assign) and hasattr(node.targets[0], "value")
        if call or kept or isinstance(node, ast.Raise | ast.AugAssign):
            old = ast.get_source_segment(text, node)
            if not old.startswith(("warnings.", "print(")):
                yield node.lineno, node.col_offset, old, "pass"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (line, column), old = token.start, token.string
        if line in silent:
            continue
        if token.type == tokenize.NUMBER:
            yield from ((line, column, old, new) for new in numbers(old))
        elif token.type in (tokenize.OP, tokenize.NAME) and old in SWAPPED and old != "*":
            yield line, column, old, SWAPPED[old]


# Between spaces, as clang-format has those of two sides.
OPERATOR = re.compile(r"(?<= )(?:[<>]=?|[=!]=|&&|\|\||[-+]=|[-+*])(?= )")
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:e-?\d+)?f?|\d+)(?![\w.])")
INDEX = re.compile(r"(?<=[\w\])])\[([^\[\]]+)\]")
STATEMENT = re.compile(r"^ +((?:[\w:.>\[\]*-]+ [-+*/|&]?= .+|[\w:.>-]+\(.*\));)$")
SILENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^#(?:\\\n|[^\n])*', re.S | re.M)


def of_cpp(text):
    """The same of a file of C++; comments, strings and preprocessor lines are blank."""
    blank = SILENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    ended = True  # the statement before a line
    for line, code in enumerate(blank.splitlines(), 1):
        if code.strip() and not re.search(r"static_assert|\btemplate\b|\busing\b", code):
            for found in OPERATOR.finditer(code):
                yield line, found.start(), found[0], SWAPPED[found[0]]
            for found in NUMBER.finditer(code):
                yield from ((line, found.start(), found[0], new) for new in numbers(found[0]))
            for found in INDEX.finditer(code):
                yield line, found.start(), found[0], f"[{found[1]} + 1]"
            found = STATEMENT.match(code) if ended else None
            if found:
                yield line, found.start(1), found[1], ";"
        ended = code.rstrip().endswith((";", "{", "}", ")", ":")) if code.strip() else ended


def candidates(only):
    """Every change that can be made, of the files whose path ``only`` finds."""
    found = []
    for path in sorted(path for top in SOURCES for path in (build.ROOT / top).rglob("*")):
        file = str(path.relative_to(build.ROOT))
        if path.suffix in (".py", ".h", ".cpp") and not file.startswith(LEFT_OUT):
            text = path.read_text()
            of, lines = (of_python if path.suffix == ".py" else of_cpp), text.splitlines()
            found += [Mutant(file, *each, lines[each[0] - 1]) for each in of(text)]
    return [m for m in found if re.search(only, m.file) and not ON_A_GPU.search(m.text)]


def drawn(only, count, seed):
    """So many of them by chance, one a line."""
    chosen = {}
    for mutant in random.Random(seed).sample(found := candidates(only), len(found)):
        chosen.setdefault((mutant.file, mutant.line), mutant)
    return list(chosen.values())[:count]


class Results:
    """The rows so far; each is written when it is known."""

    def __init__(self, path):
        self.path, self.lock = path, Lock()
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.rows = {row["mutant"]: row for row in rows}

    def add(self, mutant, verdict, by, seconds):
        row = {"mutant": str(mutant), "verdict": verdict, "by": by, "seconds": round(seconds)}
        with self.lock, self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            self.rows[str(mutant)] = row
        print(f"{verdict:<9} {mutant}  ({seconds:.0f} s) {by}", flush=True)


def put(contents):
    """Write files, by path."""
    for path, content in contents.items():
        path.write_bytes(content)


class Worker:
    """A copy of the tree with its C++ built in place.

    ``clean`` holds the objects of the tree without a mistake. Those of instruction sets that this
    machine does not run are dated ahead, so that no mistake compiles them.
    """

    def __init__(self, number, results):
        self.results, self.tree = results, build.BUILD / f"mutate{number}"
        self.objects, self.clean = self.tree / "objects", self.tree / "clean"
        self.log = self.tree / "tests.log"
        self.extension = self.tree / "bahdanau_fast" / "_C_cpu.abi3.so"
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=build.ROOT, text=True).splitlines()
        for path in self.tree.glob("*"):
            if path not in (self.objects, self.clean):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for file in listed:
            if (build.ROOT / file).is_file():
                (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(build.ROOT / file, self.tree / file)
        for part in ("kernels", "benchmarks"):  # as installed
            (self.tree / "bahdanau_fast" / part).symlink_to(self.tree / part)
        rooms = (".", "tests/support", "tests/hardening", "tests/cuda")
        self.environment = {
            **os.environ,
            **{"BAHDANAU_FAST_CPU": "1", "BAHDANAU_FAST_CUDA": "0", "CXXFLAGS": "-O2 -g0"},
            **{"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"},
            "BAHDANAU_FAST_OBJECTS": str(self.objects),
            "PYTHONPATH": os.pathsep.join(str(self.tree / room) for room in rooms),
        }
        self.restore()
        for path in self.objects.glob("*/*.o"):
            if path.stat().st_mtime > time.time():
                path.unlink()
        if not self.compile():
            raise RuntimeError(f"the tree does not build: {self.log.read_text()[-4000:]}")
        code = "import bahdanau_fast._C_cpu as c; print(c.instruction_set())"
        runs = self.python("-c", code, seconds=60)[1].split()[-1]
        for path in self.objects.glob("*/kernels_*.o"):
            if runs not in path.stem:
                os.utime(path, (4e9, 4e9))
        shutil.rmtree(self.clean, ignore_errors=True)
        shutil.copytree(self.objects, self.clean)
        self.binary, self.failing = self.extension.read_bytes(), []

    def restore(self):
        """Put back the objects of the tree without a mistake."""
        if self.clean.exists():
            shutil.rmtree(self.objects, ignore_errors=True)
            shutil.copytree(self.clean, self.objects)

    def compile(self):
        """Whether the C++ builds."""
        return self.python("setup.py", "-q", "build_ext", "--inplace", seconds=900)[0] == 0

    def python(self, *arguments, seconds, **more):
        """The exit status, None where it took longer, and the output."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.tree,
                env=self.environment | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
        return status, self.log.read_text(errors="replace")

    def test(self, tests, *more):
        """The same of pytest."""
        options = ["-q", "-n", "0", "-m", "not deep", "-p", "no:cacheprovider"]
        options += ["-p", "no_shrinking", *more]
        asked = {"TRITON_INTERPRET": "1"} if tests[0].startswith("tests/triton/kernels") else {}
        return self.python("-m", "pytest", *options, *tests, seconds=LONGEST, **asked)

    def attempt(self, mutant):
        """Make a mistake, and add its row."""
        narrow = next(NARROW[start] for start in NARROW if mutant.file.startswith(start))
        suites = narrow, SUITES[mutant.file.startswith(TRITON)]
        path, start = self.tree / mutant.file, time.time()
        times, text = path.stat(), path.read_text()
        at = sum(map(len, text.splitlines(keepends=True)[: mutant.line - 1])) + mutant.column
        path.write_text(text[:at] + mutant.new + text[at + len(mutant.old) :])
        verdict, by = "", ""
        if path.suffix != ".py" and not self.compile():
            verdict = "not built"
        elif path.suffix != ".py" and self.extension.read_bytes() == self.binary:
            verdict = "same code"
        right = {path: text.encode(), self.extension: self.binary}
        if not verdict:
            wrong = {path: path.read_bytes() for path in right}
            verdict, by = self.judge(suites, right, wrong)
        put(right)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if path.suffix != ".py":
            self.restore()
        self.results.add(mutant, verdict, by, time.time() - start)

    def judge(self, suites, right, wrong):
        """Verdict and reason; a test that also fails without the mistake is left out from then."""
        for tests in suites:
            status = 1
            while status:
                left_out = [word for test in self.failing for word in ("--deselect", test)]
                status, said = self.test(tests, "-x", *left_out)
                if status is None or status < 0:
                    return "killed", "no end" if status is None else signal.Signals(-status).name
                failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)
                if status and (failed is None or failed[1] in self.failing):
                    return "killed", said.strip().splitlines()[-1]
                if status:
                    put(right)
                    if self.test((failed[1],))[0] == 0:
                        return "killed", failed[1]
                    print(f"fails without a mistake: {failed[1]}", flush=True)
                    self.failing.append(failed[1])
                    put(wrong)
        return "survived", ""


def main():
    """Try the mistakes asked for, and list those that survived: to be read, not counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path this regular expression finds")
    parser.add_argument("--results", type=Path, default=build.BUILD / "mutate.jsonl")
    arguments = parser.parse_args()
    mutants = drawn(arguments.only, arguments.count, arguments.seed)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    results, todo = Results(arguments.results), Queue()
    for mutant in mutants:
        if str(mutant) not in results.rows:
            todo.put(mutant)

    def work(number):
        worker = Worker(number, results)
        while not todo.empty():
            try:
                mutant = todo.get_nowait()
            except Empty:
                return
            worker.attempt(mutant)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    rows = [results.rows[str(mutant)] for mutant in mutants]
    survivors = [row["mutant"] for row in rows if row["verdict"] == "survived"]
    print(dict(Counter(row["verdict"] for row in rows)), *survivors, sep="\n")


if __name__ == "__main__":
    main()
