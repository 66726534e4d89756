"""The numbers in the kernels' headers that decide on a path, or at which something is cut off.

They are found by scanning the sources, not listed: floating numbers that something is compared with
or clamped to, as they stand or by the name of a constant. Those of common/limits.h are held by
tests/package/test_numbers.py, which knows them all.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FACTORS = {"doubled": 2.0, "halved": 0.5}
FLOATING = r"\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)f?"
# Of a comparison (the house's formatter leaves spaces around it, not in a template): what is on its
# right, up to where that ends, whole parentheses included; of clamp() and at_most(): the limit.
GROUP = r"\((?:[^()]|\([^()]*\))*\)"
COMPARED = re.compile(rf"(\S+) (<=?|>=?) ((?:{GROUP}|[^;?&|,{{}}()])*)")
CLAMPED = re.compile(rf"\b(clamp|at_most)\((?:{GROUP}|[^(),])*, ([^()]*)\)")
CONSTANT = re.compile(r"\bconstexpr (float|double|A) (\w+(?:<\w+>)? = [^;]*);")
NUMBER = re.compile(rf"(?<![\w.])(?:{FLOATING}|(?<=A\()[1-9]\d*(?=\)))")

CPU, CUDA = "tests/cpu/test_cpu_ranges.py", "tests/cuda/host/test_cuda_ranges.py"
GENERAL = ("tests/cpu/test_accuracy.py", "general")
# The tests that look at both sides of a guard, by what its name has; the first that fits.
TESTS = {
    "philox.h": (("tests/contract/test_dropout.py", ""),),
    "tensors.h": (("tests/contract/test_operator_errors.py", ""),),
    r"cpu/.*(lowest|highest|exponent|f\.slope) ": ((CPU, "table and not shifted"),),
    "cpu/.*shared ": ((CPU, "four"),),
    r"cpu/.*(kShiftLimit|abs<A>\(x\)) ": ((CPU, "shifted"),),
    "cpu/.*kSaturated ": ((CPU, "saturated"),),
    "cpu/.*least ": ((CPU, "slope or four"),),
    "cpu/.*kSaturates ": (GENERAL,),
    "cpu/.*(y|magnitude) ": ((CPU, "table and not shifted"), GENERAL),
    "cuda/.*(kFactored|kLargestW) ": ((CUDA, "share or large_w"),),
    "cuda/.*(kClamped|kKeyLimit) ": ((CUDA, "large"),),
    r"cuda/.*(kSmallest|fabsf\(x\[k\]\)|size) ": ((CUDA, "zero or polynomial"),),
    "cuda/.*u < (3e-16|1e-13)": ((CUDA, "slope"),),
    "cuda/.*clamp 9.5": (
        (CUDA, "saturated"),
        ("tests/cuda/host/test_cuda_kernels.py", "largest_w_v"),
    ),
    "cuda/": ((CUDA, "saturated"),),
}
# Guards that may be wrong in a way, and why: no result leaves the parity rule.
EXPLAINED: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Guard:
    """A number at a place of a file, from the root of the tree.

    Attributes:
        name: what tells it from others, wherever it moves to.
        constant: the constant's declaration starts there, or -1.
    """

    file: str
    at: int
    text: str
    name: str
    constant: int = -1

    @property
    def floating(self) -> str:
        """The number, not as an integer."""
        return f"{self.text}.0" if self.text.isdigit() else self.text


def without_comments(text):
    """The text with blanks in the place of comments: what is left stays where it was."""
    return re.sub(r"//[^\n]*", lambda found: " " * len(found[0]), text)


def compared(sources):
    """All that something is compared with or clamped to: (start, what it is beside, text)."""
    for text in sources:
        for found in COMPARED.finditer(text):
            yield text, found.start(3), f"{found[1]} {found[2]}", found[3]
        for found in CLAMPED.finditer(text):
            yield text, found.start(2), found[1], found[2]


def scan(root: Path):
    """The guards of a tree, in the order of files and places."""
    headers = [
        path
        for folder in ("common", "cpu/kernels", "cuda/kernels")
        for path in sorted((root / "csrc" / folder).rglob("*.h"))
        if path.name != "limits.h"
    ]
    texts = {path: without_comments(path.read_text()) for path in headers}
    every = [without_comments(p.read_text()) for p in sorted((root / "csrc").rglob("*.[hc]*"))]
    decisive = set()
    for _, _, _, operand in compared(every):
        decisive.update(re.findall(r"\b[a-zA-Z]\w*\b", operand))
    guards, seen = [], Counter()

    def add(path, at, text, beside, constant=-1):
        named = f"{path.relative_to(root / 'csrc')}: {beside} {text}"
        seen[named] += 1
        name = named if seen[named] == 1 else f"{named} ({seen[named]})"
        guards.append(Guard(str(path.relative_to(root)), at, text, name, constant))

    for path, text in texts.items():
        for declared in CONSTANT.finditer(text):
            for part in re.finditer(r"(\w+)(?:<\w+>)? = ([^,]*)", declared[2]):
                if part[1] in decisive:
                    for number in NUMBER.finditer(part[2]):
                        at = declared.start(2) + part.start(2) + number.start()
                        add(path, at, number[0], f"{part[1]} =", declared.start())
        for _, start, beside, operand in compared([text]):
            for number in NUMBER.finditer(operand):
                if float(re.sub("f$", "", number[0])) != 0:
                    add(path, start + number.start(), number[0], beside)
    return sorted(guards, key=lambda guard: (guard.file, guard.at))


def tests_of(guard: Guard):
    """Files of tests, and which of each (-k), in the order in which they are asked."""
    return next(tests for part, tests in TESTS.items() if re.search(part, guard.name))
