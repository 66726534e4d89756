"""Programs and libraries that tests compile, kept for the next run."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def built(name, files, command, keep_old=False):
    """What ``command -o <path>`` makes of files, made once for their content.

    Args:
        name: its path in the folder ``build``.
        files: that it depends on.
        command: of a compiler.
        keep_old: what was made of other files or by another command stays.
    """
    known = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    known.update(" ".join(command).encode())
    stem = ROOT / "build" / name
    target = stem.with_name(f"{stem.name}-{known.hexdigest()[:16]}")
    if not target.exists():
        stem.parent.mkdir(parents=True, exist_ok=True)
        if not keep_old:
            for old in stem.parent.glob(f"{stem.name}-*"):
                old.unlink()
        with tempfile.TemporaryDirectory(dir=stem.parent) as scratch:
            made = Path(scratch) / "made"
            subprocess.run([*command, "-o", str(made)], check=True)
            shutil.move(made, target)
    return target
