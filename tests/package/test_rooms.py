"""No two test modules of one name."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def known(folder):
    """Files of the repository below a folder, from its root: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {Path(line) for line in listed.stdout.splitlines()}
    return sorted(path for path in found if (ROOT / path).is_file())


def test_every_module_of_tests_has_a_name_of_its_own():
    # All their folders are on one path: of two modules of a name, one would hide the other.
    files = [path for path in known("tests") if path.suffix == ".py" and path.stem != "conftest"]
    packages = {path.parent for path in files if path.stem == "__init__"}
    modules = sorted([*packages, *(path for path in files if path.parent not in packages)])
    names = [path.stem for path in modules]
    assert [path for path in modules if names.count(path.stem) > 1] == []
