"""Writes what Hugging Face's kernel-builder and `kernels` read: ``python hub/write.py FOLDER``.

`kernels` imports a kernel under a name of its own, so that several versions of it can be loaded. In
the copy written here imports are therefore relative, and the operators are under that name, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The translator and the command line are applications; kernels/ may be a link in the package.
LEFT_OUT = ("__main__.py", "cli.py", "seq2seq", "kernels")
# Beside where the binaries would be, for the message that they are missing.
WHY_NOT = "a copy from the Hub has the Triton kernels only, the Python package has the others"
OWN_NAME = "__name__.partition('.')[0]"
NAMES = {
    r'f?"bahdanau_fast(\.|::)': rf'f"{{{OWN_NAME}}}\1',
    r'(?<!=)"_?bahdanau_fast"': OWN_NAME,
    r"\(torch\.ops\.bahdanau_fast,": f"(getattr(torch.ops, {OWN_NAME}),",
    r'^    "seq2seq",\n': "",
}


def rewritten(text: str, depth: int) -> str:
    """A module for the copy, from one ``depth`` levels below what the package lies in."""
    imports = {
        r"^( *)from bahdanau_fast(?:\.([\w.]+))? import ": rf"\1from {'.' * depth}\2 import ",
        r"^import bahdanau_fast\.(\w+)": rf"from {'.' * depth} import \1",
    }
    for pattern, by in (imports | NAMES).items():
        text = re.sub(pattern, by, text, flags=re.MULTILINE)
    return text


def copy() -> dict[str, bytes]:
    """The files of the copy, by their paths in it."""
    files = {f"{name}.why.txt": WHY_NOT for name in ("_C_cpu", "_C_cuda")}
    for folder, place in ((ROOT / "bahdanau_fast", ""), (ROOT / "kernels", "kernels")):
        for source in folder.rglob("*.py"):
            inner = source.relative_to(folder)
            if inner.parts[0] not in LEFT_OUT:
                path = place / inner
                files[path.as_posix()] = rewritten(source.read_text("utf-8"), len(path.parts))
    return {path: files[path].encode() for path in sorted(files)}


def metadata(general: dict[str, Any], backend: str, files: dict[str, bytes]) -> dict[str, Any]:
    """What `kernels` asks of a variant; it is imported under the id."""
    hashes = {path: hashlib.sha256(content).digest() for path, content in files.items()}
    digest = {path: base64.b64encode(value).decode() for path, value in hashes.items()}
    unique = hashlib.sha256(b"".join(hashes.values())).hexdigest()[:7]
    return {
        "id": f"_bahdanau_fast_{backend}_{unique}",
        **{key: general[key] for key in ("name", "version", "license")},
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest},
    }


def main(out: Path) -> None:
    """Write a new folder: build/ is for the Hub, the rest for kernel-builder."""
    out.mkdir(parents=True)
    build_toml, files = (HERE / "build.toml").read_text("utf-8"), copy()
    # A number, string or list on a line is JSON, too; Python reads TOML from 3.11 on only.
    general = {key: json.loads(of) for key, of in re.findall(r"^(\w+) = (.+)$", build_toml, re.M)}
    for backend in (None, *general["backends"]):
        folder = out / (f"build/torch-{backend}" if backend else "torch-ext/bahdanau_fast")
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if backend:
            of = json.dumps(metadata(general, backend, files), indent=2)
            (folder / "metadata.json").write_text(of + "\n", "utf-8")
    shutil.copy(HERE / "build.toml", out)
    for folder in (out, out / "build"):  # where kernel-builder makes it, and from where it uploads
        shutil.copy(HERE / "CARD.md", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
