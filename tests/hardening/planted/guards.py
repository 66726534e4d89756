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
CLAMPED = re.compile(rf"\b(clamp|at_most|at_least)(?:<A>)?\((?:{GROUP}|[^(),])*, ([^()]*)\)")
CONSTANT = re.compile(r"\bconstexpr (float|double|A) (\w+(?:<\w+>)? = [^;]*);")
NUMBER = re.compile(rf"(?<![\w.])(?:{FLOATING}|(?<=A\()[1-9]\d*(?=\)))")

CPU, CUDA = "tests/cpu/test_cpu_ranges.py", "tests/cuda/host/test_cuda_ranges.py"
LARGEST = "tests/cuda/host/test_cuda_kernels.py"
GENERAL = ("tests/cpu/test_accuracy.py", "general and (10.0 or 50.0)")
# The tests that look at both sides of a guard, by what its name has; the first that fits.
TESTS = {
    "philox.h": (("tests/contract/test_dropout.py", ""),),
    "tensors.h": (("tests/contract/test_operator_errors.py", ""),),
    "cpu/.*highest ": (("tests/cpu/test_decoding.py", "any_size"),),
    r"cpu/.*(lowest|exponent) ": ((CPU, "(table or least) and not shifted"),),
    "cpu/.*shared ": ((CPU, "four"),),
    r"cpu/.*(kShiftLimit|abs<A>\(a\)) ": ((CPU, "shifted"),),
    "cpu/.*kSaturated ": ((CPU, "saturated"),),
    r"cpu/.*(least|slope) ": ((CPU, "slope or four"),),
    "cpu/.*kSaturates ": (GENERAL,),
    "cpu/.*(y|magnitude) ": ((CPU, "sum"), GENERAL),
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
# Wrong guards that the tests pass with: the results keep the parity rule, and this is why.
SPEED = "only slower: what is done on the other side is as exact"
EAGER = "eager's own error there is as large as the slope"
SIGMOID = "exponents above 0 are a cell's sigmoid's, which is 0 beside 1 from there on"
IN_RANGE = "products of four are still in range: the limit has a margin of two"
OF_16_BITS = "tanh is off by 2^-18 of itself at most, less than a rounding of 16 bits"
TANH = "cuda/kernels/tanh.h:"
ELEMENTARY, TYPES, SCORE = (f"cpu/kernels/{name}.h:" for name in ("elementary", "types", "score"))
EXPLAINED = {
    ("common/philox.h: p < 1.0", "doubled"): "where p is 1 nothing is kept, and no scale is used",
    (f"{ELEMENTARY} least = 1e-6", "doubled"): EAGER,
    (f"{ELEMENTARY} least = 1e-6", "halved"): "still four roundings of tanh",
    (f"{ELEMENTARY} least = 1e-13", "doubled"): EAGER,
    (f"{ELEMENTARY} least = 1e-13", "halved"): "still hundreds of roundings of tanh",
    (f"{TYPES} exponent = 43.0f", "halved"): SPEED,
    (f"{TYPES} shared = 9.0f", "halved"): SPEED,
    (f"{TYPES} exponent = 354.0", "halved"): SPEED,
    (f"{TYPES} shared = 80.0", "halved"): SPEED,
    (f"{ELEMENTARY} highest = 88.0f", "halved"): SIGMOID,
    (f"{ELEMENTARY} highest = 709.0", "doubled"): SIGMOID,
    (f"{ELEMENTARY} highest = 709.0", "halved"): SIGMOID,
    (f"{SCORE} abs<A>(a) <= 1", "halved"): "exp(x) - 1 is off by a rounding of tanh there",
    (f"{ELEMENTARY} y <= 1", "doubled"): "the series is off by some roundings of tanh up to 2",
    (f"{TANH} clamp 9.5f", "halved"): "tanh is off by 1.5e-4, less than a rounding of 16 bits",
    (f"{ELEMENTARY} magnitude < 0.875", "doubled"): "1 - tanh^2 is what eager computes",
    (f"{ELEMENTARY} magnitude < 0.875", "halved"): SPEED,
    (f"{ELEMENTARY} slope < 2.2e-16", "doubled"): EAGER,
    (f"{TANH} u < 2e-9f", "doubled"): EAGER,
    (f"{TANH} u < 2e-9f (2)", "doubled"): EAGER,
    (f"{TANH} at_most 2147483648.0f", "doubled"): "four that are cut then add up to 0, not 2^-30",
    (f"{TANH} at_most 2147483648.0f (2)", "doubled"): "four that are cut then have tanh 1",
    ("cpu/kernels/general/activation.h: kSaturates = 19.1", "doubled"): IN_RANGE,
    (f"{SCORE} kSaturated = 1.5", "doubled"): SPEED,
    (f"{SCORE} kSaturated = 1.5", "halved"): SPEED,
    (f"{TANH} kFactored = 9.5f", "halved"): SPEED,
    (f"{TANH} kClamped = 15.0f", "halved"): SPEED,
    (f"{TANH} kKeyLimit = 25.0f", "doubled"): "what is infinite is cut to 2^31 afterwards",
    (f"{TANH} kLargestW = 4e4f", "doubled"): IN_RANGE,
    (f"{TANH} kLargestW = 4e4f", "halved"): SPEED,
    (f"{TANH} kLargestW = 1e8f", "doubled"): IN_RANGE,
    (f"{TANH} kLargestW = 1e8f", "halved"): SPEED,
    (f"{TANH} kSmallest = 0.5f", "doubled"): SPEED,
    (f"{TANH} kSmallest = 0.5f", "halved"): "a rounding of 1 + E is some of tanh from 1/4 on",
    (f"{TANH} kSmallest = 0.03f", "doubled"): SPEED,
    (f"{TANH} kSmallest = 0.03f", "halved"): OF_16_BITS,
    (f"{TANH} size <= 0.6f", "halved"): "1 - 2 r is off by some roundings of tanh from 0.3 on",
    (f"{TANH} fabsf(x[k]) < 0.03f", "doubled"): "x - x^3 / 3 is off by 2^-19 of tanh at 0.06",
    (f"{TANH} fabsf(x[k]) < 0.03f", "halved"): OF_16_BITS,
    (f"{TANH} u < 3e-16", "doubled"): EAGER,
    (f"{TANH} u < 3e-16", "halved"): "tanh has one rounding there, as eager's has",
    (f"{TANH} u < 1e-13", "doubled"): EAGER,
    (f"{TANH} u < 1e-13", "halved"): "still hundreds of roundings of tanh",
    (f"{TANH} at_most 2147483648.0f", "halved"): OF_16_BITS,
    (f"{ELEMENTARY} y <= 1", "halved"): "1 - exp(-y) is off by a rounding or two from 1/2 on",
    (f"{ELEMENTARY} slope < 2.2e-16", "halved"): "the slope is exact there",
    (f"{TYPES} kShiftLimit = 0.5", "halved"): "exp(2c) above 1/4 is off by a rounding of tanh",
}


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
