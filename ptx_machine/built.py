"""Programs and libraries that tests compile, kept for the next run."""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

needs_compiler = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="what runs the kernels is compiled by g++ for x86-64",
)


def built(name: str, files: Sequence[Path], command: Sequence[str]) -> Path:
    """What ``command -o <path>`` makes of files, made once for their content.

    Args:
        name: its path in the folder ``build``; what was made of other files goes.
        files: that it depends on.
        command: of a compiler.
    """
    known = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    known.update(" ".join(command).encode())
    stem = ROOT / "build" / name
    target = stem.with_name(f"{stem.name}-{known.hexdigest()[:16]}")
    if target.exists():
        return target
    stem.parent.mkdir(parents=True, exist_ok=True)
    with open(stem.with_name(f".{stem.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not target.exists():
            for old in stem.parent.glob(f"{stem.name}-*"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=stem.parent) as scratch:
                made = Path(scratch) / "made"
                subprocess.run([*command, "-o", str(made)], check=True)
                shutil.move(made, target)
    return target
