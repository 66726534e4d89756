"""No number decides how a call is computed but those of limits.py."""

import ast
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bahdanau_fast import limits
from bahdanau_fast.limits import GPU_FAMILIES, PRECISION

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bahdanau_fast"
# An application has settings of its own; kernels/ (outside of the package here) holds device code,
# with the ranges of its formulas, and the tiles it is cut into.
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "limits.py" and PACKAGE / "seq2seq" not in path.parents
]

# Numbers that decide nothing about how a call is computed: constants, and functions.
ALLOWED = {
    "backends.MOST_ROUTES": "routes remembered before they are decided again, to the same end",
    "backends.availability.CAPABILITY": "what the kernels need, to be there at all",
    "backends.availability.TORCH": "likewise",
    "backends.availability.TRITON": "likewise",
    "backends.availability._check_whole": "bytes of the header of an ELF file",
    "fuse.checking.SAME": "how far two computations of the same formula may be apart",
    "memory.projected_keys.SAMPLED_ROWS": "rows looked at to see a change of the weight",
    "ops.decode._fake": "arguments of an operator",
}
PLAIN = (-1, 0, 1)
RANKS = (2, 3)
CLAMPS = ("min", "max", "clamp")


def numbers_in(node):
    """Literal numbers of an expression, but for -1, 0 and 1."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return [] if value in PLAIN else [value]
        case ast.UnaryOp(operand=operand):
            return numbers_in(operand)
        case ast.BinOp(left=left, right=right):
            return numbers_in(left) + numbers_in(right)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return [number for part in parts for number in numbers_in(part)]
    return []


def names_in(node):
    """Names and attributes that an expression computes with, but for fields of limits."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(attr=name):
            return [] if "limits" in ast.unparse(node).lower() else [name]
        case ast.UnaryOp(operand=operand):
            return names_in(operand)
        case ast.BinOp(left=left, right=right):
            return names_in(left) + names_in(right)
        case ast.Tuple(elts=parts):
            return [name for part in parts for name in names_in(part)]
    return []


def constants_of(tree):
    """Names that a module gives a number to, by assignment or as a default of an argument."""
    found = set()
    for node in ast.walk(tree):
        pairs = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=False))
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value) if value is not None:
                pairs = [(target, value)]
            case ast.arguments(posonlyargs=first, args=others, defaults=defaults):
                arguments = [*first, *others][-len(defaults) :] if defaults else []
                pairs = list(zip(arguments, defaults, strict=True))
                pairs += list(zip(node.kwonlyargs, node.kw_defaults, strict=True))
        for target, value in pairs:
            if value is not None and numbers_in(value) and is_literal(value):
                found.add(ast.unparse(target).split(":")[0].split(".")[-1])
    return found


def is_literal(node):
    """Whether an expression is made of literals alone."""
    return not any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node))


def is_rank(node):
    """Whether an expression is a number of dimensions or of parts."""
    return (isinstance(node, ast.Attribute) and node.attr == "ndim") or (
        isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("dim", "len")
    )


def deciding(source, module, shared=frozenset()):
    """Comparisons and clamps with a number: (place, constants, code) of each.

    Args:
        source: Python.
        module: its name in the package.
        shared: constants of other modules.
    """
    tree = ast.parse(source)
    constants = constants_of(tree) | shared
    found = []

    def visit(node, place):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            place = f"{place}.{node.name}"
        sides = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CLAMPS:
            sides = node.args
        numbers = [number for side in sides for number in numbers_in(side)]
        if all(number in RANKS for number in numbers) and any(map(is_rank, sides)):
            numbers = []
        names = [name for side in sides for name in names_in(side) if name in constants]
        if numbers or names:
            found.append((place, names, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    visit(tree, module)
    return found


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def test_no_number_decides_outside_the_limits():
    trees = {module_of(path): path.read_text() for path in FILES}
    assert {"backends.route", "functional", "ops.projection", "memory.key_cache"} <= set(trees)
    homes = {}
    for module, source in trees.items():
        for name in constants_of(ast.parse(source)):
            if name.isupper():
                homes.setdefault(name, []).append(f"{module}.{name}")
    used, wrong = set(), []
    for module, source in trees.items():
        for place, names, code in deciding(source, module, frozenset(homes)):
            known = [home for name in names for home in homes.get(name, [f"{place}.{name}"])]
            excuses = [place] if place in ALLOWED else known
            used.update(excuses)
            if not excuses or not set(excuses) <= set(ALLOWED):
                wrong.append(f"{place}: {code}")
    assert not wrong
    assert used == set(ALLOWED)


@pytest.mark.parametrize(
    "planted",
    [
        "def f(x): return x.numel() > 4096",
        "def f(x): return 8 * x.shape[1] <= x.shape[0]",
        "def f(x): return max(x.shape[0], 16)",
        "def f(x): return 2 < len(x) < 9",
        "def f(x): return x.shape[1] in (4, 8)",
        "_MOST = 1 << 20\ndef f(x): return x.numel() < _MOST",
        "def f(x):\n    most = 77\n    return x.numel() < most",
        "def f(x, most=77): return x.numel() < most",
        "def f(x, *, most=77): return x.numel() < most",
        "class A:\n    most: int = 5\n    def f(self, x): return x.numel() < self.most",
        "from ops import MOST\ndef f(x): return x.numel() < MOST",
        "import ops\ndef f(x): return x.numel() < 2 * ops.MOST",
    ],
)
def test_a_planted_number_is_found(planted):
    assert deciding(planted, "planted", frozenset({"MOST"}))


@pytest.mark.parametrize(
    "plain",
    [
        "def f(x): return x.dim() == 3 and len(x.shape) != 2 and x.ndim > 2",
        "def f(x): return x.numel() > 0 and x.shape[1] == 1 and x.stride(-1) >= -1",
        "def f(x): return x.numel() >= limits.LIMITS.table_elements",
        "def f(x): return max(x.shape[0], 1) * 64 + 3",
        "def f(x, most=2): return most is None",
    ],
)
def test_ranks_and_limits_are_no_such_numbers(plain):
    assert not deciding(plain, "plain", frozenset({"MOST"}))


# Of csrc/common/limits.h, by what the Python calls it.
SHARED = {
    "kMaxFp64GpuElements": PRECISION.fp64_gpu_elements,
    "kMaxFp64CpuElements": PRECISION.fp64_cpu_elements,
    "kMaxFp64ForwardTableElements": PRECISION.fp64_forward_table_elements,
    "kMaxFp32NormOfW": PRECISION.fp32_norm,
    "kDecodeQueries": limits.OTHER_GPU.step_queries,
    "kRawQueries": limits.OTHER_GPU.own_queries,
    "kOwnWeight": limits.OTHER_GPU.own_weight,
}


def test_the_kernels_have_the_same_limits():
    text = (ROOT / "csrc/common/limits.h").read_text()
    written = dict(re.findall(r"\b(k[A-Z]\w*) = ([\d. *]+)[,;]", text))
    for name, value in SHARED.items():
        assert eval(written[name]) == value, name
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[hc]*"))
    for name in SHARED:
        assert len(re.findall(rf"\b{name} =", sources)) == 1, name


def test_every_gpu_has_the_limits_the_kernels_were_compiled_with():
    compiled = ("step_queries", "own_queries", "own_weight")
    for family in GPU_FAMILIES.values():
        for name in compiled:
            assert asdict(family)[name] == asdict(limits.OTHER_GPU)[name]
