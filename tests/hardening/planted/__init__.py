"""The mistakes that ``make mutants`` plants, and the tests that should notice each."""

from dataclasses import dataclass
from pathlib import Path

MASK, TAIL = "mask off by one", "dropped tail"
BARRIER, SHARE = "missing barrier", "wrong reciprocal share"
OTHER = "another"


@dataclass
class Mutant:
    """One mistake in a kernel: in ``file``, ``old`` (there once) becomes ``new``.

    Attributes:
        kernel: what it is planted in, as the table of docs/mutants.md calls it.
        kind: MASK, TAIL, BARRIER, SHARE or OTHER.
        what: it, in a few words; nothing where the kind says it all.
        file: from the root of the tree.
        old: a line or more.
        new: what becomes of it.
        tests: a file of tests and which of them (-k): the narrowest that should see it.
    """

    kernel: str
    kind: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, str]

    @property
    def name(self) -> str:
        """How it is listed."""
        return f"{self.kernel}: {self.what or self.kind}"


def find_tests(tree: Path, name: str) -> Path:
    """A file or folder of tests in a tree.

    ``name`` is its path from the root. A file may also lie in another folder of tests/, where no
    two files have one name.
    """
    path = tree / name
    return path if path.exists() else next((tree / "tests").rglob(path.name))
